"""Images as pixels: upright, over white, their first frame; and every refusal says what is wrong."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from puna.errors import BadRequest
from puna.vision.images import decode as module
from puna.vision.images.decode import decode
from tests.hostile_images import HOSTILE, encoded, noise, png


def pixels(data: bytes) -> npt.NDArray[np.uint8]:
    found = decode(data)
    return np.frombuffer(found.rgb, np.uint8).reshape(found.height, found.width, 3)


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF"])
def test_formats_without_loss_give_the_pixels_themselves(format: str) -> None:
    assert (pixels(encoded(format, noise(40, 30))) == np.asarray(noise(40, 30))).all()


@pytest.mark.parametrize(("format", "options"), [("JPEG", {"quality": 95}), ("WEBP", {"lossless": True}), ("GIF", {})])
def test_the_other_formats_are_read(format: str, options: dict[str, object]) -> None:
    image = Image.new("RGB", (40, 30), (200, 10, 60))
    assert np.abs(pixels(encoded(format, image, **options)).astype(int) - [200, 10, 60]).max() <= 3


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_an_image_stands_as_the_camera_was_held(orientation: int, format: str) -> None:
    """By the definition of the tag: where the first row and the first column of what is stored are in the scene."""
    scene = np.zeros((24, 40, 3), np.uint8)
    scene[:12, :20], scene[:12, 20:], scene[12:, :20] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    stored = {
        1: scene,
        2: scene[:, ::-1],
        3: scene[::-1, ::-1],
        4: scene[::-1],
        5: scene.transpose(1, 0, 2),
        6: scene.transpose(1, 0, 2)[::-1],
        7: scene.transpose(1, 0, 2)[::-1, ::-1],
        8: scene.transpose(1, 0, 2)[:, ::-1],
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 95} if format == "JPEG" else {"lossless": True} if format == "WEBP" else {}
    found = pixels(encoded(format, Image.fromarray(np.ascontiguousarray(stored)), exif=exif, **options))
    assert found.shape == scene.shape
    assert np.abs(found.astype(int)[2:10, 2:18] - [255, 0, 0]).max() < 12
    assert np.abs(found.astype(int)[2:10, 22:38] - [0, 255, 0]).max() < 12
    assert np.abs(found.astype(int)[14:22, 2:18] - [0, 0, 255]).max() < 12


@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF"])
def test_what_is_transparent_is_turned_too(format: str) -> None:
    stored = np.full((24, 40, 4), 255, np.uint8)
    stored[:12, :20] = (255, 0, 0, 255)
    stored[12:, :20, 3] = 0
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter to the right
    options = {"lossless": True} if format == "WEBP" else {}
    found = pixels(encoded(format, Image.fromarray(stored), exif=exif, **options))
    over_white = np.where(stored[..., 3:] == 0, 255, stored[..., :3])
    assert (found == np.rot90(over_white, -1)).all()


def test_an_orientation_that_cannot_be_understood_says_nothing() -> None:
    sound = encoded("JPEG", noise(40, 30))
    segment = b"Exif\0\0II*\0\xff\xff\xff\xff"
    assert pixels(sound[:2] + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + sound[2:]).shape == (30, 40, 3)


@pytest.mark.parametrize(
    ("mode", "color", "shown"),
    [
        ("RGBA", (0, 0, 0, 0), (255, 255, 255)),
        ("RGBA", (255, 0, 0, 128), (255, 127, 127)),
        ("LA", (0, 51), (204, 204, 204)),
        ("RGBA", (1, 2, 3, 255), (1, 2, 3)),
    ],
)
def test_what_is_transparent_shows_white(mode: str, color: tuple[int, ...], shown: tuple[int, ...]) -> None:
    assert np.abs(pixels(encoded("PNG", Image.new(mode, (8, 8), color))).astype(int) - shown).max() <= 1


def test_a_color_that_stands_for_nothing_shows_white() -> None:
    image = Image.new("P", (8, 8), 3)
    image.putpalette([0, 0, 0] * 3 + [10, 20, 30])
    assert (pixels(encoded("GIF", image, transparency=3)) == 255).all()
    assert (pixels(encoded("PNG", Image.new("RGB", (8, 8), (9, 9, 9)), transparency=(9, 9, 9))) == 255).all()


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "LAB"])
def test_every_kind_of_pixel_has_a_color(mode: str) -> None:
    image = noise(20, 10).convert("RGB")
    made = Image.new("LAB", (20, 10)) if mode == "LAB" else image.convert(mode)
    assert pixels(encoded("TIFF", made)).shape == (10, 20, 3)


def test_pixels_of_sixteen_bits_keep_their_brightness() -> None:
    row = b"\0" + b"".join(struct.pack(">H", value) for value in (0, 0x8000, 0xFFFF, 0x0100))
    found = pixels(png(4, 2, zlib.compress(row * 2), bits=16, color=0))
    assert found[0, :, 0].tolist() == [0, 128, 255, 1]


def test_of_several_frames_the_first_is_seen() -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ((250, 0, 0), (0, 250, 0))]
    for format in ("GIF", "TIFF", "PNG", "WEBP"):
        out = io.BytesIO()
        frames[0].save(out, format, save_all=True, append_images=frames[1:], **({"lossless": True} if format == "WEBP" else {}))
        assert pixels(out.getvalue())[4, 4, 0] > 240, format


@pytest.mark.parametrize("name", [name for name in HOSTILE if "unpacks" not in name])
def test_what_is_no_sound_image_is_refused_and_the_refusal_says_why(name: str) -> None:
    make, word = HOSTILE[name]
    with pytest.raises((BadRequest, MemoryError)) as refused:
        decode(make())
    assert word in str(refused.value)


def test_a_file_that_is_too_large_is_not_even_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 1000)
    with pytest.raises(BadRequest, match="more than 1000"):
        decode(encoded("PNG", noise(100, 100)))


def test_a_large_picture_of_one_color_is_none_of_those_that_fill_memory() -> None:
    assert pixels(encoded("PNG", Image.new("RGB", (2560, 1600), "white"))).shape == (1600, 2560, 3)
