"""A model that libllama holds, and a context in which it computes batches, for callers that do not speak ctypes.

Nothing is checked here: a token, sequence or count out of range ends the process inside the library.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from puna.native.ggml import ROPE_TYPE_IMROPE, ROPE_TYPE_MROPE
from puna.native.llama import FLASH_ATTN_AUTO, FLASH_ATTN_DISABLED, LOAD_MODE_MMAP, LOAD_MODE_NONE, llama, llama_batch

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

# What decode returns, besides numbers below zero for failures.
DECODED, NO_ROOM, ABORTED = 0, 1, 2

MAX_SEQUENCES, MAX_DEVICES = 256, 16

_PROGRESS = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_float, ctypes.c_void_p)


@dataclass(frozen=True)
class Placement:
    """How many layers, the output as one more, each device takes: the last ones of the model, in this order."""

    devices: tuple[int, ...] = ()  # addresses
    n_layers: tuple[int, ...] = ()


class Model:
    """The weights and the vocabulary."""

    def __init__(self, address: int) -> None:
        self.address = address
        library = llama()
        self.n_vocab: int = library.llama_vocab_n_tokens(library.llama_model_get_vocab(address))
        self.n_embd: int = library.llama_model_n_embd_out(address)
        self.n_embd_in: int = library.llama_model_n_embd_inp(address)  # of a row that is given as an embedding
        self.has_axes: bool = library.llama_model_rope_type(address) in (ROPE_TYPE_MROPE, ROPE_TYPE_IMROPE)
        self.n_classes: int = library.llama_model_n_cls_out(address)
        self.window: int = library.llama_model_n_swa(address)  # 0: no layer has one
        self.is_recurrent: bool = library.llama_model_is_recurrent(address)
        self.is_hybrid: bool = library.llama_model_is_hybrid(address)
        self.is_diffusion: bool = library.llama_model_is_diffusion(address)
        self.has_encoder: bool = library.llama_model_has_encoder(address)
        self.has_decoder: bool = library.llama_model_has_decoder(address)

    @classmethod
    def load(
        cls,
        path: str,
        *,
        placement: Placement = Placement(),
        use_mmap: bool = True,
        use_repacking: bool = True,
        is_dry: bool = False,
        progress: Callable[[float], bool] = lambda _share: True,
    ) -> Model | None:
        """None when libllama refuses the file, memory does not suffice, or *progress* says False; the log says why.

        A dry load reads no weights and takes no memory for them; its contexts can be measured, not used.
        """
        library = llama()
        params = library.llama_model_default_params()
        devices = (ctypes.c_void_p * (len(placement.devices) + 1))(*placement.devices, None)
        shares = (ctypes.c_float * MAX_DEVICES)(*placement.n_layers)
        params.devices = ctypes.addressof(devices)
        params.tensor_split = ctypes.addressof(shares)
        params.n_gpu_layers = sum(placement.n_layers)
        params.load_mode = LOAD_MODE_MMAP if use_mmap and not is_dry else LOAD_MODE_NONE
        params.use_extra_bufts = use_repacking
        params.no_alloc = is_dry
        callback = _PROGRESS(lambda share, _data: bool(progress(share)))
        params.progress_callback = ctypes.cast(callback, ctypes.c_void_p)
        address = library.llama_model_load_from_file(path.encode(), params)
        return cls(address) if address else None

    def close(self) -> None:
        if self.address:
            llama().llama_model_free(self.address)
            self.address = 0


@dataclass(frozen=True)
class ContextOptions:
    n_cells: int  # positions that all sequences together may hold
    n_sequences: int
    n_batch: int
    n_outputs: int  # rows of one batch that may be asked for
    n_threads: int
    cache_type: int  # ggml_type
    embeds: bool  # hidden states of every row are wanted, besides logits
    pooling: int  # POOLING_TYPE_*
    abort_function: int = 0
    abort_data: int = 0
    flash_attention: bool = True


class Context:
    """Working memory and what is kept of past tokens, in one pool for all sequences. One thread at a time."""

    def __init__(self, address: int, model: Model, options: ContextOptions) -> None:
        self.address = address
        self._model = model
        self._options = options
        library = llama()
        self.n_cells: int = library.llama_n_ctx(address)
        self.is_causal: bool = library.llama_get_causal_attn(address)
        # None: nothing outlives a batch. Of an encoder alone, libllama makes a memory and does not use it.
        is_encoder = model.has_encoder and not model.has_decoder
        self.memory: int | None = None if is_encoder else library.llama_get_memory(address)
        self.can_shift: bool = bool(self.memory) and library.llama_memory_can_shift(self.memory)

    @classmethod
    def create(cls, model: Model, options: ContextOptions) -> Context | None:
        """None when memory does not suffice or the options do not suit the model; the log says why."""
        library = llama()
        c = library.llama_context_default_params()
        c.n_ctx, c.n_seq_max = options.n_cells, options.n_sequences
        c.n_batch = c.n_ubatch = options.n_batch
        c.n_outputs_max = c.n_outputs_max_per_seq = max(options.n_outputs, options.n_sequences)
        c.n_threads = c.n_threads_batch = options.n_threads
        c.flash_attn_type = FLASH_ATTN_AUTO if options.flash_attention else FLASH_ATTN_DISABLED
        c.type_k = c.type_v = options.cache_type
        c.embeddings, c.pooling_type = options.embeds, options.pooling
        c.abort_callback, c.abort_callback_data = options.abort_function, options.abort_data
        c.kv_unified = True
        # A layer with a window gets as many cells as the others: what a sequence forgets, and when, is then never a
        # matter of what other sequences hold.
        c.swa_full = True
        c.no_perf = True
        address = library.llama_init_from_model(model.address, c)
        return cls(address, model, options) if address else None

    def decode(self, tokens: Ints, positions: Ints, sequences: Ints, wanted: npt.NDArray[np.int8]) -> int:
        """DECODED, NO_ROOM, ABORTED or a negative number. All arrays [n]."""
        n = len(tokens)
        counts = np.ones(n, np.int32)
        pointers = sequences.ctypes.data + 4 * np.arange(n, dtype=np.uint64)
        batch = llama_batch(
            n_tokens=n,
            token=_pointer(tokens, ctypes.c_int32),
            pos=_pointer(positions, ctypes.c_int32),
            n_seq_id=_pointer(counts, ctypes.c_int32),
            seq_id=_pointer(pointers, ctypes.POINTER(ctypes.c_int32)),
            logits=_pointer(wanted, ctypes.c_int8),
        )
        compute = llama().llama_encode if self.memory is None else llama().llama_decode
        status: int = compute(self.address, batch)
        return status

    def decode_rows(
        self, rows: Floats, positions: Ints, sequences: Ints, wanted: npt.NDArray[np.int8], *, sees_both_ways: bool = False
    ) -> int:
        """As decode, of rows [n, n_embd_in] in tokens' places; positions [n], or of a model that has axes [4, n].

        Rows may see each other both ways: then a sequence's must all be here.
        """
        n = len(rows)
        counts = np.ones(n, np.int32)
        pointers = sequences.ctypes.data + 4 * np.arange(n, dtype=np.uint64)
        batch = llama_batch(
            n_tokens=n,
            embd=_pointer(rows, ctypes.c_float),
            pos=_pointer(positions, ctypes.c_int32),
            n_seq_id=_pointer(counts, ctypes.c_int32),
            seq_id=_pointer(pointers, ctypes.POINTER(ctypes.c_int32)),
            logits=_pointer(wanted, ctypes.c_int8),
        )
        if sees_both_ways:
            llama().llama_set_causal_attn(self.address, False)
        try:
            status: int = llama().llama_decode(self.address, batch)
        finally:
            if sees_both_ways:
                llama().llama_set_causal_attn(self.address, True)
        return status

    def logits(self, n_rows: int, n_vocab: int) -> Floats:
        """Of the rows that were wanted, in order: [n_rows, n_vocab]. In libllama's memory, until the next batch."""
        return _floats(llama().llama_get_logits(self.address), n_rows, n_vocab)

    def hidden(self, n_rows: int, width: int) -> Floats:
        """Of all rows of the batch, in order: [n_rows, width]; in libllama's memory."""
        return _floats(llama().llama_get_embeddings(self.address), n_rows, width)

    def pooled(self, sequence: int, width: int) -> Floats:
        """Of a sequence that was in the batch: [width]; in libllama's memory."""
        row: Floats = _floats(llama().llama_get_embeddings_seq(self.address, sequence), 1, width)[0]
        return row

    def apply(self, adapters: Sequence[str]) -> bool:
        """Change the weights by these LoRA files from now on. False when one is refused; the log says why."""
        library = llama()
        loaded = [library.llama_adapter_lora_init(self._model.address, path.encode()) for path in adapters]
        if not all(loaded):
            return False
        addresses, scales = (ctypes.c_void_p * len(loaded))(*loaded), (ctypes.c_float * len(loaded))(*[1.0] * len(loaded))
        status: int = library.llama_set_adapters_lora(
            self.address, ctypes.addressof(addresses), len(loaded), ctypes.addressof(scales)
        )
        return status == 0

    def set_threads(self, n_threads: int) -> None:
        llama().llama_set_n_threads(self.address, n_threads, n_threads)

    def set_abortable(self, is_abortable: bool) -> None:
        o = self._options
        function, data = (o.abort_function, o.abort_data) if is_abortable else (0, 0)
        llama().llama_set_abort_callback(self.address, function or None, data or None)

    # What is kept of past tokens; only where memory is not None.

    def remove(self, sequence: int, begin: int, end: int = -1) -> bool:
        """Forget positions [begin, end). False, and nothing changed, where a part of a sequence cannot be forgotten."""
        done: bool = llama().llama_memory_seq_rm(self.memory, sequence, begin, end)
        return done

    def share(self, source: int, target: int, end: int) -> None:
        """The target, which must be empty, holds the source's positions [0, end) as well, in the same cells."""
        llama().llama_memory_seq_cp(self.memory, source, target, 0, end)

    def move(self, sequence: int, begin: int, change: int) -> None:
        """Change the positions from begin on, of all that share those cells; keys are turned at the next decode."""
        llama().llama_memory_seq_add(self.memory, sequence, begin, -1, change)

    def clear(self) -> None:
        llama().llama_memory_clear(self.memory, True)

    def first(self, sequence: int) -> int:
        """The first position that every layer still holds; -1 when there is none."""
        position: int = llama().llama_memory_seq_pos_min(self.memory, sequence)
        return position

    def last(self, sequence: int) -> int:
        """The last position that is held; -1 when there is none."""
        position: int = llama().llama_memory_seq_pos_max(self.memory, sequence)
        return position

    def close(self) -> None:
        if self.address:
            llama().llama_free(self.address)
            self.address = 0


def _pointer(values: npt.NDArray[Any], kind: Any) -> Any:
    return ctypes.cast(values.ctypes.data, ctypes.POINTER(kind))


def _floats(address: int | None, n_rows: int, width: int) -> Floats:
    assert address, "libllama has no output of this kind"
    values: Floats = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), (n_rows, width))
    return values
