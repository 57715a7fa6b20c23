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


def holds(buffer: Any, begin: int, end: int, text: bytes) -> bool:
    """Whether one of the strings from *begin* to *end*, which are known to be sound, is *text*.

    Few places look like it: strings are stepped over only up to those, to see whether one begins there.
    """
    wanted = _LENGTH.pack(len(text)) + text
    position = begin
    while (place := buffer.find(wanted, position, end)) >= 0:
        while position < place:
            (length,) = _LENGTH.unpack_from(buffer, position)
            position += 8 + length
        if position == place:
            return True
    return False
