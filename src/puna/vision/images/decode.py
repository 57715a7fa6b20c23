"""From an image file's bytes to its pixels: upright, three channels, transparency over white. Several frames: the first.

Nothing of the file is believed. What is malformed beyond that ends the process it is read in (puna.vision.images.worker).
"""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import NamedTuple

from PIL import Image, UnidentifiedImageError

from puna.errors import BadRequest
from puna.vision.images.limits import (
    ALWAYS_ALLOWED_PIXELS,
    FORMATS,
    MAX_FILE_BYTES,
    MAX_PIXELS,
    MAX_PIXELS_PER_BYTE,
    MAX_SIDE,
    MIN_SIDE,
)

_ORIENTATION = 0x0112  # the tag's number in EXIF
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIXTEEN_BITS = ("I", "I;16", "I;16B", "I;16L", "I;16N")

Image.MAX_IMAGE_PIXELS = None  # the bound is checked here, where the refusal can say it


class Picture(NamedTuple):
    width: int
    height: int
    rgb: bytes  # row after row


def decode(data: bytes) -> Picture:
    """Errors: BadRequest saying what is wrong with the file; MemoryError."""
    if not data:
        raise BadRequest("it is empty")
    if len(data) > MAX_FILE_BYTES:
        raise BadRequest(f"its {len(data)} bytes are more than {MAX_FILE_BYTES}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                _check_size(image, len(data))
                image.load()
                pixels = _over_white(_upright(image))  # what is made of it no longer says how it was held
                return Picture(*pixels.size, pixels.tobytes())
        except UnidentifiedImageError:
            raise BadRequest(f"it is none of {', '.join(FORMATS)}, or its beginning is broken") from None
        except (BadRequest, MemoryError):
            raise
        except Exception as error:  # whatever a reader of a format raises over what it reads
            raise BadRequest(f"it is broken: {_first_line(error)}") from error


def _check_size(image: Image.Image, n_bytes: int) -> None:
    width, height = image.size
    n_pixels = width * height
    if min(width, height) < MIN_SIDE:
        raise BadRequest(f"{width} x {height} pixels are too few to see anything in")
    if n_pixels > MAX_PIXELS:
        raise BadRequest(f"{width} x {height} pixels are more than {MAX_PIXELS}")
    if max(width, height) > MAX_SIDE:
        raise BadRequest(f"{width} x {height} pixels have a side longer than {MAX_SIDE}")
    if n_pixels > ALWAYS_ALLOWED_PIXELS and n_pixels > MAX_PIXELS_PER_BYTE * n_bytes:
        raise BadRequest(f"{width} x {height} pixels in {n_bytes} bytes are more than any picture has")


def _over_white(image: Image.Image) -> Image.Image:
    if image.mode in _SIXTEEN_BITS:
        return image.point(lambda value: value * (1 / 256)).convert("L").convert("RGB")
    if image.mode == "F":
        raise BadRequest("its pixels are fractions, of which nobody knows which is white")
    if not image.has_transparency_data:
        return image.convert("RGB")
    own = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", own.size, "white"), own).convert("RGB")


def _upright(image: Image.Image) -> Image.Image:
    """As the camera was held. What cannot be understood of that says nothing."""
    orientation = None
    with contextlib.suppress(Exception):
        orientation = image.getexif().get(_ORIENTATION)
    turn = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return image if turn is None else image.transpose(turn)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
