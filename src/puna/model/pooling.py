"""How the hidden states of a text become one vector, as GGUF files state it, and which models compute such vectors."""

from __future__ import annotations

from enum import IntEnum
from typing import Literal, Protocol, runtime_checkable

from puna.errors import FileFormatError, MissingTensors
from puna.gguf.reader import GGUFFile


class Pooling(IntEnum):
    """The numbers are those of ``<arch>.pooling_type``."""

    NONE = 0
    MEAN = 1  # of all tokens
    CLS = 2  # the first token
    LAST = 3  # the last token
    RANK = 4  # the first token, through a classifier: a score instead of a vector


UNSPECIFIED = 0xFFFFFFFF  # written by programs that write every key; as good as no key

RANK_HEAD = frozenset({"cls.weight", "cls.output.weight"})  # of which a cross encoder has one at least


@runtime_checkable
class Encoder(Protocol):
    """A model whose tokens see the whole text: a text is computed in one step, and nothing of it is cached."""

    sees_whole_text: Literal[True]


@runtime_checkable
class Embedder(Protocol):
    """A model that also generates text: with a pooling in its file it gives hidden states instead of logits."""

    embeds: bool


@runtime_checkable
class Ranker(Protocol):
    """An encoder that with a rank pooling in its file gives scores instead of hidden states."""

    ranks: bool


def can_pool(model: object, pooling: Pooling) -> bool:
    """Whether the model computes what this pooling needs."""
    if pooling is Pooling.RANK:
        return isinstance(model, Ranker) and model.ranks
    return isinstance(model, Encoder) or (isinstance(model, Embedder) and model.embeds)


def pooling_of(file: GGUFFile) -> Pooling:
    """NONE when the file does not say: such a model generates text.

    Errors: FileFormatError for a number without a meaning; MissingTensors when scores are called for and there is nothing
    that could make them: libllama would give the first number of a hidden state.
    """
    number = file.metadata.integer("pooling_type", 0)
    try:
        pooling = Pooling.NONE if number in (UNSPECIFIED, -1) else Pooling(number)
    except ValueError as error:
        raise FileFormatError(f"{file.path}: pooling_type {number} is not known") from error
    if pooling is Pooling.RANK and not RANK_HEAD.intersection(file.tensors):
        raise MissingTensors(["cls.output.weight"])
    return pooling
