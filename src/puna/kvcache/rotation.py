"""Keys and values are turned before they are quantised, so that no single channel sets the scale of its block.

The turn is an orthonormal Walsh-Hadamard matrix, which is its own inverse: queries turned alike give the same products
with the keys, and what attention mixes from turned values is turned back. llama.cpp does the same (pull request 21038),
keys by the widest matrix that divides a head, values by 64.
"""

from __future__ import annotations

NARROWEST = 64


def key_turn(dim: int) -> int:
    """How many channels of a head turn together; 0 where 64 does not divide it."""
    return 0 if dim % NARROWEST else dim & -dim


def value_turn(dim: int) -> int:
    return 0 if dim % NARROWEST else NARROWEST
