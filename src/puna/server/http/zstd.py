"""Bodies that came compressed, taken apart within bounds of memory."""

from __future__ import annotations

import zstandard

_MAX_WINDOW_BYTES = 8 << 20
_AT_ONCE = 256  # bytes of input, which become some megabytes at most


def decompressed(data: bytes, max_bytes: int) -> bytes:
    """Errors: ValueError for what is no zstd, is not whole, or would be longer."""
    decoder = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
    frame = decoder.decompressobj()
    found = bytearray()
    try:
        for begin in range(0, len(data), _AT_ONCE):
            rest = data[begin : begin + _AT_ONCE]
            while rest:
                if frame.eof:
                    frame = decoder.decompressobj()
                found += frame.decompress(rest)
                rest = frame.unused_data
            if len(found) > max_bytes:
                raise ValueError(f"it has more than {max_bytes} bytes")
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    if not frame.eof:
        raise ValueError("it breaks off")
    return bytes(found)
