"""What cross attention keeps of an image, before the step of its token: graphs over some of its rows, that only store."""

from __future__ import annotations

import numpy as np

from puna.kvcache.cache import Limits
from puna.kvcache.encoder import EncoderCache
from puna.kvcache.layered import LayeredCache
from puna.ml.backend import Context
from puna.ml.ggml.backend import GGMLBackend
from puna.ml.tensor import DType, Tensor
from puna.model.model import LookingModel, Model
from puna.runner.images.image import Rows

_INPUTS, _NODES_PER_LAYER = 64, 32


class ImageHomes:
    """Of the text model's sequences. Builds a graph for each part; no more rows at once than a step has tokens."""

    def __init__(self, backend: GGMLBackend, model: LookingModel, cache: EncoderCache, limits: Limits) -> None:
        self.most_rows = min(limits.n_batch, limits.n_encoded)
        self._backend = backend
        self._model = model
        self._cache = cache
        self._max_nodes = _INPUTS + _NODES_PER_LAYER * backend.n_layers

    def n_stored(self, sequence: int) -> int:
        """Of the image whose token the sequence computes next."""
        return self._cache.n_ahead(sequence)

    def store(self, sequence: int, rows: Rows, begin: int) -> bool:
        """These rows of it, those before being there; False where that was aborted, and those are there as before.

        Errors: BadRequest for more than a sequence has room for; OutOfMemory.
        """
        end = begin + len(rows)
        ctx = self._backend.context(self._max_nodes)
        try:
            given = self._planned(ctx, len(rows))
            ctx.set(given, np.ascontiguousarray(rows, np.float32))
            self._cache.set_rows(ctx, sequence, begin, end)
            if not ctx.compute():
                return False
        finally:
            ctx.close()
        self._cache.note_rows(sequence, end)
        return True

    def _planned(self, ctx: Context, n_rows: int) -> Tensor:
        given = ctx.input(DType.F32, self._model.n_embd, n_rows)
        self._cache.make_rows(ctx, n_rows)
        self._model.keep(ctx, given, self._cache)
        return given

    def reserve_sizes(self) -> list[int]:
        """Bytes of working memory per device."""
        ctx = self._backend.context(self._max_nodes)
        try:
            self._planned(ctx, self.most_rows)
            return self._backend.reserve_sizes(ctx)
        finally:
            ctx.close()

    def reserve(self) -> None:
        """Take it, once. Errors: OutOfMemory."""
        ctx = self._backend.context(self._max_nodes)
        try:
            self._planned(ctx, self.most_rows)
            ctx.reserve()
        finally:
            ctx.close()


def homes_of(backend: GGMLBackend, model: Model, cache: object, limits: Limits) -> ImageHomes | None:
    """None where no layer looks at images."""
    encoder = cache.encoder if isinstance(cache, LayeredCache) else None
    if encoder is None or not isinstance(model, LookingModel):
        return None
    return ImageHomes(backend, model, encoder, limits)
