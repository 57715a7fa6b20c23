"""The compatibility engine without the runner: forward passes over a file, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from puna.compat.model import LlamaModel, Options
from puna.gguf.reader import GGUFFile
from puna.kvcache.batch import batch
from puna.kvcache.cache import Limits
from puna.native.ggml import TYPE_F16


class CompatEngine:
    """The same face as tests.oracle.Oracle and tests.puna_engine.PunaEngine."""

    def __init__(
        self,
        path: Any,
        *,
        n_ctx: int = 2048,
        n_sequences: int = 1,
        n_batch: int = 512,
        n_pool: int = 0,
        n_threads: int = 2,
        cache_type: int = TYPE_F16,
        pooling: int = 0,
        max_rows: int | None = None,
        adapters: Sequence[str] = (),
    ) -> None:
        limits = Limits(n_sequences, n_ctx, n_batch, n_pool)
        options = Options(n_threads=n_threads, cache_type=cache_type, pooling=pooling, adapters=adapters)
        self.model = LlamaModel(GGUFFile.open(path), limits, options, max_rows=max_rows or n_batch)
        self.model.load(lambda _share: None)
        self.limits = self.model.limits
        self.cache = self.model.cache
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
    ) -> npt.NDArray[np.float32]:
        rows = self.model.forward(batch(tokens, positions, sequences, outputs, bidirectional, (), embedded, axes))
        assert rows is not None, "nothing aborts a compute here"
        self.cache.check_integrity()
        return rows

    def greedy(self, prompt: Sequence[int], count: int, sequence: int = 0) -> list[int]:
        row = self.decode(prompt, range(len(prompt)), [sequence] * len(prompt), [len(prompt) - 1])[0]
        answer = [int(row.argmax())]
        while len(answer) < count:
            row = self.decode(answer[-1:], [len(prompt) + len(answer) - 1], [sequence], [0])[0]
            answer.append(int(row.argmax()))
        return answer

    def forget(self, sequence: int = -1, begin: int = 0) -> None:
        for s in range(self.limits.max_sequences) if sequence < 0 else [sequence]:
            self.cache.remove(s, max(begin, 0))

    def close(self) -> None:
        self.model.close()
        self.model.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
