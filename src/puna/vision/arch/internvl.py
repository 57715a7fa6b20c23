"""InternVL's eyes (Chen et al. 2024): a vision transformer over square tiles, two by two patches merged.

An image fills the grid of tiles whose proportions are nearest to its own, and all of it made as small as a tile comes last,
unless there is one tile alone. The class comes first and leaves no row. That is the published processor's and model's;
libmtmd puts black at the sides of the grid, and has the class last, so that each patch gets its neighbour's position.

The encoder of 6B parameters, which the largest models have, divides by root mean squares, also queries and keys across all heads.
No key says so: its norms have no bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile
from puna.ml.backend import Backend, Context, Use
from puna.ml.tensor import Tensor
from puna.nn.declare import bind, gguf
from puna.nn.layers import LayerNorm, Linear, RMSNorm
from puna.tokenizer.tokenizer import Tokenizer
from puna.vision.grid import nearest_grid
from puna.vision.look import Kept, Look
from puna.vision.metadata import Activation, VisionMetadata, VisionOptions
from puna.vision.model import Divided, Piece, Pixels, Placed, Prepared, State
from puna.vision.pixels import Filter, by_cells, normalised, patches, resized, size_of
from puna.vision.special import PLACEHOLDER, special
from puna.vision.vit import MAX_NODES_OF_LAYER, Attention, Layer, Layers, PatchEmbedding, Positions, layers_of

PROJECTOR_EPS = 1e-5
MOST_TILES = 64


@dataclass
class LargeAttention(Attention):
    query_norm: RMSNorm = gguf("attn_q_norm", dims="mixed")
    key_norm: RMSNorm = gguf("attn_k_norm", dims="mixed")

    def normalised(self, query: Tensor, key: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        parts = ((query, self.query_norm), (key, self.key_norm))
        query, key = (norm(x.flatten(), eps).unflatten(*x.shape[:2]) for x, norm in parts)
        return query, key


@dataclass
class LargeLayer(Layer):
    attention: LargeAttention
    norm1: RMSNorm = gguf("ln1", dims="embd")  # type: ignore[assignment]  # called as the other is
    norm2: RMSNorm = gguf("ln2", dims="embd")  # type: ignore[assignment]


@dataclass
class LargeLayers(Layers):
    layers: list[LargeLayer] = gguf("v.blk")  # type: ignore[assignment]  # a list of what a Layer is


@dataclass
class Weights:
    patches: PatchEmbedding = gguf("v.patch_embd")
    positions: Positions = gguf("v.position_embd")
    class_token: Tensor = gguf("v.class_embd", dims="embd", use=Use.VECTOR)
    norm: LayerNorm | None = gguf("v.post_ln", dims="embd", optional=True)
    merged_norm: LayerNorm = gguf("mm.model.mlp.0", dims="merged")
    first: Linear = gguf("mm.model.mlp.1", dims="merged wide")
    second: Linear = gguf("mm.model.mlp.3", dims="wide text")


class InternVLVision:
    is_cross_attended = False

    def __init__(self, file: GGUFFile, backend: Backend, text: GGUFFile, tokenizer: Tokenizer) -> None:
        meta = VisionMetadata(file)
        self.options = o = VisionOptions.read(meta)
        self.activation = meta.activation(Activation.GELU)
        self.n_layers = o.n_layers
        self.kept = Kept(o.head_dim, o.n_heads)
        self.n_out = text.metadata.integer("embedding_length")
        self._side = o.image_size // o.patch_size
        self.cell = meta.integer("vision.projector.scale_factor", default=2, high=self._side)
        if self._side % self.cell:
            raise FileFormatError(f"{file.path}: {self._side} patches along a side are not whole squares of {self.cell}")
        self.max_tiles = meta.integer("vision.preproc_max_tiles", default=12, high=MOST_TILES)
        self.min_tiles = meta.integer("vision.preproc_min_tiles", default=1, high=self.max_tiles)
        self.n_piece = (self._side // self.cell) ** 2
        self._begin, self._end = special(tokenizer, "<img>"), special(tokenizer, "</img>")
        dims = {"embd": o.n_embd, "ff": o.n_ff, "patch": o.patch_size, "positions": self._side**2 + 1}
        dims |= {"merged": o.n_embd * self.cell**2, "text": self.n_out}
        dims |= dict.fromkeys(("q", "k", "v", "mixed"), o.n_heads * o.head_dim) | {"qkv": 3 * o.n_heads * o.head_dim}
        self.weights = bind(Weights, backend, file, {}, dims)
        layers = layers_of(file, o) if "v.blk.0.ln1.bias" in file.tensors else LargeLayers
        self.layers = bind(layers, backend, file, {"layers": o.n_layers}, dims).layers

    def _n_tiles(self, width: int, height: int) -> tuple[int, int]:
        return nearest_grid(width, height, self.options.image_size, self.min_tiles, self.max_tiles)

    def size(self, width: int, height: int) -> tuple[int, int]:
        columns, rows = self._n_tiles(width, height)
        n_rows = (columns * rows + (columns * rows > 1)) * self.n_piece
        return n_rows, n_rows + 2

    def largest(self) -> tuple[int, int]:
        """A line of the most tiles."""
        return self.max_tiles * self.options.image_size, self.options.image_size

    def prepare(self, pixels: Pixels) -> Prepared:
        tile = self.options.image_size
        columns, rows = self._n_tiles(*size_of(pixels))
        filled = resized(pixels, (columns * tile, rows * tile), Filter.BICUBIC)
        parts = [filled[y * tile : (y + 1) * tile, x * tile : (x + 1) * tile] for y in range(rows) for x in range(columns)]
        if len(parts) > 1:
            parts.append(resized(pixels, (tile, tile), Filter.BICUBIC))
        n = len(parts) * self.n_piece
        placed = Placed([self._begin, *[PLACEHOLDER] * n, self._end], [-1, *range(n), -1])
        return Prepared([self._piece(part) for part in parts], placed, n)

    def _piece(self, pixels: Pixels) -> Piece:
        o, side = self.options, self._side
        cut = patches(normalised(pixels, o.mean, o.std), o.patch_size, self.cell)
        places = by_cells(1 + np.arange(side**2, dtype=np.int32).reshape(side, side), self.cell)
        arrays = {"patches": cut, "places": np.concatenate([np.zeros(1, np.int32), places])}
        return Piece(arrays, Divided(1 + side**2, (1, 1 + side**2), self.cell**2))

    def begin(self, ctx: Context, inputs: Mapping[str, Tensor]) -> State:
        w = self.weights
        of_class = ctx.use(w.class_token).reshape(self.options.n_embd, 1)
        return (of_class.concat(w.patches(inputs["patches"]), 1) + w.positions(inputs["places"]),)

    def layer(self, look: Look, state: State, inputs: Mapping[str, Tensor], index: int) -> State:
        return (self.layers[index](look, state[0], self.options, self.activation),)

    def end(self, ctx: Context, state: State, inputs: Mapping[str, Tensor]) -> Tensor:
        w, o, x = self.weights, self.options, state[0]
        if w.norm:
            x = w.norm(x, o.eps)
        # The patches of a cell are neighbours.
        x = x.reshape(o.n_embd * self.cell**2, x.shape[1] // self.cell**2)
        return w.second(w.first(w.merged_norm(x, PROJECTOR_EPS)).gelu())

    def max_nodes(self) -> int:
        return 64 + MAX_NODES_OF_LAYER * self.n_layers
