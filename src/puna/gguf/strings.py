"""Step over arrays of length-prefixed strings.

String by string where there are few; many are found at once with numpy (puna.gguf.string_walk), which takes longer to import
than tens of thousands of steps.
"""

from __future__ import annotations

import struct
from typing import Any

MANY = 1 << 16

_LENGTH = struct.Struct("<Q")


class BrokenStringError(Exception):
    """A length that leads out of the buffer; ``offset`` is where it stands, ``index`` which string it belongs to."""

    def __init__(self, index: int, offset: int) -> None:
        super().__init__(f"string {index} at byte {offset} leads out of the buffer")
        self.index = index
        self.offset = offset


def skip(buffer: Any, begin: int, count: int, limit: int) -> int:
    """Where *count* strings end, the first of which begins at *begin*.

    Errors: BrokenStringError as soon as a string would reach beyond *limit*.
    """
    if count > MANY:
        from puna.gguf import string_walk

        return max(end for _, end in string_walk.walk(buffer, begin, count, limit))
    position, length_of, last = begin, _LENGTH.unpack_from, limit - 8
    for index in range(count):
        if position > last:
            raise BrokenStringError(index, position)
        (length,) = length_of(buffer, position)
        if length > last - position:
            raise BrokenStringError(index, position)
        position += 8 + length
    return position
