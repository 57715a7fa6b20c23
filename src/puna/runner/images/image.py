"""One image, as all requests that bring it share it."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from puna.vision.model import Piece, Placed, Prepared

Rows = npt.NDArray[np.float32]


class Key(NamedTuple):
    """What an image is found by: its file's bytes, among those of the same salt."""

    digest: bytes
    salt: str


def key_of(data: bytes, salt: str) -> Key:
    return Key(hashlib.sha256(data).digest(), salt)


class Image:
    """How it stands in a prompt is known from the start; *rows* are there once it is encoded, *pieces* until then, if at all."""

    def __init__(self, key: Key, prepared: Prepared) -> None:
        self.key = key
        self.placed: Placed = prepared.placed
        self.n_rows = prepared.n_rows
        self.pieces: tuple[Piece, ...] | None = tuple(prepared.pieces)
        self.rows: Rows | None = None
        self.data = b""  # the file, while somebody has the image
        self.n_holders = 0
        self.problem: BaseException | None = None  # why it cannot be encoded
        self.elements: list[int] | None = None  # its tokens as prefixes are told by; one list for all, which compares at once

    @property
    def n_tokens(self) -> int:
        return len(self.placed.tokens)

    @property
    def n_bytes(self) -> int:
        """Of the host's memory, without the file."""
        arrays: list[npt.NDArray[Any]] = [] if self.rows is None else [self.rows]
        for piece in self.pieces or ():
            arrays += piece.arrays.values()
        return sum(array.nbytes for array in arrays)
