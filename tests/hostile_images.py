"""Files that claim to be images and are not, or not quite, or too much so: by name, with a word that the refusal says."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from PIL import Image


def encoded(format: str, image: Image.Image | None = None, **options: Any) -> bytes:
    """A sound image file."""
    out = io.BytesIO()
    (noise(40, 30) if image is None else image).save(out, format, **options)
    return out.getvalue()


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def _png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, data: bytes, *, bits: int = 8, color: int = 2, extra: bytes = b"") -> bytes:
    """With whatever header and data."""
    head = _png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + extra + _png_chunk(b"IDAT", data) + _png_chunk(b"IEND", b"")


def bmp(width: int, height: int, bits: int = 24, data: bytes = b"", compression: int = 0) -> bytes:
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, compression, len(data), 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54 + len(data), 0, 0, 54) + head + data


def gif(width: int, height: int, data: bytes = b"\x02\x02\x44\x01\x00") -> bytes:
    screen = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    return screen + b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + data + b";"


def tiff(tags: Mapping[int, tuple[int, int, int]], data: bytes = b"", next_ifd: int = 0) -> bytes:
    """*tags*: type, count and value by number."""
    entries = b"".join(struct.pack("<HHII", tag, *given) for tag, given in sorted(tags.items()))
    ifd = struct.pack("<H", len(tags)) + entries + struct.pack("<I", next_ifd)
    return b"II*\0" + struct.pack("<I", 8) + ifd + data


def _tiff_of(width: int, height: int, *, n_bytes: int = 4, offset: int = 200, compression: int = 1) -> bytes:
    tags = {256: (4, 1, width), 257: (4, 1, height), 258: (3, 1, 8), 259: (3, 1, compression), 262: (3, 1, 1)}
    tags |= {273: (4, 1, offset), 277: (3, 1, 1), 278: (4, 1, height), 279: (4, 1, n_bytes)}
    return tiff(tags, b"\0" * 64)


def _cut(data: bytes, share: float) -> bytes:
    return data[: int(len(data) * share)]


def _flipped(data: bytes, begin: int, n: int) -> bytes:
    """Some bytes are other ones."""
    return data[:begin] + bytes(byte ^ 0x5A for byte in data[begin : begin + n]) + data[begin + n :]


def _large_webp() -> bytes:
    """A canvas as large as the format has, with nothing on it."""
    vp8x = b"\x02\0\0\0" + struct.pack("<I", 16382)[:3] + struct.pack("<I", 16382)[:3]
    anim = b"ANIM" + struct.pack("<IIH", 6, 0, 0)
    body = b"WEBPVP8X" + struct.pack("<I", len(vp8x)) + vp8x + anim
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _zeros(n: int) -> bytes:
    return zlib.compress(bytes(n), 9)


_WHITE_ROW = b"\0" + b"\xff" * 3 * 4

HOSTILE: Mapping[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "empty"),
    "one byte": (lambda: b"\x89", "none of"),
    "text": (lambda: b"I am a picture, honestly" * 10, "none of"),
    "svg": (lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><script/></svg>', "none of"),
    "html": (lambda: b"<!doctype html><img src=x>", "none of"),
    "postscript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(%pipe%id) (r) file\n%%EOF", "none of"),
    "zip": (lambda: b"PK\x03\x04" + bytes(60), "none of"),
    "other format": (lambda: encoded("PPM"), "none of"),
    "one pixel": (lambda: encoded("PNG", noise(1, 1)), "1 x 1"),
    "one column": (lambda: encoded("PNG", noise(1, 500)), "1 x 500"),
    "no pixels, BMP": (lambda: bmp(0, 0), ""),
    "no pixels, PNG": (lambda: png(0, 0, _zeros(4)), ""),
    "signature alone": (lambda: b"\x89PNG\r\n\x1a\n", "none of"),
    "cut JPEG": (lambda: _cut(encoded("JPEG", noise(200, 200)), 0.4), "broken"),
    "cut PNG": (lambda: _cut(encoded("PNG", noise(200, 200)), 0.5), "broken"),
    "cut WebP": (lambda: _cut(encoded("WEBP", noise(200, 200)), 0.5), ""),
    "cut BMP": (lambda: _cut(encoded("BMP", noise(200, 200)), 0.5), "broken"),
    "cut TIFF": (lambda: _cut(encoded("TIFF", noise(200, 200)), 0.5), ""),
    "cut GIF": (lambda: _cut(encoded("GIF", noise(200, 200)), 0.3), "broken"),
    "flipped JPEG head": (lambda: _flipped(encoded("JPEG"), 2, 300), ""),
    "flipped PNG data": (lambda: _flipped(encoded("PNG", noise(64, 64)), 60, 400), "broken"),
    "wrong checksum": (lambda: _flipped(png(4, 4, zlib.compress(_WHITE_ROW * 4)), 29, 4), ""),
    "bomb, PNG": (lambda: png(30000, 30000, _zeros(1 << 20)), "30000 x 30000"),
    "bomb in bounds, PNG": (lambda: png(8000, 8000, _zeros(1 << 20)), "8000 x 8000"),
    "bomb, WebP": (_large_webp, ""),
    "bomb, GIF": (lambda: gif(65535, 65535), "65535 x 65535"),
    "bomb, BMP": (lambda: bmp(60000, 60000), "60000 x 60000"),
    "bomb, TIFF": (lambda: _tiff_of(100000, 100000), "100000 x 100000"),
    "a thread, PNG": (lambda: png(2, 1 << 20, _zeros(7 << 20)), "a side longer"),
    "negative size": (lambda: bmp(-5, 5, 24, bytes(100)), ""),
    "data elsewhere": (lambda: _tiff_of(64, 64, n_bytes=4096, offset=1 << 30), ""),
    "unknown compression": (lambda: _tiff_of(64, 64, n_bytes=64, compression=60000), ""),
    "a directory that is its own next": (lambda: tiff({256: (4, 1, 9)}, next_ifd=8), ""),
    "text that unpacks": (lambda: png(4, 4, b"", extra=_png_chunk(b"zTXt", b"a\0\0" + _zeros(200 << 20))), "broken"),
    "no data": (lambda: png(64, 64, b""), "broken"),
    "data that ends early": (lambda: png(64, 64, zlib.compress(b"\0" * 100)), "broken"),
    "no palette": (lambda: png(4, 4, zlib.compress(b"\0" * 20), color=3)[:-16], ""),
}
