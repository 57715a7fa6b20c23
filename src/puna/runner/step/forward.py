"""One forward pass: a batch in, logits out. Builds a graph only when the last one does not fit.

Where a core or a GPU leaves time for it, the graph of the step that probably comes next is built while this one is
computed. Nothing of a step is in its graph but the shape: tokens, positions, cells are inputs. So a graph for tokens that
are not sampled yet needs none of them, and one for a step that never comes, because a request ended, was cancelled or
joined, is dropped without harm.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from puna.errors import PunaError
from puna.kvcache.batch import N_AXES, Batch, text_axes
from puna.kvcache.cache import Cache, Limits
from puna.ml.backend import Backend, Context
from puna.ml.tensor import DType, Tensor
from puna.model.model import Inputs, Model

log = logging.getLogger(__name__)

Shape = tuple[int, int, int, Hashable]  # tokens, outputs, rows that are embeddings, the cache's


@dataclass
class Built:
    """A graph and the handles to feed it."""

    key: Shape
    ctx: Context
    inputs: Inputs
    logits: Tensor
    cache_inputs: object
    place: int  # which of the two sets of working memory it has


class Compute(Protocol):
    """A forward pass, of whichever engine; see Forward."""

    def __call__(self, batch: Batch) -> npt.NDArray[np.float32] | None: ...
    def close(self) -> None: ...


class Forward:
    """Runs a model over batches. One thread at a time."""

    def __init__(self, backend: Backend, model: Model, cache: Cache, limits: Limits, *, builds_ahead: bool = False) -> None:
        self._backend = backend
        self._model = model
        self._cache = cache
        self._max_nodes = model.max_nodes(limits)
        self._limits = limits
        self._built: Built | None = None
        self._ahead: Built | None = None  # for the step that was expected next
        self._expected: Batch | None = None
        self._builder = ThreadPoolExecutor(1, "build") if builds_ahead else None
        self.n_builds = 0  # while a step waited for the graph
        self.n_used_ahead = 0

    @property
    def builds_ahead(self) -> bool:
        return self._builder is not None

    @property
    def n_places(self) -> int:
        """Sets of working memory."""
        return 2 if self.builds_ahead else 1

    def reserve(self) -> None:
        """Allocate working memory for the largest batch.

        Errors: OutOfMemory.
        """
        for place in range(self.n_places):
            self.plan_largest(place).ctx.reserve()
            self._drop()

    def plan_largest(self, place: int = 0) -> Built:
        n_tokens, n_outputs = self._limits.n_batch, self._limits.max_outputs
        shape = self._cache.start_reserve(n_tokens)
        self._drop()
        self._built = self._build((n_tokens, n_outputs, 0, shape), place)
        return self._built

    def expect(self, batch: Batch) -> None:
        """The batch that probably comes after the next one; its tokens do not matter."""
        self._expected = batch if self.builds_ahead else None

    def __call__(self, batch: Batch) -> npt.NDArray[np.float32] | None:
        """Logits [n_outputs, n_vocab], valid until the next call; None when the compute was aborted.

        A model that embeds gives hidden states [n_outputs, n_embd].

        The batch's tokens stay in the cache either way.
        Errors: CacheFull, PunaError for embeddings that do not fit; then nothing has changed. OutOfMemory.
        """
        self._check_embedded(batch)
        built = self._graph_for(_key(batch, self._cache.start_forward(batch)))
        ctx = built.ctx
        ctx.set(built.inputs.tokens, batch.tokens)
        ctx.set(built.inputs.positions, self._positions(batch))
        if built.inputs.outputs is not None:
            ctx.set(built.inputs.outputs, batch.outputs)
        if batch.embedded and built.inputs.embeddings is not None and built.inputs.rows is not None:
            ctx.set(built.inputs.embeddings, batch.embedded.values)
            ctx.set(built.inputs.rows, batch.embedded.rows)
        self._cache.inputs = built.cache_inputs
        self._cache.set_inputs(ctx)
        building = self._start_building(built)
        try:
            is_whole = ctx.compute()
        finally:
            # The cache knows one shape at a time: nothing else goes on before the builder is done with it.
            self._ahead = building.result() if building else None
        return ctx.values(built.logits) if is_whole else None

    def _positions(self, batch: Batch) -> npt.NDArray[np.int32]:
        if not self._model.has_axes:
            return batch.positions
        return text_axes(batch.positions) if batch.axes is None else np.ascontiguousarray(batch.axes)

    def _check_embedded(self, batch: Batch) -> None:
        """Where the library would end the process."""
        if batch.embedded is None:
            return
        rows, shape = batch.embedded.rows, batch.embedded.values.shape
        if shape != (len(rows), self._model.n_embd):
            wanted = [len(rows), self._model.n_embd]
            raise PunaError(f"embeddings of shape {list(shape)} where the model takes {wanted}")
        if (np.diff(rows) <= 0).any() or not 0 <= rows[0] <= rows[-1] < batch.n_tokens:
            raise PunaError(f"rows given as embeddings are not in order, or not among the {batch.n_tokens} of the batch")

    def _graph_for(self, key: Shape) -> Built:
        if self._ahead and self._ahead.key == key:
            _close(self._built)
            self._built, self._ahead = self._ahead, None
            self.n_used_ahead += 1
        elif self._built is None or self._built.key != key:
            self._drop()
            self._built = self._build(key, 0)
            self.n_builds += 1
        _close(self._ahead)
        self._ahead = None
        return self._built

    def _build(self, key: Shape, place: int) -> Built:
        n_tokens, n_outputs, n_embedded, _ = key
        ctx = self._backend.context(self._max_nodes + place)
        try:
            inputs = Inputs(
                ctx.input(DType.I32, n_tokens),
                ctx.input(DType.I32, n_tokens * (N_AXES if self._model.has_axes else 1)),
                ctx.input(DType.I32, n_outputs) if n_outputs < n_tokens else None,
                ctx.input(DType.F32, self._model.n_embd, n_embedded) if n_embedded else None,
                ctx.input(DType.I32, n_embedded) if n_embedded else None,
            )
            self._cache.make_inputs(ctx)
            logits = self._model.forward(ctx, inputs, self._cache)
            ctx.output(logits)
            for given in (inputs.tokens, inputs.positions):
                ctx.forward(given)  # gets memory, even where nothing depends on it: attention need not know positions
        except BaseException:
            ctx.close()
            raise
        return Built(key, ctx, inputs, logits, self._cache.inputs, place)

    def _start_building(self, current: Built) -> Future[Built | None] | None:
        expected, self._expected = self._expected, None
        if self._builder is None or expected is None:
            return None
        return self._builder.submit(self._build_expected, expected, current)

    def _build_expected(self, expected: Batch, current: Built) -> Built | None:
        try:
            shape = self._cache.look_ahead(expected)
            key = _key(expected, shape)
            if shape is None or key == current.key:
                return None
            built = self._build(key, 1 - current.place)
            built.ctx.allocate()
            return built
        except Exception:  # what was expected need not be possible, and the step itself will say so
            log.debug("no graph was built ahead", exc_info=True)
            return None

    def _drop(self) -> None:
        _close(self._built)
        _close(self._ahead)
        self._built = self._ahead = None

    def close(self) -> None:
        if self._builder:
            self._builder.shutdown()
        self._drop()


def _key(batch: Batch, shape: Hashable) -> Shape:
    return batch.n_tokens, batch.n_outputs, batch.n_embedded, shape


def _close(built: Built | None) -> None:
    if built:
        built.ctx.close()
