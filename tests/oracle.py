"""libllama on the same file: what the engine's numbers are compared with, in tests and in bench."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from puna.native.ggml import TYPE_F16
from puna.native.llama import FLASH_ATTN_AUTO, FLASH_ATTN_DISABLED, POOLING_TYPE_NONE, POOLING_TYPE_UNSPECIFIED, llama

_BESIDE = ThreadPoolExecutor(1, "oracle")

T = TypeVar("T")
U = TypeVar("U")


def side_by_side(ours: Callable[[], T], theirs: Callable[[], U]) -> tuple[T, U]:
    """What the engine and libllama compute, at the same time: while one's threads wait for each other, the other goes on."""
    asked = _BESIDE.submit(theirs)
    try:
        said = ours()
    finally:
        wait([asked])  # nobody closes what is computing
    return said, asked.result()


class Oracle:
    """A model opened by libllama. Sequences and positions are the caller's, as in the engine."""

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
        embeddings: bool = False,
        pools: bool = True,
        adapters: Sequence[Any] = (),
        watch: int = 0,
    ) -> None:
        """*pools*: as the file says; otherwise embeddings are those of tokens. *watch*: a function that ggml calls before and
        after each node, by its address.
        """
        self.lib = llama()
        self.n_sequences = n_sequences
        params = self.lib.llama_model_default_params()
        self.model = self.lib.llama_model_load_from_file(str(path).encode(), params)
        assert self.model, f"libllama cannot load {path}"
        c = self.lib.llama_context_default_params()
        # Sequences have memory of their own, n_ctx each, as libllama's server arranges it by default.
        c.n_ctx, c.n_seq_max, c.n_batch, c.n_ubatch = n_ctx * n_sequences, n_sequences, n_batch, n_batch
        c.n_threads = c.n_threads_batch = n_threads
        c.flash_attn_type = FLASH_ATTN_AUTO if flash_attention else FLASH_ATTN_DISABLED
        c.type_k = c.type_v = cache_type
        c.no_perf = True
        c.embeddings = embeddings
        c.pooling_type = POOLING_TYPE_UNSPECIFIED if pools else POOLING_TYPE_NONE
        c.cb_eval = watch or None
        self.ctx = self.lib.llama_init_from_model(self.model, c)
        assert self.ctx, "libllama could not make a context"
        self._apply(adapters)
        self.vocab = self.lib.llama_model_get_vocab(self.model)
        self.n_vocab: int = self.lib.llama_vocab_n_tokens(self.vocab)
        self._batch = self.lib.llama_batch_init(max(n_batch, n_sequences), 0, 1)

    def _apply(self, paths: Sequence[Any]) -> None:
        """LoRA files, each with the factor 1."""
        loaded = [self.lib.llama_adapter_lora_init(self.model, str(path).encode()) for path in paths]
        assert all(loaded), f"libllama cannot load one of {paths}"
        adapters, factors = (ctypes.c_void_p * len(paths))(*loaded), (ctypes.c_float * len(paths))(*[1.0] * len(paths))
        status = self.lib.llama_set_adapters_lora(self.ctx, ctypes.addressof(adapters), len(paths), ctypes.addressof(factors))
        assert status == 0, f"llama_set_adapters_lora: {status}"

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int], outputs: Sequence[int]
    ) -> npt.NDArray[np.float32]:
        """Logits of the rows named by outputs: [n_outputs, n_vocab]."""
        b, wanted = self._batch, set(outputs)
        b.n_tokens = len(tokens)
        for i, (token, position, sequence) in enumerate(zip(tokens, positions, sequences, strict=True)):
            b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = token, position, 1, i in wanted
            b.seq_id[i][0] = sequence
        status = self.lib.llama_decode(self.ctx, b)
        assert status == 0, f"llama_decode: {status}"
        return np.stack([self._row(i) for i in outputs]) if outputs else np.empty((0, self.n_vocab), np.float32)

    def _row(self, index: int) -> npt.NDArray[np.float32]:
        address = self.lib.llama_get_logits_ith(self.ctx, index)
        floats = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(floats, (self.n_vocab,)).copy()

    def embed(self, texts: Sequence[Sequence[int]], width: int = 0) -> npt.NDArray[np.float32]:
        """The pooled vectors of texts given as tokens, all in one batch: [n_texts, width]; made with embeddings=True.

        The width is that of hidden states, or of a rank head as many labels as it has.
        """
        b = self._batch
        rows = [(token, position, i) for i, text in enumerate(texts) for position, token in enumerate(text)]
        b.n_tokens = len(rows)
        for row, (token, position, sequence) in enumerate(rows):
            b.token[row], b.pos[row], b.n_seq_id[row], b.logits[row] = token, position, 1, True
            b.seq_id[row][0] = sequence
        has_cache = bool(self.lib.llama_get_memory(self.ctx))
        status = (self.lib.llama_decode if has_cache else self.lib.llama_encode)(self.ctx, b)
        assert status == 0, f"libllama could not compute the batch: {status}"
        width = width or self.lib.llama_model_n_embd(self.model)
        pointers = [self.lib.llama_get_embeddings_seq(self.ctx, i) for i in range(len(texts))]
        floats = [ctypes.cast(address, ctypes.POINTER(ctypes.c_float)) for address in pointers]
        return np.stack([np.ctypeslib.as_array(f, (width,)).copy() for f in floats])

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The likeliest continuation, end tokens included as any other."""
        row = self.decode(prompt, range(len(prompt)), [0] * len(prompt), [len(prompt) - 1])[0]
        answer = [int(row.argmax())]
        while len(answer) < count:
            row = self.decode(answer[-1:], [len(prompt) + len(answer) - 1], [0], [0])[0]
            answer.append(int(row.argmax()))
        return answer

    def forget(self, sequence: int = -1, begin: int = -1, end: int = -1) -> None:
        memory = self.lib.llama_get_memory(self.ctx)
        if not memory:  # encoders have none
            return
        # Recurrent states know no "all sequences".
        for s in range(self.n_sequences) if sequence < 0 else [sequence]:
            assert self.lib.llama_memory_seq_rm(memory, s, begin, end)

    def shift(self, sequence: int, begin: int, end: int) -> None:
        """Forget positions [begin, end) and move the later ones down."""
        memory = self.lib.llama_get_memory(self.ctx)
        self.forget(sequence, begin, end)
        self.lib.llama_memory_seq_add(memory, sequence, end, -1, begin - end)

    def close(self) -> None:
        self.lib.llama_batch_free(self._batch)
        self.lib.llama_free(self.ctx)
        self.lib.llama_model_free(self.model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
