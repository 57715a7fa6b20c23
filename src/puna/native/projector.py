"""A projector that libmtmd holds: what turns pictures and sound into rows that a model of libllama takes in tokens' places.

For callers that do not speak ctypes. One thread at a time, but for ``tokenize`` and ``close``, which any may call. A file's
oddities and a medium's may end the process inside the library: whoever hands them on looks first.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, overload

import numpy as np
import numpy.typing as npt

from puna.native.fit import MARKER as _MARKER
from puna.native.in_use import InUse
from puna.native.llama import FLASH_ATTN_AUTO, FLASH_ATTN_DISABLED, llama
from puna.native.log import hear
from puna.native.mtmd import (
    CHUNK_TYPE_AUDIO,
    CHUNK_TYPE_IMAGE,
    CHUNK_TYPE_TEXT,
    mtmd,
    mtmd_decoder_pos,
    mtmd_input_text,
)

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
Kind = Literal["text", "image", "audio"]

MARKER = _MARKER.decode()  # stands in a text where a medium is
_KINDS: Sequence[tuple[int, Kind]] = ((CHUNK_TYPE_TEXT, "text"), (CHUNK_TYPE_IMAGE, "image"), (CHUNK_TYPE_AUDIO, "audio"))


class Medium:
    """A picture or a sound as libmtmd takes it; the values are copied."""

    def __init__(self, address: int) -> None:
        self.address = address
        self._free = weakref.finalize(self, mtmd().mtmd_bitmap_free, address)

    @classmethod
    def image(cls, pixels: npt.NDArray[np.uint8]) -> Medium:
        """[height, width, 3], neither of them 0."""
        height, width, n_channels = pixels.shape
        assert n_channels == 3, "a picture has three channels"
        assert min(width, height) > 0, "a picture has pixels"
        values = np.ascontiguousarray(pixels)
        return cls(mtmd().mtmd_bitmap_init(width, height, values.ctypes.data))

    @classmethod
    def blank(cls, width: int, height: int) -> Medium:
        """A picture of which only the size is known, to count what it takes."""
        assert min(width, height) > 0, "a picture has pixels"
        return cls(mtmd().mtmd_bitmap_init(width, height, None))

    @classmethod
    def audio(cls, samples: Floats) -> Medium:
        """Samples of one channel, from -1 to 1, as many a second as the projector says; more than one."""
        assert samples.ndim == 1, "a sound has one channel"
        assert len(samples) > 1, "a sound has samples"
        values = np.ascontiguousarray(samples, np.float32)
        return cls(mtmd().mtmd_bitmap_init_from_audio(len(values), values.ctypes.data))


@dataclass(frozen=True)
class Chunk:
    """A run of tokens, or of rows that a medium is encoded to."""

    kind: Kind
    tokens: Sequence[int]  # of a text
    n_tokens: int  # or rows
    n_positions: int
    address: int = field(repr=False)
    _owner: Chunks = field(repr=False)  # it must outlive this

    def positions(self, first: int = 0) -> Ints | None:
        """[4, n]: time, row and column of each row of an image where *first* is that of the first; for M-RoPE."""
        if self.kind != "image":
            return None
        library = mtmd()
        found = (mtmd_decoder_pos * self.n_tokens)()
        image = library.mtmd_input_chunk_get_tokens_image(self.address)
        library.mtmd_helper_image_get_decoder_pos(image, first, ctypes.addressof(found))
        t, x, y, z = np.frombuffer(memoryview(found), np.uint32).reshape(self.n_tokens, 4).T.astype(np.int32)
        return np.stack([t, y, x, z])


class Chunks(Sequence[Chunk]):
    """What a text and its media become; libmtmd's list, freed when neither it nor a part of it is held any more."""

    def __init__(self) -> None:
        self.address: int = mtmd().mtmd_input_chunks_init()
        self._free = weakref.finalize(self, mtmd().mtmd_input_chunks_free, self.address)

    def __len__(self) -> int:
        count: int = mtmd().mtmd_input_chunks_size(self.address)
        return count

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> list[Chunk]: ...
    def __getitem__(self, index: int | slice) -> Chunk | list[Chunk]:
        if isinstance(index, slice):
            return [self._at(i) for i in range(len(self))[index]]
        return self._at(range(len(self))[index])

    def _at(self, index: int) -> Chunk:
        library = mtmd()
        address = library.mtmd_input_chunks_get(self.address, index)
        kind = dict(_KINDS)[library.mtmd_input_chunk_get_type(address)]
        tokens: list[int] = []
        if kind == "text":
            count = ctypes.c_size_t()
            begin = library.mtmd_input_chunk_get_tokens_text(address, ctypes.addressof(count))
            tokens = (ctypes.c_int32 * count.value).from_address(begin)[:] if count.value else []
        n_tokens, n_positions = library.mtmd_input_chunk_get_n_tokens(address), library.mtmd_input_chunk_get_n_pos(address)
        return Chunk(kind, tokens, n_tokens, n_positions, address, self)


class Projector:
    """Made for one model of libllama, which must outlive it."""

    def __init__(self, address: int, model: int) -> None:
        library = mtmd()
        self.context = InUse("a projector", address, library.mtmd_free)
        self.n_out: int = llama().llama_model_n_embd_inp(model)  # values of an encoded row
        self.sees: bool = library.mtmd_support_vision(address)
        self.hears: bool = library.mtmd_support_audio(address)
        self.sample_rate: int = library.mtmd_get_audio_sample_rate(address)  # of sound; -1 where it hears none
        self.has_axes: bool = library.mtmd_decode_use_mrope(address)

    @classmethod
    def load(cls, path: str, model: int, *, n_threads: int, device: int = 0, flash_attention: bool = True) -> Projector | None:
        """On this device, or with 0 on the CPU. None when libmtmd refuses the file, or beside this model; the log says why.
        Devices and models are addresses.
        """
        hear(mtmd().mtmd_helper_log_set)
        params = mtmd().mtmd_context_params_default()
        params.use_gpu = bool(device)
        params.device = device or None
        params.n_threads = n_threads
        params.print_timings = False
        params.warmup = True  # plans the first graph, and takes its memory
        params.flash_attn_type = FLASH_ATTN_AUTO if flash_attention else FLASH_ATTN_DISABLED
        address = mtmd().mtmd_init_from_file(path.encode(), model, params)
        return cls(address, model) if address else None

    def tokenize(
        self, text: str, media: Sequence[Medium] = (), *, add_special: bool = False, parse_special: bool = True
    ) -> Chunks | None:
        """The text with a medium for each MARKER in it, and the tokens of the model's own around those.

        None where their numbers differ or a medium cannot be prepared; the log says why.
        """
        library, chunks, encoded = mtmd(), Chunks(), text.encode()
        stated = mtmd_input_text(encoded, len(encoded), add_special, parse_special)
        bitmaps = (ctypes.c_void_p * max(len(media), 1))(*(medium.address for medium in media))
        with self.context as address:
            status: int = library.mtmd_tokenize(
                address, chunks.address, ctypes.addressof(stated), ctypes.addressof(bitmaps), len(media)
            )
        return chunks if status == 0 else None

    def sees_both_ways(self, chunk: Chunk) -> bool:
        """Whether the rows of this medium see each other, the later ones too."""
        with self.context as address:
            answer: bool = mtmd().mtmd_decode_use_non_causal(address, chunk.address)
        return answer

    def encode(self, chunk: Chunk) -> Floats | None:
        """[n_tokens, n_out]; None where it failed, and the log says why."""
        library = mtmd()
        with self.context as address:
            if chunk.kind == "text" or library.mtmd_encode_chunk(address, chunk.address) != 0:
                return None
            rows = ctypes.cast(library.mtmd_get_output_embd(address), ctypes.POINTER(ctypes.c_float))
            values: Floats = np.ctypeslib.as_array(rows, (chunk.n_tokens, self.n_out)).copy()
            return values

    def close(self) -> None:
        """Once nobody is in the middle of a call."""
        self.context.close()
