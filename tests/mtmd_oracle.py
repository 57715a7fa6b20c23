"""libmtmd and libllama on the same files and pictures: what the engine's eyes are compared with."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from puna.native.log import captured
from puna.native.mtmd import mtmd
from puna.native.projector import MARKER, Chunk, Chunks, Medium, Projector
from tests.oracle import Oracle

__all__ = ["MARKER", "MtmdOracle"]

Pixels = npt.NDArray[np.uint8]  # [height, width, 3]
Floats = npt.NDArray[np.float32]
Media = npt.NDArray[Any]


class MtmdOracle(Oracle):
    """A model of text and its projector. In a prompt, MARKER stands for the next of the pictures.

    A batch must have room for the longest picture where its rows see each other.
    """

    def __init__(self, path: Any, projector: Any, **options: Any) -> None:
        """*options* as Oracle's."""
        super().__init__(path, **options)
        self._n_batch = options.get("n_batch", 512)
        with captured() as lines:
            opened = Projector.load(str(projector), self.model, n_threads=options.get("n_threads", 2))
        assert opened, f"libmtmd cannot load {projector}: {[line.text for line in lines if line.is_complaint]}"
        self.projector = opened
        self.has_axes = opened.has_axes  # M-RoPE: positions along several axes
        self.n_out = opened.n_out  # values of an encoded row

    def chunks(self, prompt: str, images: Sequence[Media] = (), *, add_special: bool = True) -> Chunks:
        """What the prompt becomes: runs of tokens, and pictures with n_tokens, n_positions and positions(first).

        Samples of one channel in a picture's place are sound.
        """
        media = [Medium.image(values) if values.ndim == 3 else Medium.audio(values) for values in images]
        with captured() as lines:
            found = self.projector.tokenize(prompt, media, add_special=add_special)
        assert found is not None, f"libmtmd refuses: {[line.text for line in lines if line.is_complaint]}"
        return found

    def sees_both_ways(self, chunk: Chunk) -> bool:
        return self.projector.sees_both_ways(chunk)

    def encode(self, chunk: Chunk) -> Floats:
        """The rows of a picture: [n_tokens, n_out]."""
        rows = self.projector.encode(chunk)
        assert rows is not None, "libmtmd could not encode"
        return rows

    def encoded(self, pixels: Media) -> Floats:
        """All rows of one picture, of all its tiles in the order in which a prompt has them."""
        return np.concatenate([self.encode(chunk) for chunk in self.chunks(MARKER, [pixels]) if chunk.kind != "text"])

    def evaluate(self, chunks: Chunks, *, first: int = 0, sequence: int = 0) -> tuple[Floats, int]:
        """Logits after the last token, which must be text, and the position after it; libmtmd's own way through the batches."""
        assert chunks[-1].kind == "text"
        after = ctypes.c_int32(first)
        with self.projector.context as projector:
            status = mtmd().mtmd_helper_eval_chunks(
                projector, self.ctx, chunks.address, first, sequence, self._n_batch, True, ctypes.addressof(after)
            )
        assert status == 0, f"mtmd_helper_eval_chunks: {status}"
        return self._row(-1), after.value

    def hidden_states(self, chunks: Chunks, *, sequence: int = 0) -> Floats:
        """Of all tokens and rows, [n, n_embd], of a model made with embeddings=True and pools=False."""
        after, width = ctypes.c_int32(0), self.lib.llama_model_n_embd(self.model)
        found: list[Floats] = []
        for chunk in chunks:
            assert chunk.n_tokens <= self._n_batch, "only the last batch's are there"
            with self.projector.context as projector:
                status = mtmd().mtmd_helper_eval_chunk_single(
                    projector, self.ctx, chunk.address, after.value, sequence, self._n_batch, True, ctypes.addressof(after)
                )
            assert status == 0, f"mtmd_helper_eval_chunk_single: {status}"
            rows = [self.lib.llama_get_embeddings_ith(self.ctx, i) for i in range(chunk.n_tokens)]
            pointers = [ctypes.cast(row, ctypes.POINTER(ctypes.c_float)) for row in rows]
            found += [np.ctypeslib.as_array(pointer, (width,)).copy() for pointer in pointers]
        return np.stack(found)

    def answer(self, prompt: str, images: Sequence[Media], count: int, *, sequence: int = 0) -> list[int]:
        """The likeliest continuation of a prompt with pictures, end tokens included as any other."""
        row, position = self.evaluate(self.chunks(prompt, images), sequence=sequence)
        answer = [int(row.argmax())]
        while len(answer) < count:
            row = self.decode(answer[-1:], [position + len(answer) - 1], [sequence], [0])[0]
            answer.append(int(row.argmax()))
        return answer

    def close(self) -> None:
        self.projector.close()
        super().close()
