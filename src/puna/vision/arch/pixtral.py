"""Pixtral (Agrawal et al. 2024) and the eyes of Mistral Small 3: images of any size and proportions, whose patches know their row
and column by rotation.

An image keeps its size unless a side is longer than the file allows; both sides are rounded up to whole patches, of which
Mistral Small merges two by two. That is the published processor's and, but for its rounding, the ancestor's; libmtmd rounds to
the nearest and allows a third of the patches. After each row of the image stands a token, and another one after the last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from puna.errors import FileFormatError, UnsupportedModel
from puna.gguf.reader import GGUFFile
from puna.ml.backend import Backend, Context
from puna.ml.tensor import Gate, RopeOptions, SectionOrder, Sections, Tensor
from puna.nn.declare import bind, gguf
from puna.nn.layers import Linear, RMSNorm
from puna.tokenizer.tokenizer import Tokenizer
from puna.vision.look import Kept, Look
from puna.vision.metadata import CLIP_MEAN, CLIP_STD, Activation, VisionMetadata, VisionOptions
from puna.vision.model import Divided, Piece, Pixels, Placed, Prepared, State
from puna.vision.pixels import Filter, by_cells, normalised, patches, resized, size_of
from puna.vision.special import special
from puna.vision.vit import MAX_NODES_OF_LAYER, GatedLayer, PatchEmbedding, Turn

GATES = {Activation.SILU: Gate.SILU, Activation.GELU: Gate.GELU}


@dataclass
class Weights:
    layers: list[GatedLayer] = gguf("v.blk")
    patches: PatchEmbedding = gguf("v.patch_embd", alt="v.patch_conv")
    norm: RMSNorm = gguf("v.pre_ln", alt="v.encoder_norm", dims="embd")
    merged_norm: RMSNorm | None = gguf("mm.input_norm", alt="mm.norm", dims="embd", optional=True)
    merger: Linear | None = gguf("mm.patch_merger.merging_layer", alt="mm.patch_merger", dims="merged embd", optional=True)
    first: Linear = gguf("mm.1", alt="mm.linear_1", dims="embd wide")
    second: Linear = gguf("mm.2", alt="mm.linear_2", dims="wide text")


class PixtralVision:
    is_cross_attended = False

    def __init__(self, file: GGUFFile, backend: Backend, text: GGUFFile, tokenizer: Tokenizer) -> None:
        meta = VisionMetadata(file)
        self.options = o = VisionOptions.read(meta, mean=CLIP_MEAN, std=CLIP_STD, eps=1e-5)
        activation = meta.activation(Activation.SILU)
        if activation not in GATES:
            raise UnsupportedModel(f"{file.path}: layers gated by {activation.value} are not supported")
        if o.head_dim % 4:
            raise FileFormatError(f"{file.path}: heads of {o.head_dim} have no whole pairs for rows and columns")
        self.gate = GATES[activation]
        self.base = meta.number("vision.rope.freq_base", default=10000.0, low=1.0)
        most = o.image_size // o.patch_size
        self.cell = meta.integer(
            "vision.spatial_merge_size", "spatial_merge_size", default=1 if meta.is_projector else 2, high=most
        )
        # llama.cpp's converter orders each head so that neighbours make a pair; the ancestor's leaves it.
        self.pairs_are_neighbours = meta.is_projector
        self.n_layers = o.n_layers
        self.kept = Kept(o.head_dim, o.n_heads)
        self.n_out = text.metadata.integer("embedding_length")
        self._image, self._break, self._end = (special(tokenizer, name) for name in ("[IMG]", "[IMG_BREAK]", "[IMG_END]"))
        dims = {"embd": o.n_embd, "ff": o.n_ff, "patch": o.patch_size, "text": self.n_out, "merged": o.n_embd * self.cell**2}
        dims |= dict.fromkeys(("q", "k", "v", "mixed"), o.n_heads * o.head_dim)
        self.weights = bind(Weights, backend, file, {"layers": o.n_layers}, dims)
        if (self.weights.merger is None) != (self.weights.merged_norm is None):
            raise FileFormatError(f"{file.path}: there is one of a matrix that merges patches and the norm before it, not both")
        if self.weights.merger is None and self.cell > 1:
            raise FileFormatError(f"{file.path}: nothing merges {self.cell} x {self.cell} patches")

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of what stands in a prompt."""
        o = self.options
        ratio = max(width / o.image_size, height / o.image_size)
        if ratio > 1:
            width, height = max(1, math.floor(width / ratio)), max(1, math.floor(height / ratio))
        unit = o.patch_size * self.cell
        return -(-width // unit), -(-height // unit)

    def size(self, width: int, height: int) -> tuple[int, int]:
        columns, rows = self._grid(width, height)
        return columns * rows, (columns + 1) * rows

    def largest(self) -> tuple[int, int]:
        return self.options.image_size, self.options.image_size

    def prepare(self, pixels: Pixels) -> Prepared:
        o, cell = self.options, self.cell
        columns, rows = self._grid(*size_of(pixels))
        unit = o.patch_size * cell
        values = normalised(resized(pixels, (columns * unit, rows * unit), Filter.BICUBIC), o.mean, o.std)
        row, column = (by_cells(grid.astype(np.int32), cell) for grid in np.indices((rows * cell, columns * cell)))
        arrays = {"patches": patches(values, o.patch_size, cell), **self._places(row, column)}
        by_row = {"patches": 0, "row": 0, "column": 0, "axes": 1}
        divided = Divided(row.size, (0, row.size), cell**2, by_row, begins=True)
        return Prepared([Piece(arrays, divided)], self._placed(columns, rows), columns * rows)

    def _places(self, row: np.ndarray, column: np.ndarray) -> dict[str, np.ndarray]:
        if self.pairs_are_neighbours:
            return {"row": row, "column": column}
        nothing = np.zeros_like(row)
        # A column's frequencies lie between those of a row.
        factors = np.repeat(np.array([1, self.base ** (2 / self.options.head_dim)], np.float32), self.options.head_dim // 4)
        return {"axes": np.stack([row, column, nothing, nothing]), "factors": factors}

    def _turn(self, inputs: Mapping[str, Tensor]) -> Turn:
        """The first half of a head's pairs by the row, the second by the column."""
        head_dim = self.options.head_dim
        if not self.pairs_are_neighbours:
            sections = Sections((head_dim // 4,) * 4, SectionOrder.APART)
            whole = RopeOptions(head_dim, base=self.base, sections=sections)
            return lambda x: x.rope(inputs["axes"].flatten(), whole, inputs["factors"])
        by_row = RopeOptions(head_dim // 2, base=self.base)
        by_column = RopeOptions(head_dim // 2, base=self.base, scale=self.base ** (-2 / head_dim), begin=head_dim // 2)
        return lambda x: x.rope(inputs["row"], by_row).rope(inputs["column"], by_column)

    def _placed(self, columns: int, rows: int) -> Placed:
        tokens, places = [], []
        for row in range(rows):
            tokens += [self._image] * columns + [self._end if row == rows - 1 else self._break]
            places += [*range(row * columns, (row + 1) * columns), -1]
        return Placed(tokens, places)

    def begin(self, ctx: Context, inputs: Mapping[str, Tensor]) -> State:
        return (self.weights.norm(self.weights.patches(inputs["patches"]), self.options.eps),)

    def layer(self, look: Look, state: State, inputs: Mapping[str, Tensor], index: int) -> State:
        return (self.weights.layers[index](look, state[0], self.options, self.gate, self._turn(inputs)),)

    def end(self, ctx: Context, state: State, inputs: Mapping[str, Tensor]) -> Tensor:
        w, o, x = self.weights, self.options, state[0]
        if w.merged_norm and w.merger:
            n_cell, n = self.cell**2, x.shape[1] // self.cell**2
            # The patches of a cell are neighbours; the matrix takes them value by value.
            cells = w.merged_norm(x, o.eps).reshape(o.n_embd, n_cell, n).permute(1, 0, 2, 3).contiguous()
            x = w.merger(cells.reshape(o.n_embd * n_cell, n))
        return w.second(w.first(x).gelu())

    def max_nodes(self) -> int:
        return 64 + MAX_NODES_OF_LAYER * self.n_layers
