"""Llama 4's eyes (Meta 2025): a vision transformer over tiles of one size.

An image goes onto the canvas of up to 16 tiles that it fits with the least enlargement, is itself not enlarged beyond a tile's
size, and lies at the upper left on black; where there are several tiles, the whole image at one tile's size follows them.
Each tile has a class vector behind its patches, positions that are learned, and half of each head turns by column, half by row.
Squares of patches become rows. In a prompt, tokens part the tiles of a line, end lines, and announce the whole image.

libmtmd knows no more than three tiles a side, leaves out all of those tokens, and has a tile's rows column by column, which is
not how the model was trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile
from puna.ml.backend import Backend, Context, Use
from puna.ml.tensor import RopeOptions, Tensor
from puna.nn.declare import bind, gguf
from puna.nn.layers import LayerNorm, Linear
from puna.tokenizer.tokenizer import Tokenizer
from puna.vision.look import Kept, Look
from puna.vision.metadata import HALF, Activation, VisionMetadata, VisionOptions
from puna.vision.model import Divided, Piece, Pixels, Placed, Prepared, State
from puna.vision.pixels import Filter, by_cells, normalised, patches, resized
from puna.vision.special import special
from puna.vision.vit import MAX_NODES_OF_LAYER, Attention, FeedForward

MAX_TILES = 16


class Grid(NamedTuple):
    columns: int
    rows: int

    @property
    def n_tiles(self) -> int:
        return self.columns * self.rows


GRIDS = [Grid(columns, rows) for columns in range(1, MAX_TILES + 1) for rows in range(1, MAX_TILES // columns + 1)]


def best_grid(width: int, height: int, side: int) -> Grid:
    """The grid of tiles on which an image is enlarged least, or where it is too large for all, made smaller least; of several
    the one with the fewest tiles.
    """
    scales = {grid: min(grid.columns * side / width, grid.rows * side / height) for grid in GRIDS}
    fits = [scale for scale in scales.values() if scale >= 1]
    best = min(fits) if fits else max(scales.values())
    return min((grid for grid, scale in scales.items() if scale == best), key=lambda grid: grid.n_tiles)


def on_grid(pixels: Pixels, grid: Grid, side: int) -> Pixels:
    """As large as fits, but enlarged no further than to a tile's size, at the upper left of a black canvas."""
    height, width, _ = pixels.shape
    limits = min(max(width, side), grid.columns * side), min(max(height, side), grid.rows * side)
    scale_x, scale_y = limits[0] / width, limits[1] / height
    if scale_x < scale_y:
        size = limits[0], min(math.floor(height * scale_x), limits[1])
    else:
        size = min(math.floor(width * scale_y), limits[0]), limits[1]
    size = max(size[0], 1), max(size[1], 1)
    canvas = np.zeros((grid.rows * side, grid.columns * side, 3), np.uint8)
    canvas[: size[1], : size[0]] = resized(pixels, size, Filter.BILINEAR)
    return canvas


class Tokens(NamedTuple):
    begin: int
    whole: int
    patch: int
    between: int
    line_end: int
    end: int


NAMES = Tokens("<|image_start|>", "<|image|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>", "<|image_end|>")  # type: ignore[arg-type]  # what they are called


@dataclass
class Layer:
    attention: Attention
    mlp: FeedForward
    norm1: LayerNorm = gguf("ln1", alt="attn_norm", dims="embd")
    norm2: LayerNorm = gguf("ln2", alt="ffn_norm", dims="embd")


@dataclass
class Weights:
    patches: Linear = gguf("v.patch_embd", alt="v.patch_embedding", dims="patch_values embd")
    class_vector: Tensor = gguf("v.class_embd", alt="v.class_embedding", dims="embd", use=Use.VECTOR)
    positions: Tensor = gguf(
        "v.position_embd.weight",
        alt="v.positional_embedding_vlm v.positional_embedding_vlm.weight",
        dims="embd places",
        use=Use.ROWS,
    )
    layers: list[Layer] = gguf("v.blk")
    first_norm: LayerNorm = gguf("v.pre_ln", alt="v.layernorm_pre", dims="embd")
    norm: LayerNorm = gguf("v.post_ln", alt="v.layernorm_post", dims="embd")
    adapter_in: Linear = gguf("mm.model.mlp.1", alt="v.vision_adapter.mlp.fc1", dims="merged adapter")
    adapter_out: Linear = gguf("mm.model.mlp.2", alt="v.vision_adapter.mlp.fc2", dims="adapter adapted")
    projection: Linear = gguf("mm.model.fc", alt="mm.linear_1", dims="adapted text")


class Llama4Vision:
    is_cross_attended = False

    def __init__(self, file: GGUFFile, backend: Backend, text: GGUFFile, tokenizer: Tokenizer) -> None:
        meta = VisionMetadata(file)
        eps = meta.number("vision.layer_norm_epsilon", default=1e-5, high=1.0)
        self.options = o = VisionOptions.read(meta, mean=HALF, std=HALF, eps=eps)
        self.activation = meta.activation(Activation.GELU)
        self.n_layers = o.n_layers
        self.kept = Kept(o.head_dim, o.n_heads)
        self.n_out = text.metadata.integer("embedding_length")
        self._side = o.image_size // o.patch_size
        self._cell = self._read_cell(meta)
        self.n_rows = (self._side // self._cell) ** 2  # of a tile
        if o.head_dim % 4 or o.image_size % o.patch_size:
            what = f"heads of {o.head_dim}, and patches of {o.patch_size} in tiles of {o.image_size}"
            raise FileFormatError(f"{meta.path}: {what} do not fit")
        base = meta.number("vision.rope.freq_base", default=10000.0, low=1.0)
        self._rope = RopeOptions(o.head_dim // 2, base=base)
        self._tokens = Tokens(*(special(tokenizer, str(name)) for name in NAMES))
        width = o.n_heads * o.head_dim
        dims = {"embd": o.n_embd, "ff": o.n_ff, "places": self._side**2 + 1, "text": self.n_out}
        dims |= {"patch_values": 3 * o.patch_size**2, "merged": o.n_embd * self._cell**2}
        dims |= dict.fromkeys(("q", "k", "v", "mixed"), width) | {"qkv": 3 * width}
        self.weights = bind(Weights, backend, file, {"layers": o.n_layers}, dims)

    def _read_cell(self, meta: VisionMetadata) -> int:
        """So many patches along each side become a row: a number, or the ancestor's ratio, one over it."""
        ratio = meta.number("vision.pixel_shuffle_ratio", default=0.5, high=1.0)
        default = round(1 / ratio) if ratio > 1 / self._side else self._side
        cell = meta.integer("vision.projector.scale_factor", default=default, high=self._side)
        if self._side % cell:
            raise FileFormatError(f"{meta.path}: {self._side} patches along a side are not whole squares of {cell} x {cell}")
        return cell

    def _n_pieces(self, grid: Grid) -> int:
        return grid.n_tiles + (grid.n_tiles > 1)

    def size(self, width: int, height: int) -> tuple[int, int]:
        grid = best_grid(width, height, self.options.image_size)
        n_rows = self._n_pieces(grid) * self.n_rows
        return n_rows, n_rows + 3 + (grid.n_tiles if grid.n_tiles > 1 else 0)

    def largest(self) -> tuple[int, int]:
        side = math.isqrt(MAX_TILES) * self.options.image_size
        return side, side

    def prepare(self, pixels: Pixels) -> Prepared:
        height, width, _ = pixels.shape
        side = self.options.image_size
        grid = best_grid(width, height, side)
        canvas = on_grid(pixels, grid, side).reshape(grid.rows, side, grid.columns, side, 3)
        tiles = [canvas[row, :, column] for row in range(grid.rows) for column in range(grid.columns)]
        if grid.n_tiles > 1:
            tiles.append(resized(pixels, (side, side), Filter.BILINEAR))
        pieces = [self._piece(tile) for tile in tiles]
        return Prepared(pieces, self._placed(grid), len(pieces) * self.n_rows)

    def _piece(self, tile: Pixels) -> Piece:
        """Patches cell by cell; their places count from 1 along each axis, and the class vector's is 0."""
        o, side = self.options, self._side
        rows, columns = (by_cells(x, self._cell) for x in np.mgrid[:side, :side].astype(np.int32))
        places = rows * side + columns
        arrays = {
            "patches": patches(normalised(tile, o.mean, o.std), o.patch_size, self._cell),
            "places": np.append(places, np.int32(side**2)),
            "columns": np.append(columns + 1, np.int32(0)),
            "rows": np.append(rows + 1, np.int32(0)),
        }
        divided = Divided(side**2 + 1, (0, side**2), self._cell**2, {"columns": 0, "rows": 0})
        return Piece(arrays, divided)

    def _placed(self, grid: Grid) -> Placed:
        t, n = self._tokens, self.n_rows
        tokens, rows = [t.begin], [-1]

        def add(*marks: int) -> None:
            tokens.extend(marks)
            rows.extend([-1] * len(marks))

        def add_tile() -> None:
            first = max(rows) + 1
            tokens.extend([t.patch] * n)
            rows.extend(range(first, first + n))

        for _ in range(grid.rows if grid.n_tiles > 1 else 0):
            for column in range(grid.columns):
                add_tile()
                add(t.between if column < grid.columns - 1 else t.line_end)
        add(t.whole)
        add_tile()
        add(t.end)
        return Placed(tokens=tokens, rows=rows)

    def begin(self, ctx: Context, inputs: Mapping[str, Tensor]) -> State:
        w = self.weights
        x = w.patches(inputs["patches"])
        x = x.concat(w.class_vector.beside(x).reshape(self.options.n_embd, 1), 1)
        return (w.first_norm(x + w.positions.rows(inputs["places"]), self.options.eps),)

    def layer(self, look: Look, state: State, inputs: Mapping[str, Tensor], index: int) -> State:
        o, layer, (x,) = self.options, self.weights.layers[index], state
        x = x + layer.attention(look, layer.norm1(x, o.eps), o, lambda y: self._turned(y, inputs))
        return (x + layer.mlp(layer.norm2(x, o.eps), self.activation),)

    def _turned(self, x: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Half of each head by the column, half by the row: x [head_dim, n_heads, n]."""
        half = x.shape[0] // 2
        halves = (x.view((half, *x.shape[1:3]), x.strides[1:3], i * half * x.strides[0]) for i in (0, 1))
        first, second = (part.rope(inputs[name], self._rope) for part, name in zip(halves, ("columns", "rows"), strict=True))
        return first.concat(second, 0)

    def end(self, ctx: Context, state: State, inputs: Mapping[str, Tensor]) -> Tensor:
        w, n_cell = self.weights, self._cell**2
        x = w.norm(state[0], self.options.eps)
        # The patches of a cell are neighbours.
        cells = x.reshape(x.shape[0] * n_cell, x.shape[1] // n_cell)
        return w.projection(w.adapter_out(w.adapter_in(cells).gelu()).gelu())

    def max_nodes(self) -> int:
        return 64 + MAX_NODES_OF_LAYER * self.n_layers
