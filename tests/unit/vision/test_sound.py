"""Sound from outside: WAV files of every kind that is read, and bytes that are none."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from puna.errors import BadRequest
from puna.vision.sound import is_sound, samples


def wav(
    values: npt.NDArray[Any],
    *,
    rate: int = 16_000,
    kind: int = 1,
    n_bits: int = 16,
    extensible: bool = False,
    before: bytes = b"",
) -> bytes:
    """*values* [n, channels] as the file is to have them."""
    n_channels = values.shape[1]
    body = values.tobytes()
    form = struct.pack("<HHIIHH", 0xFFFE if extensible else kind, n_channels, rate, rate * n_channels * n_bits // 8, 0, n_bits)
    if extensible:
        form += struct.pack("<HHIH14s", 22, n_bits, 0, kind, b"\0" * 14)
    parts = b"fmt " + struct.pack("<I", len(form)) + form + before + b"data" + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", 4 + len(parts)) + b"WAVE" + parts


def tone(n: int = 400, frequency: float = 50.0) -> npt.NDArray[np.float64]:
    return 0.7 * np.sin(2 * np.pi * frequency * np.arange(n) / 16_000)


def _24_bits(values: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    numbers = np.round(values * (1 << 23)).astype("<i4")
    return np.ascontiguousarray(numbers.view(np.uint8).reshape(-1, 4)[:, :3]).reshape(len(values), -1)


FORMATS: dict[str, tuple[Any, int, int, float]] = {  # how values are written, kind, bits, and how exactly they come back
    "8 bits": (lambda x: np.round(x * 128 + 128).astype(np.uint8)[:, None], 1, 8, 1 / 128),
    "16 bits": (lambda x: np.round(x * 32768).astype("<i2")[:, None], 1, 16, 1 / 32768),
    "32 bits": (lambda x: np.round(x * 2147483648).astype("<i4")[:, None], 1, 32, 1e-6),
    "floats": (lambda x: x.astype("<f4")[:, None], 3, 32, 1e-6),
    "long floats": (lambda x: x.astype("<f8")[:, None], 3, 64, 1e-6),
}


@pytest.mark.parametrize("extensible", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_samples(name: str, extensible: bool) -> None:
    write, kind, n_bits, exact = FORMATS[name]
    data = wav(write(tone()), kind=kind, n_bits=n_bits, extensible=extensible)
    assert is_sound(data)
    found = samples(data, 16_000)
    assert found.dtype == np.float32
    assert np.abs(found - tone()).max() <= exact


def test_24_bits() -> None:
    body = _24_bits(tone())
    data = wav(body.reshape(len(body), 3), n_bits=24)
    # Three bytes were counted as three channels.
    data = data.replace(struct.pack("<HHI", 1, 3, 16_000), struct.pack("<HHI", 1, 1, 16_000))
    assert np.abs(samples(data, 16_000) - tone()).max() < 1e-6


def test_channels_are_averaged_and_other_parts_passed_over() -> None:
    both = np.stack([tone(), np.zeros(400)], 1)
    data = wav(both.astype("<f4"), kind=3, n_bits=32, before=b"LIST" + struct.pack("<I", 5) + b"notes\0")
    assert np.abs(samples(data, 16_000) - tone() / 2).max() < 1e-6


@pytest.mark.parametrize("rate", [8_000, 11_025, 44_100, 48_000])
def test_other_rates_become_the_wanted_one(rate: int) -> None:
    seconds = np.arange(rate) / rate
    found = samples(wav(np.sin(2 * np.pi * 20 * seconds).astype("<f4")[:, None], kind=3, n_bits=32, rate=rate), 16_000)
    assert len(found) == 16_000
    assert np.abs(found - np.sin(2 * np.pi * 20 * np.arange(16_000) / 16_000))[:-2].max() < 1e-3


def test_what_is_louder_than_can_be_is_cut() -> None:
    found = samples(wav(np.array([[3.0], [-2.0], [0.5]], "<f4"), kind=3, n_bits=32), 16_000)
    assert found.tolist() == [1.0, -1.0, 0.5]


def test_a_file_that_was_cut_off_is_as_long_as_it_is() -> None:
    data = wav(np.round(tone() * 32768).astype("<i2")[:, None])
    assert len(samples(data[:-101], 16_000)) == 400 - 51


WHOLE = wav(np.round(tone() * 32768).astype("<i2")[:, None])


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"ID3" + bytes(100), "MP3"),
        (b"\xff\xfb" + bytes(100), "MP3"),
        (b"fLaC" + bytes(100), "FLAC"),
        (b"OggS" + bytes(100), "Ogg"),
        (b"RIFF\0\0\0\0WAVE", "no samples"),
        (WHOLE[:12] + b"data" + struct.pack("<I", 4) + bytes(4), "in what its samples are"),
        (WHOLE[:12] + b"fmt " + struct.pack("<I", 4) + bytes(4), "cut off"),
        (WHOLE[:44], "empty"),
        (WHOLE.replace(struct.pack("<HH", 1, 1), struct.pack("<HH", 85, 1), 1), "format 85"),
        (WHOLE.replace(struct.pack("<HH", 1, 1), struct.pack("<HH", 1, 0), 1), "0 channels"),
        (WHOLE.replace(struct.pack("<HH", 1, 1), struct.pack("<HH", 1, 9), 1), "9 channels"),
        (WHOLE.replace(struct.pack("<I", 16_000), struct.pack("<I", 1), 1), "1 samples a second"),
        (wav(np.array([[np.nan], [0], [0]], "<f4"), kind=3, n_bits=32), "no numbers"),
        (wav(np.zeros((1_900_000, 1), np.uint8), rate=1_000, n_bits=8), "longer than 30 minutes"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, says: str) -> None:
    assert is_sound(data)
    with pytest.raises(BadRequest, match=says):
        samples(data, 16_000)


def test_images_and_texts_are_no_sound() -> None:
    for data in (b"\x89PNG\r\n", b"RIFF\0\0\0\0WEBP", b"\xff\xd8\xff\xe0", b"", b"hello"):
        assert not is_sound(data)


@given(data=st.binary(max_size=200), begin=st.sampled_from([12, 20, 36, 44]))
def test_any_bytes_are_samples_or_refused(data: bytes, begin: int) -> None:
    try:
        found = samples(WHOLE[:begin] + data, 16_000)
    except BadRequest:
        return
    assert np.isfinite(found).all()
    assert np.abs(found).max() <= 1
