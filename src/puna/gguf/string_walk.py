"""Find where each string of an array of length-prefixed strings begins.

The lengths form a chain, so in principle they are read one after the other. But nearly every string of a vocabulary is
shorter than 256 bytes and free of NULs: then a length shows as a non-zero byte before seven zero bytes. All such places
of a window are found at once, and where each of them points exactly at the next, the chain is proven from its first link
on. Strings that look different are stepped over one at a time.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from puna.gguf.strings import BrokenStringError

Buffer = Any  # an mmap or bytes: whatever struct and numpy read from
Offsets = np.ndarray[Any, np.dtype[np.int64]]

_WINDOW = 1 << 18
_LENGTH = struct.Struct("<Q")


def walk(buffer: Buffer, begin: int, count: int, limit: int) -> Iterator[tuple[Offsets, int]]:
    """Yield the offsets of the lengths of *count* strings in pieces, each with the end of the piece's last string.

    Errors: BrokenStringError as soon as a string would reach beyond *limit*.
    """
    position, done, burst = begin, 0, 1
    while done < count:
        links, lengths, breaks = _candidates(buffer, position, min(position + _WINDOW, limit))
        window_end = int(links[-1]) if len(links) else position
        while done < count:
            first = int(np.searchsorted(links, position))
            if first < len(links) and links[first] == position:
                last = int(breaks[np.searchsorted(breaks, first)])
                last = min(last, first + count - done - 1)
                offsets, end = links[first : last + 1], int(links[last]) + 8 + int(lengths[last])
                if end > limit:
                    raise BrokenStringError(done + last - first, int(links[last]))
            else:
                offsets, end = _step(buffer, position, done, min(burst, count - done), limit)
                burst = min(burst * 2, 4096)
            yield offsets, end
            done += len(offsets)
            position = end
            if position > window_end:
                break


def _candidates(buffer: Buffer, begin: int, end: int) -> tuple[Offsets, Offsets, Offsets]:
    """Places that look like lengths below 256, those lengths, and the indices of places that do not lead to the next."""
    raw = np.frombuffer(buffer, dtype=np.uint8, count=end - begin, offset=begin)
    if len(raw) < 8:
        nothing = np.zeros(0, dtype=np.int64)
        return nothing, nothing, nothing
    zero = raw == 0
    two = zero[:-1] & zero[1:]
    four = two[:-2] & two[2:]
    seven = four[:-3] & four[3:]
    found = np.flatnonzero(seven[1:] & ~zero[: len(seven) - 1])
    lengths = raw[found].astype(np.int64)
    is_broken = np.ones(len(found), dtype=bool)
    is_broken[:-1] = found[1:] != found[:-1] + 8 + lengths[:-1]
    return found + begin, lengths, np.flatnonzero(is_broken)


def _step(buffer: Buffer, position: int, index: int, n: int, limit: int) -> tuple[Offsets, int]:
    offsets = []
    for i in range(index, index + n):
        if position + 8 > limit:
            raise BrokenStringError(i, position)
        offsets.append(position)
        (length,) = _LENGTH.unpack_from(buffer, position)
        if length > limit - position - 8:
            raise BrokenStringError(i, position)
        position += 8 + length
    return np.array(offsets, dtype=np.int64), position
