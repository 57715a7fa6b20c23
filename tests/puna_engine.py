"""The engine without its thread: forward passes over a file, for tests and bench."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from puna.kvcache.batch import Encoded, batch
from puna.kvcache.cache import Limits
from puna.ml.ggml.backend import GGMLBackend
from puna.ml.tensor import DType
from puna.model.registry import open_model
from puna.native.ggml import TYPE_F16
from puna.native.kernels.library import wanted
from puna.runner.images.homes import homes_of
from puna.runner.step.forward import Forward
from puna.wire import DeviceLayers


class PunaEngine:
    """The same face as tests.oracle.Oracle."""

    def __init__(
        self,
        path: Any,
        *,
        n_ctx: int = 2048,
        n_sequences: int = 1,
        n_batch: int = 512,
        n_threads: int = 2,
        cache_type: int = TYPE_F16,
        flash_attention: bool = True,
        builds_ahead: bool = False,
        adapters: Sequence[Any] = (),
        layers: Sequence[DeviceLayers] = (),
        use_kernels: bool | None = None,
        n_encoded: int = 0,
    ) -> None:
        """*use_kernels* None: as the setting says. *n_encoded*: of an image's vectors that a sequence may look at."""
        self.backend = GGMLBackend(
            path,
            n_threads=n_threads,
            flash_attention=flash_attention,
            adapters=adapters,
            layers=layers,
            kernels=wanted(use_kernels),
        )
        self.limits = Limits(n_sequences, n_ctx, n_batch, n_encoded=n_encoded)
        self.model: Any = open_model(self.backend.file, self.backend, n_ctx)
        self.cache = self.model.make_cache(self.backend, self.limits, DType(cache_type))
        self.backend.allocate()
        self.backend.load(lambda _share: None)
        self.forward = Forward(self.backend, self.model, self.cache, self.limits, builds_ahead=builds_ahead)
        self.forward.reserve()
        self.homes: Any = homes_of(self.backend, self.model, self.cache, self.limits)
        if self.homes is not None:
            self.homes.reserve()
        self.n_vocab = self.model.n_vocab

    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        outputs: Sequence[int],
        embedded: tuple[Any, Any] | None = None,
        bidirectional: Sequence[tuple[int, int]] = (),
        axes: Any = None,
        images: Sequence[tuple[int, int, Any]] = (),
    ) -> npt.NDArray[np.float32]:
        """*embedded*: rows of the batch, and the embeddings that they are given as. *images*: sequence, position and the vectors
        that cross attention looks at, in the order of the sequences' rows; what is stored of them already is left out.
        """
        encoded = [Encoded(sequence, position, len(vectors)) for sequence, position, vectors in images]
        for sequence, _, vectors in images:
            self.store(sequence, vectors)
        logits = self.forward(batch(tokens, positions, sequences, outputs, bidirectional, encoded, embedded, axes))
        assert logits is not None, "nothing aborts a compute here"
        return logits

    def store(self, sequence: int, vectors: Any, most: int = 1 << 30) -> None:
        """What layers keep of an image that comes next, from where that was left, in parts of at most so many rows."""
        homes = self.homes
        assert homes is not None, "no layer looks at images"
        while (begin := homes.n_stored(sequence)) < len(vectors):
            assert homes.store(sequence, vectors[begin : begin + min(most, homes.most_rows)], begin)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        row = self.decode(prompt, range(len(prompt)), [0] * len(prompt), [len(prompt) - 1])[0]
        answer = [int(row.argmax())]
        while len(answer) < count:
            row = self.decode(answer[-1:], [len(prompt) + len(answer) - 1], [0], [0])[0]
            answer.append(int(row.argmax()))
        return answer

    def embeddings(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """What the first layer gets of these tokens, [n, n_embd]."""
        ctx = self.backend.context(64)
        inputs = ctx.input(DType.I32, len(tokens))
        x = self.model.embed(inputs)
        ctx.output(x)
        ctx.set(inputs, np.array(tokens, np.int32))
        assert ctx.compute()
        found = ctx.values(x).copy()
        ctx.close()
        return found

    def forget(self, sequence: int = -1, begin: int = 0) -> None:
        for s in range(self.limits.max_sequences) if sequence < 0 else [sequence]:
            self.cache.remove(s, max(begin, 0))

    def close(self) -> None:
        self.forward.close()
        self.backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
