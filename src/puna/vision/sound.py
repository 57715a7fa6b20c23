"""Sound from outside: a WAV file as the samples of one channel, at the rate that a model listens at.

Plain arithmetic on bytes that nobody vouches for: what is made of them is as long as they are, whatever they say.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from puna.errors import BadRequest

Samples = npt.NDArray[np.float32]  # of one channel, from -1 to 1

MAX_SECONDS = 30 * 60
MAX_CHANNELS = 8
MIN_RATE, MAX_RATE = 1_000, 384_000

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
# What begins so is sound that is not read here, which people should be told.
_OTHERS = {b"ID3": "MP3", b"\xff\xfb": "MP3", b"\xff\xf3": "MP3", b"\xff\xf2": "MP3", b"fLaC": "FLAC", b"OggS": "Ogg"}


class _Format(NamedTuple):
    kind: int  # _PCM or _FLOAT
    n_channels: int
    rate: int
    n_bits: int


def is_sound(data: bytes) -> bool:
    return _is_wav(data) or _other(data) is not None


def _is_wav(data: bytes) -> bool:
    return data[:4] == b"RIFF" and data[8:12] == b"WAVE"


def _other(data: bytes) -> str | None:
    return next((name for begin, name in _OTHERS.items() if data.startswith(begin)), None)


def samples(data: bytes, rate: int) -> Samples:
    """Of a file that is_sound; channels are averaged, and between two samples the line is taken where rates differ.

    Errors: BadRequest saying what is wrong with the sound.
    """
    if not _is_wav(data):
        raise BadRequest(f"sound in {_other(data)} is not read; send a WAV file")
    form, body = _parts(data)
    values = _values(form, body)
    n_frames = len(values) // form.n_channels
    if n_frames < 2:
        raise BadRequest("the sound is empty")
    if n_frames > MAX_SECONDS * form.rate:
        raise BadRequest(f"the sound is longer than {MAX_SECONDS // 60} minutes")
    mono: Samples = values[: n_frames * form.n_channels].reshape(n_frames, form.n_channels).mean(axis=1, dtype=np.float32)
    if not np.isfinite(mono).all():
        raise BadRequest("the sound holds what are no numbers")
    found: Samples = np.clip(_at_rate(mono, form.rate, rate), np.float32(-1), np.float32(1))
    return found


def _parts(data: bytes) -> tuple[_Format, bytes]:
    """What the file says of itself, and its samples."""
    form: _Format | None = None
    for name, body in _chunks(data):
        if name == b"fmt ":
            form = _format(body)
        elif name == b"data":
            if form is None:
                raise BadRequest("the WAV file does not say in what its samples are")
            return form, body
    raise BadRequest("the WAV file has no samples")


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The last may be cut off, as of files that were written while nobody knew how long they would get."""
    at = 12
    while at + 8 <= len(data):
        name, length = struct.unpack_from("<4sI", data, at)
        yield name, data[at + 8 : at + 8 + length]
        at += 8 + length + length % 2


def _format(body: bytes) -> _Format:
    if len(body) < 16:
        raise BadRequest("the WAV file's format is cut off")
    kind, n_channels, rate, _, _, n_bits = struct.unpack_from("<HHIIHH", body)
    if kind == _EXTENSIBLE and len(body) >= 26:
        (kind,) = struct.unpack_from("<H", body, 24)
    if (kind, n_bits) not in ((_PCM, 8), (_PCM, 16), (_PCM, 24), (_PCM, 32), (_FLOAT, 32), (_FLOAT, 64)):
        raise BadRequest(f"the WAV file's format {kind} with {n_bits} bits is not read; send PCM of 8 to 32 bits or floats")
    if not 1 <= n_channels <= MAX_CHANNELS or not MIN_RATE <= rate <= MAX_RATE:
        raise BadRequest(f"a WAV file of {n_channels} channels with {rate} samples a second is not read")
    return _Format(kind, n_channels, rate, n_bits)


def _values(form: _Format, body: bytes) -> Samples:
    """One channel beside the other."""
    width = form.n_bits // 8
    whole = body[: len(body) // width * width]
    if form.kind == _FLOAT:
        return np.frombuffer(whole, f"<f{width}").astype(np.float32)
    if width == 1:
        return (np.frombuffer(whole, np.uint8).astype(np.float32) - np.float32(128)) / np.float32(128)
    if width == 3:
        parts = np.frombuffer(whole, np.uint8).reshape(-1, 3).astype(np.int32)
        numbers = parts[:, 0] | parts[:, 1] << 8 | (parts[:, 2] ^ 0x80) - 0x80 << 16
        return numbers.astype(np.float32) / np.float32(1 << 23)
    return np.frombuffer(whole, f"<i{width}").astype(np.float32) / np.float32(1 << (form.n_bits - 1))


def _at_rate(mono: Samples, rate: int, wanted: int) -> Samples:
    if rate == wanted:
        return mono
    n = max(int(len(mono) * wanted / rate), 2)
    found: Samples = np.interp(np.arange(n) * (rate / wanted), np.arange(len(mono)), mono).astype(np.float32)
    return found
