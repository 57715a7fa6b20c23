"""What a model is to the runner: something that builds graphs over a batch, and knows which cache it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from puna.gguf.reader import GGUFFile
from puna.kvcache.cache import Cache, Limits
from puna.ml.backend import Backend, Context
from puna.ml.tensor import DType, Tensor


@dataclass(frozen=True)
class Inputs:
    """A batch inside a graph.

    Shapes: tokens I32 [n], positions I32 [n] or, for models with axes, [4 n], axis after axis; outputs I32 [m] or None when all
    rows are wanted. Embeddings F32 [n_embd, k] are
    given in place of what the tokens of *rows* I32 [k] would be looked up as; None: there are none.
    """

    tokens: Tensor
    positions: Tensor
    outputs: Tensor | None
    embeddings: Tensor | None = None
    rows: Tensor | None = None

    def placed(self, x: Tensor) -> Tensor:
        """What the tokens were looked up as, [n_embd, n], with the rows that are given as embeddings."""
        if self.embeddings is None or self.rows is None:
            return x
        return x.set_rows(self.embeddings, self.rows)


class Model(Protocol):
    n_vocab: int
    n_embd: int  # of a row given as an embedding
    has_axes: bool  # positions are four a token, of M-RoPE
    n_ctx_train: int

    def forward(self, ctx: Context, inputs: Inputs, cache: Cache) -> Tensor:
        """Logits [n_vocab, n_outputs]; of a model that embeds texts, hidden states [n_embd, n_outputs]."""

    def make_cache(self, backend: Backend, limits: Limits, dtype: DType) -> Cache: ...

    def max_nodes(self, limits: Limits) -> int:
        """An upper bound on the nodes of a graph."""


@runtime_checkable
class LookingModel(Model, Protocol):
    """Some of its layers look at images by cross attention."""

    def keep(self, ctx: Context, rows: Tensor, cache: Cache) -> None:
        """Put what these layers keep of rows [n_embd, n] of an image, each of which needs no other. No step is about that."""


# Reads the options, declares the weights with the backend. n_ctx is what one sequence may reach, for models whose
# position encoding depends on it.
Constructor = Callable[[GGUFFile, Backend, int], Model]
