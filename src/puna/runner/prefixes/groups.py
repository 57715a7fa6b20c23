"""Tokens that belong together, such as those of one image: [begin, end) each, in order and apart. Arithmetic only.

All of a group is computed in one step, and a prompt loses all of it or nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

Group = tuple[int, int]


def whole(begin: int, end: int, limit: int, groups: Sequence[Group]) -> int:
    """How far a step from *begin* to at most *end* goes without leaving a part of a group behind.

    *limit* is how far it may go for the sake of a group that starts right there; *begin* where that is not far enough.
    """
    for first, last in groups:
        if first < end < last:
            if first > begin:
                return first
            return last if last <= limit else begin
    return end


def cut(begin: int, end: int, groups: Sequence[Group]) -> Group:
    """The range to drop, widened so that it splits no group."""
    for first, last in groups:
        if first < begin < last:
            begin = first
        if first < end < last:
            end = last
    return begin, end
