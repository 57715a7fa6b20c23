"""Gemma 3's eyes (Gemma Team 2025): SigLIP (Zhai et al. 2023) at one size, averaged over squares of patches.

An image is resized to a square whatever its proportions are, as the published processor and the ancestor have it; libmtmd puts
black at its sides instead. Around its rows stand the tokens that say where it begins and ends, and line ends around those,
again as the published processor has it; libmtmd leaves the line ends out. Rows see each other, also the later ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile
from puna.ml.backend import Backend, Context, Use
from puna.ml.tensor import Tensor
from puna.nn.declare import bind, gguf
from puna.nn.layers import LayerNorm, RMSNorm
from puna.tokenizer.tokenizer import Tokenizer
from puna.vision.look import Kept, Look
from puna.vision.metadata import HALF, Activation, VisionMetadata, VisionOptions
from puna.vision.model import Divided, Piece, Pixels, Placed, Prepared, State
from puna.vision.pixels import Filter, by_cells, normalised, patches, resized
from puna.vision.special import PLACEHOLDER, special
from puna.vision.vit import MAX_NODES_OF_LAYER, PatchEmbedding, Positions, layers_of


@dataclass
class TransposedMatrix:
    """As the checkpoint has it: with a row for each of the values that come in."""

    weight: Tensor = gguf("weight", use=Use.ROWS)

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        """X [n_in, n] to [n_out, n]; rows I32 [n_in] counts up from 0."""
        return self.weight.rows(rows).permute(1, 0, 2, 3).contiguous().mul_mat(x)


@dataclass
class Weights:
    patches: PatchEmbedding = gguf("v.patch_embd", alt="v.patch_embedding")
    positions: Positions = gguf("v.position_embd", alt="v.position_embedding")
    norm: LayerNorm = gguf("v.post_ln", alt="v.post_layernorm", dims="embd")
    pooled_norm: RMSNorm = gguf("mm.soft_emb_norm", alt="mm.mm_soft_emb_norm", dims="embd")
    projection: TransposedMatrix = gguf("mm.input_projection", alt="mm.mm_input_projection", dims="text embd")


class Gemma3Vision:
    is_cross_attended = False

    def __init__(self, file: GGUFFile, backend: Backend, text: GGUFFile, tokenizer: Tokenizer) -> None:
        meta = VisionMetadata(file)
        self.options = o = VisionOptions.read(meta, mean=HALF, std=HALF, eps=1e-6)
        self.activation = meta.activation(Activation.GELU)
        self.n_layers = o.n_layers
        self.kept = Kept(o.head_dim, o.n_heads)
        self.n_out = text.metadata.integer("embedding_length")
        self._side = o.image_size // o.patch_size
        self._cell = self._cell_of(meta)
        self.n_rows = (self._side // self._cell) ** 2
        self._begin, self._end = special(tokenizer, "<start_of_image>"), special(tokenizer, "<end_of_image>")
        self._around = tokenizer.encode("\n\n", add_special=False)
        dims = {"embd": o.n_embd, "ff": o.n_ff, "patch": o.patch_size, "positions": self._side**2, "text": self.n_out}
        widths = dict.fromkeys(("q", "k", "v", "mixed"), o.n_heads * o.head_dim)
        self.weights = bind(Weights, backend, file, {}, dims)
        self.layers = bind(layers_of(file, o), backend, file, {"layers": o.n_layers}, dims | widths).layers

    def _cell_of(self, meta: VisionMetadata) -> int:
        """So many patches along each side become one row. Files of llama.cpp say it, the ancestor's how many rows there are."""
        if meta.is_projector:
            cell = meta.integer("vision.projector.scale_factor", default=4, high=self._side)
        else:
            n_rows = meta.integer("mm.tokens_per_image", "mm_tokens_per_image", default=256, high=self._side**2)
            cell = self._side // math.isqrt(n_rows)
        if self._side % cell:
            raise FileFormatError(f"{meta.path}: {self._side} patches along a side are not whole squares of {cell} x {cell}")
        return cell

    def size(self, width: int, height: int) -> tuple[int, int]:
        return self.n_rows, self.n_rows + 2 + 2 * len(self._around)

    def largest(self) -> tuple[int, int]:
        return self.options.image_size, self.options.image_size

    def prepare(self, pixels: Pixels) -> Prepared:
        o, side = self.options, self._side
        values = normalised(resized(pixels, (o.image_size, o.image_size), Filter.BILINEAR), o.mean, o.std)
        values = values[: side * o.patch_size, : side * o.patch_size]
        places = by_cells(np.arange(side**2, dtype=np.int32).reshape(side, side), self._cell)
        arrays = {
            "patches": patches(values, o.patch_size, self._cell),
            "places": places,
            "rows": np.arange(o.n_embd, dtype=np.int32),
        }
        divided = Divided(side**2, (0, side**2), self._cell**2, {"patches": 0, "places": 0}, begins=True)
        return Prepared([Piece(arrays, divided)], self._placed(), self.n_rows)

    def _placed(self) -> Placed:
        before, after = [*self._around, self._begin], [self._end, *self._around]
        first, n = len(before), self.n_rows
        return Placed(
            tokens=[*before, *[PLACEHOLDER] * n, *after],
            rows=[*[-1] * first, *range(n), *[-1] * len(after)],
            together=[(0, first + n + len(after))],
            bidirectional=[(first, first + n)],
        )

    def begin(self, ctx: Context, inputs: Mapping[str, Tensor]) -> State:
        return (self.weights.patches(inputs["patches"]) + self.weights.positions(inputs["places"]),)

    def layer(self, look: Look, state: State, inputs: Mapping[str, Tensor], index: int) -> State:
        return (self.layers[index](look, state[0], self.options, self.activation),)

    def end(self, ctx: Context, state: State, inputs: Mapping[str, Tensor]) -> Tensor:
        o, w, n_cell = self.options, self.weights, self._cell**2
        x = w.norm(state[0], o.eps)
        n = x.shape[1] // n_cell
        # The patches of a cell are neighbours: their mean is a sum over the middle axis.
        cells = x.reshape(o.n_embd, n_cell, n).permute(1, 0, 2, 3).contiguous()
        pooled = cells.sum_rows().reshape(o.n_embd, n).scale(1 / n_cell)
        return w.projection(w.pooled_norm(pooled, o.eps), inputs["rows"])

    def max_nodes(self) -> int:
        return 64 + MAX_NODES_OF_LAYER * self.n_layers
