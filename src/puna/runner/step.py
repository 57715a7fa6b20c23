"""One forward pass: a batch in, logits out. Builds a graph only when the last one does not fit."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from puna.kvcache.batch import Batch
from puna.kvcache.cache import Cache, Limits
from puna.ml.backend import Backend, Context
from puna.ml.tensor import DType, Tensor
from puna.model.model import Inputs, Model


@dataclass
class Built:
    """A graph and the handles to feed it."""

    key: Hashable
    ctx: Context
    inputs: Inputs
    logits: Tensor


class Compute(Protocol):
    """A forward pass, of whichever engine; see Forward."""

    def __call__(self, batch: Batch) -> npt.NDArray[np.float32] | None: ...
    def close(self) -> None: ...


class Forward:
    """Runs a model over batches. One thread at a time."""

    def __init__(self, backend: Backend, model: Model, cache: Cache, limits: Limits) -> None:
        self._backend = backend
        self._model = model
        self._cache = cache
        self._max_nodes = model.max_nodes(limits)
        self._limits = limits
        self._built: Built | None = None
        self.n_builds = 0

    def reserve(self) -> None:
        """Allocate working memory for the largest batch.

        Errors: OutOfMemory.
        """
        self.plan_largest().ctx.reserve()
        self._drop()

    def plan_largest(self) -> Built:
        n_tokens, n_outputs = self._limits.n_batch, min(self._limits.max_sequences, self._limits.n_batch)
        shape = self._cache.start_reserve(n_tokens)
        return self._build((n_tokens, n_outputs, shape), n_tokens, n_outputs)

    def __call__(self, batch: Batch) -> npt.NDArray[np.float32] | None:
        """Logits [n_outputs, n_vocab], valid until the next call; None when the compute was aborted.

        A model that embeds gives hidden states [n_outputs, n_embd].

        The batch's tokens stay in the cache either way.
        Errors: CacheFull; then nothing has changed. OutOfMemory.
        """
        shape = self._cache.start_forward(batch)
        key = (batch.n_tokens, batch.n_outputs, shape)
        built = self._built if self._built and self._built.key == key else self._build(key, batch.n_tokens, batch.n_outputs)
        ctx = built.ctx
        ctx.set(built.inputs.tokens, batch.tokens)
        ctx.set(built.inputs.positions, batch.positions)
        if built.inputs.outputs is not None:
            ctx.set(built.inputs.outputs, batch.outputs)
        self._cache.set_inputs(ctx)
        if not ctx.compute():
            return None
        return ctx.values(built.logits)

    def _build(self, key: Hashable, n_tokens: int, n_outputs: int) -> Built:
        self._drop()
        ctx = self._backend.context(self._max_nodes)
        inputs = Inputs(
            ctx.input(DType.I32, n_tokens),
            ctx.input(DType.I32, n_tokens),
            ctx.input(DType.I32, n_outputs) if n_outputs < n_tokens else None,
        )
        self._cache.make_inputs(ctx)
        logits = self._model.forward(ctx, inputs, self._cache)
        ctx.output(logits)
        for given in (inputs.tokens, inputs.positions):
            ctx.forward(given)  # gets memory, even where nothing depends on it: attention need not know positions
        self._built = Built(key, ctx, inputs, logits)
        self.n_builds += 1
        return self._built

    def _drop(self) -> None:
        if self._built:
            self._built.ctx.close()
            self._built = None

    def close(self) -> None:
        self._drop()
