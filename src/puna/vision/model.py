"""What a model's eyes are to the runner: they prepare an image, encode it, and say how it stands among the tokens.

The runner knows no family. It has the image prepared, runs the encoder over its pieces beside the steps that others wait for,
keeps the rows that come out, and puts them where ``place`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from puna.gguf.reader import GGUFFile
from puna.ml.backend import Backend, Context
from puna.ml.tensor import Tensor
from puna.tokenizer.tokenizer import Tokenizer
from puna.vision.look import Kept, Look

Pixels = npt.NDArray[np.uint8]  # [height, width, 3], upright, without transparency
Range = tuple[int, int]

State = tuple[Tensor, ...]
"""What an encoder's layer hands to the next; between two graphs it lies in the host's memory. A layer computes with the first of
it, rows [n_embd, n]; it hands on what else it was given, with what it adds behind that.
"""


@dataclass(frozen=True)
class Divided:
    """How a piece is computed some rows at a time. What a layer does with a row needs others only where it looks at them.

    *n* are the rows of a state; *by_row* names the arrays that have something for each of them, with the axis along which they
    lie. With *begins* also what the first layer gets is made row by row. The result is made of the rows *used*, each of its rows
    of *n_each*, which lie together.
    """

    n: int
    used: Range
    n_each: int = 1  # 0: it takes all rows to make any
    by_row: Mapping[str, int] = field(default_factory=dict)
    begins: bool = False


@dataclass(frozen=True)
class Piece:
    """What the encoder takes at once: an image, or a tile of one. Arrays float32 or int32 by name; their shapes, read backwards,
    are those of the tensors that the graph gets. A graph fits every piece with the same shapes. Of an array whose shape alone is
    asked for, the graph gets the values too. Encoders that are no graphs of ours take what arrays they like.
    """

    arrays: Mapping[str, npt.NDArray[Any]]
    divided: Divided | None = None  # None: its layers are computed as a whole

    @property
    def key(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return tuple((name, array.shape) for name, array in sorted(self.arrays.items()))

    def used(self, state: State) -> State:
        """What of a state the result is made of."""
        how = self.divided
        if how is None or how.used == (0, how.n):
            return state
        first, last = how.used
        return tuple(x.view((x.shape[0], last - first), (x.strides[1],), first * x.strides[1]) for x in state)

    def some(self, begin: int, end: int) -> Piece:
        """With what its arrays have for the rows [begin, end) of a state."""
        by_row = self.divided.by_row if self.divided else {}
        cut = {name: array.take(np.arange(begin, end), by_row[name]) for name, array in self.arrays.items() if name in by_row}
        return Piece({**self.arrays, **cut}, self.divided)


@dataclass(frozen=True)
class Placed:
    """How an image stands in a sequence: the model's own tokens around and between what was encoded.

    *tokens* are the vocabulary's, also for what is looked up by token where an image's row stands; *rows* has for each of
    them the number of the encoded row that stands there, or -1. Ranges count from the image's first token: those *together*
    are computed in one step, those *bidirectional* see each other, also the later ones. An image leaves a prompt as a whole
    whether or not all of it is computed in one step: where rows see only earlier ones, a large image need not be.
    With *axes* int32 [4, n] each token has positions along the axes of M-RoPE, relative to the image's first, and what follows
    the image goes on at *n_positions*.
    """

    tokens: Sequence[int]
    rows: Sequence[int]
    together: Sequence[Range] = ()
    bidirectional: Sequence[Range] = ()
    axes: npt.NDArray[np.int32] | None = None
    n_positions: int = 0  # 0: one for each token


@dataclass(frozen=True)
class Prepared:
    """An image as the encoder takes it, and how it will stand; the rows of the pieces follow one another."""

    pieces: Sequence[Piece]
    placed: Placed
    n_rows: int


class Preparer(Protocol):
    """What eyes are before and after they encode, however they do that: a family's arithmetic here, or another library."""

    n_layers: int  # of the encoder; 1 where it can only be run as a whole
    n_out: int  # values of an encoded row, which is what the text part takes in a token's place
    is_cross_attended: bool  # the rows are looked at by cross attention; one token stands for all of them

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Rows that an image of this size is encoded to, and the tokens it takes in a prompt; nothing is computed.

        Errors: BadRequest for a size that the model cannot take, saying why.
        """

    def prepare(self, pixels: Pixels) -> Prepared:
        """Resize, cut, normalise, as the family's reference does. Arithmetic on the host, in any thread.

        Errors: as size.
        """

    def largest(self) -> tuple[int, int]:
        """Width and height of the image that takes the most memory to encode."""


@runtime_checkable
class Listener(Protocol):
    """Eyes that are ears as well, or ears alone."""

    sample_rate: int  # of sound; 0: it hears none

    def prepare_sound(self, samples: npt.NDArray[np.float32]) -> Prepared:
        """As a Preparer does with pixels; of one channel, so many a second, from -1 to 1.

        Errors: BadRequest saying what is wrong.
        """


class VisionModel(Preparer, Protocol):
    """Arithmetic of one family. Its weights are bound when it is opened, and read when the backend is loaded."""

    kept: Kept  # of the rows of a divided piece, layer by layer

    def begin(self, ctx: Context, inputs: Mapping[str, Tensor]) -> State:
        """From a piece's arrays to what the first layer gets."""

    def layer(self, look: Look, state: State, inputs: Mapping[str, Tensor], index: int) -> State:
        """Row by row, but for *look*. Of a divided piece the rows, and what the inputs have for them, may be some of it alone."""

    def end(self, ctx: Context, state: State, inputs: Mapping[str, Tensor]) -> Tensor:
        """The piece's rows [n_out, n], projected to where the text part takes them; of a divided one, from the rows of the state
        that some of them are made of, and those alone.
        """

    def max_nodes(self) -> int:
        """An upper bound on the nodes of a graph over all layers."""


# Of the file that holds the projector (which may be the text model's own), its backend, the text model's file and vocabulary.
# Errors: UnsupportedModel, MissingTensors, FileFormatError.
Constructor = Callable[[GGUFFile, Backend, GGUFFile, Tokenizer], VisionModel]
