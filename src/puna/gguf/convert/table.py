"""The language in which families of models are described: what a checkpoint calls each tensor, what GGUF does, and its axes.

A family is a table of lines, one for each kind of tensor, and one of keys. Nothing here reads a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from puna.gguf.convert import vocabulary
from puna.gguf.convert.checkpoint import Checkpoint
from puna.gguf.convert.fields import Fields
from puna.gguf.convert.pooling import stated_pooling
from puna.gguf.writer import GGUFWriter

Rows = npt.NDArray[Any]
Lengths = Mapping[str, int]
Change = Callable[[Rows, Lengths], Rows]
"""What is done to a tensor's numbers; lengths are those of the layer's axes."""
Value = Callable[[Fields], Any]
"""What a key of the file is, from the fields of config.json; None: it is left out."""


class Words(Protocol):
    """A vocabulary that can be written."""

    def add_to(self, writer: GGUFWriter) -> None: ...

    def number_of(self, text: str) -> int | None:
        """A token's by its text."""


@dataclass(frozen=True)
class Line:
    """One kind of tensor. ``.weight`` follows both names, unless they are *whole*; a ``.bias`` comes along where there is one.

    In *theirs* ``{e}`` stands for an expert: the matrices of all of them become one stack.
    """

    ours: str  # in GGUF, without the layer
    theirs: str  # in the checkpoint, without the layer
    dims: str = ""  # its axes in the checkpoint, slowest first; ``2*ff`` is a multiple
    change: Change | None = None
    to: str = ""  # its axes afterwards, where they are others
    on: str = ""  # in layers of this kind only
    whole: bool = False
    when: Callable[[Fields], bool] | None = None  # where the configuration says so
    exact: bool = False  # stays F32: small, and much depends on it
    computes: bool = False  # the change calculates and does not only move
    packed: bool = False  # in blocks of MXFP4
    spare: bool = False  # nothing is computed with it: it comes along where it is there
    instead: Line | None = None  # where the checkpoint has this one's tensor, and not the other's
    biased: Callable[[Fields], bool] | None = None  # where the configuration says that there must be one
    changes_bias: bool = True  # as it does the rows of the matrix


def nothing(fields: Fields) -> Mapping[str, Any]:
    return {}


def no_kinds(fields: Fields, layer: int) -> Set[str]:
    return frozenset()


def no_lengths(fields: Fields, layer: int) -> Lengths:
    return {}


def no_more(checkpoint: Checkpoint) -> Lengths:
    return {}


def no_check(fields: Fields) -> None:
    return None


@dataclass(frozen=True)
class Family:
    """All that is to be known of an architecture to convert a checkpoint of it."""

    architecture: str
    layer: tuple[Line, ...]
    ends: tuple[Line, ...]
    keys: Mapping[str, Value]
    lengths: Mapping[str, Value]  # of axes, by the names that lines have for them
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of fields that published files leave out
    expects: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # what GGUF takes for granted; missing is as good
    rope: Value = nothing  # keys about positions
    made: Callable[[Fields], Mapping[str, Rows]] = nothing  # tensors that are fields in the checkpoint
    check: Callable[[Fields], None] = no_check
    kinds: Callable[[Fields, int], Set[str]] = no_kinds  # of a layer
    layer_lengths: Callable[[Fields, int], Lengths] = no_lengths  # of axes that are not the same in every layer
    ours: str = "blk.{i}."  # where a layer's tensors are in GGUF
    layers: str = "layers.{i}."  # and in the checkpoint, below one of
    roots: tuple[str, ...] = ("model.", "model.language_model.", "language_model.model.", "")
    n_layers: Value = field(default=lambda fields: fields.whole("num_hidden_layers", high=1024))
    table: str = "embed_tokens.weight"
    unused: tuple[str, ...] = ()  # tensors that take no part in what the text part computes, as expressions
    words: Callable[[Checkpoint, int, Mapping[str, Any]], Words] = vocabulary.read
    beside: Callable[[Checkpoint], Mapping[str, Any]] = stated_pooling  # keys that other files state
    known: Callable[[Checkpoint], Lengths] = no_more  # lengths that other files state
    apart: tuple[str, ...] = ()  # folders with tensors that belong to the model
    tokens: Mapping[str, str] = field(default_factory=dict)  # by the names that lengths have for their numbers
    eyes: Family | None = None  # what becomes a projector's file, where the checkpoint has it
    beyond: bool = False  # layers behind the last one guess further tokens, and take no part in the next one


def whole(*names: str, default: int | None = None, low: int = 1, high: int = 1 << 31) -> Value:
    return lambda fields: fields.whole(*names, default=default, low=low, high=high)


def perhaps_whole(*names: str, low: int = 0) -> Value:
    return lambda fields: fields.whole(*names, low=low, high=1 << 31) if fields.has(*names) else None


def positive(*names: str, default: float | None = None) -> Value:
    return lambda fields: fields.positive(*names, default=default)


def perhaps_positive(*names: str) -> Value:
    return lambda fields: fields.positive(*names) if fields.has(*names) else None


def flag(*names: str, default: bool | None = None) -> Value:
    return lambda fields: fields.flag(*names, default=default)


def always(fields: Fields) -> bool:
    return True


def never(fields: Fields) -> bool:
    return False


def stated(*names: str, default: bool = False) -> Callable[[Fields], bool]:
    return lambda fields: fields.flag(*names, default=default)


# What is done to numbers.


def interleaved(axis: str) -> Change:
    """The rows of each head so that those which are rotated together stand beside each other; *axis* counts heads."""
    return lambda rows, lengths: paired(lengths[axis], rows)


def paired(n_heads: int, rows: Rows) -> Rows:
    return rows.reshape(n_heads, 2, rows.shape[0] // n_heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def plus_one(rows: Rows, lengths: Lengths) -> Rows:
    """A norm that is stored less one."""
    return np.asarray(rows + np.float32(1))


def transposed(rows: Rows, lengths: Lengths) -> Rows:
    """Of each expert's matrix, or of one."""
    return rows.swapaxes(-1, -2)


def halves(axis: int, *, second: bool) -> Change:
    """One half of an axis."""

    def cut(rows: Rows, lengths: Lengths) -> Rows:
        return np.split(rows, 2, axis)[second]

    return cut


def then(*changes: Change) -> Change:
    def all_of_them(rows: Rows, lengths: Lengths) -> Rows:
        for change in changes:
            rows = change(rows, lengths)
        return rows

    return all_of_them


def squeezed(rows: Rows, lengths: Lengths) -> Rows:
    """A convolution of each channel alone, [channels, 1, width], without the axis of one."""
    return rows[:, 0]


def decay(rows: Rows, lengths: Lengths) -> Rows:
    """What is stored as a logarithm, below 0."""
    return np.asarray(-np.exp(rows))


def column(rows: Rows, lengths: Lengths) -> Rows:
    """A vector as a matrix of one column."""
    return rows[:, None]
