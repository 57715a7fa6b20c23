"""Gemma 4's eyes (Gemma Team 2026): a vision transformer in the manner of its language part.

An image is resized, larger or smaller, until it fills a budget of rows at nearly its own proportions. Places are looked up for
column and row, and half of each head turns by either; norms stand before and after attention and MLP, queries, keys and values
are normalised, and what passes through matrices is kept within bounds. Squares of patches are averaged into rows.

In the large models rows see each other, in layers with a window; in the small ones, those whose tokens bring each layer a vector,
they see backwards as text does. libmtmd lets them see each other in all sizes. Files of llama.cpp leave out what the MLP's gate
is bent by, and libmtmd takes the quick GELU then; it is the one by tanh, as published. The ancestor normalised rows after their
projection; before it, as published.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile
from puna.ml.backend import Backend, Context, Use
from puna.ml.tensor import RopeOptions, Tensor
from puna.nn.declare import bind, gguf
from puna.nn.layers import Linear, RMSNorm
from puna.tokenizer.tokenizer import Tokenizer
from puna.vision.budget import Budget, Size
from puna.vision.clamps import read_clamps
from puna.vision.look import Kept, Look
from puna.vision.metadata import VisionMetadata, VisionOptions
from puna.vision.model import Divided, Piece, Pixels, Placed, Prepared, State
from puna.vision.pixels import Filter, by_cells, normalised, patches, resized
from puna.vision.special import special
from puna.vision.vit import MAX_NODES_OF_LAYER, PatchEmbedding

MAX_TOKENS = 280
PADDING = 0  # the token that stands where a row does
ROPE_BASE = 100.0

# A layer's matrices, in the order in which a file may have the bounds of all of them in one tensor.
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_out", "ffn_gate", "ffn_up", "ffn_down")
PROJECTION = "mm.input_projection"


@dataclass
class Places:
    """Two tables: one looked up by column, one by row."""

    weight: Tensor = gguf("weight", dims="embd positions 2", use=Use.ROWS)

    def __call__(self, columns: Tensor, rows: Tensor) -> Tensor:
        """Places I32 [n] to [n_embd, n]."""
        weight = self.weight.beside(columns)
        n_embd, n, *_ = weight.shape
        by_column, by_row = (weight.view((n_embd, n), (weight.strides[1],), i * weight.strides[2]) for i in (0, 1))
        return by_column.rows(columns) + by_row.rows(rows)


@dataclass
class Layer:
    query: Linear = gguf("attn_q", dims="embd mixed")
    key: Linear = gguf("attn_k", dims="embd mixed")
    value: Linear = gguf("attn_v", dims="embd mixed")
    output: Linear = gguf("attn_out", dims="mixed embd")
    gate: Linear = gguf("ffn_gate", dims="embd ff")
    up: Linear = gguf("ffn_up", dims="embd ff")
    down: Linear = gguf("ffn_down", dims="ff embd")
    query_norm: RMSNorm = gguf("attn_q_norm", dims="head")
    key_norm: RMSNorm = gguf("attn_k_norm", dims="head")
    attention_norm: RMSNorm = gguf("ln1", dims="embd")
    attention_post_norm: RMSNorm = gguf("attn_post_norm", dims="embd")
    mlp_norm: RMSNorm = gguf("ln2", dims="embd")
    mlp_post_norm: RMSNorm = gguf("ffn_post_norm", dims="embd")
    scale: Tensor | None = gguf("out_scale.weight", dims="1", use=Use.VECTOR, optional=True)


@dataclass
class Weights:
    patches: PatchEmbedding = gguf("v.patch_embd")
    places: Places = gguf("v.position_embd")
    layers: list[Layer] = gguf("v.blk")
    mean: Tensor | None = gguf("v.std_bias", dims="embd", use=Use.VECTOR, optional=True)
    deviation: Tensor | None = gguf("v.std_scale", dims="embd", use=Use.VECTOR, optional=True)  # what they are multiplied by
    projection: Linear = gguf(PROJECTION, dims="embd text")


class Gemma4Vision:
    is_cross_attended = False

    def __init__(self, file: GGUFFile, backend: Backend, text: GGUFFile, tokenizer: Tokenizer) -> None:
        meta = VisionMetadata(file)
        plain, ones = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        self.options = o = VisionOptions.read(meta, mean=plain, std=ones, eps=1e-6, image_size=1 << 14)
        self.n_layers = o.n_layers
        self.kept = Kept(o.head_dim, o.n_heads)
        self.n_out = text.metadata.integer("embedding_length")
        self._cell = meta.integer("vision.projector.scale_factor", default=3, high=16)
        if o.head_dim % 4:
            raise FileFormatError(f"{meta.path}: heads of {o.head_dim} cannot turn by column and row")
        self._rope = RopeOptions(o.head_dim // 2, neox=True, base=ROPE_BASE)
        self._sees_ahead = not text.metadata.integer("embedding_length_per_layer_input", 0)
        self._begin, self._end = special(tokenizer, "<|image>"), special(tokenizer, "<image|>")
        dims = {"embd": o.n_embd, "ff": o.n_ff, "patch": o.patch_size, "text": self.n_out}
        dims |= {"head": o.head_dim, "mixed": o.n_heads * o.head_dim}
        self.weights = bind(Weights, backend, file, {"layers": o.n_layers}, dims)
        if (self.weights.mean is None) != (self.weights.deviation is None):
            raise FileFormatError(f"{meta.path}: there is one of v.std_bias and v.std_scale, not both")
        names = [f"v.blk.{i}.{name}" for i in range(o.n_layers) for name in MATRICES]
        self._clamps = read_clamps(file, [*names, PROJECTION], packed="v.clamp_data")
        n_places = self.weights.places.weight.shape[1]
        if n_places < MAX_TOKENS * self._cell:
            raise FileFormatError(f"{meta.path}: {n_places} places along a side, and images may have {MAX_TOKENS * self._cell}")

    @property
    def _multiple(self) -> int:
        return self.options.patch_size * self._cell

    def _fit(self, width: int, height: int) -> Size:
        """The largest size within the budget at these proportions, each side rounded down; a side that would be none is one row
        or column, and the other no longer than the budget.
        """
        scale = math.sqrt(MAX_TOKENS * self._multiple**2 / (width * height))
        columns, rows = (math.floor(scale * side / self._multiple) for side in (width, height))
        if not rows:
            columns, rows = min(width // height, MAX_TOKENS), 1
        elif not columns:
            columns, rows = 1, min(height // width, MAX_TOKENS)
        return columns * self._multiple, rows * self._multiple

    def size(self, width: int, height: int) -> tuple[int, int]:
        fitted = self._fit(width, height)
        n = fitted[0] * fitted[1] // self._multiple**2
        return n, n + 2

    def largest(self) -> tuple[int, int]:
        return Budget(self._multiple, 1, MAX_TOKENS * self._multiple**2).largest()

    def prepare(self, pixels: Pixels) -> Prepared:
        o, cell = self.options, self._cell
        height, width, _ = pixels.shape
        fitted = self._fit(width, height)
        values = 2 * normalised(resized(pixels, fitted, Filter.BICUBIC), o.mean, o.std) - 1
        rows, columns = np.mgrid[: fitted[1] // o.patch_size, : fitted[0] // o.patch_size].astype(np.int32)
        arrays = {
            "patches": patches(values, o.patch_size, cell),
            "columns": by_cells(columns, cell),
            "rows": by_cells(rows, cell),
        }
        n_rows = rows.size // cell**2
        divided = Divided(rows.size, (0, rows.size), cell**2, dict.fromkeys(arrays, 0), begins=True)
        return Prepared([Piece(arrays, divided)], self._placed(n_rows), n_rows)

    def _placed(self, n: int) -> Placed:
        rows = [(1, n + 1)] if self._sees_ahead else []
        tokens = [self._begin, *[PADDING] * n, self._end]
        return Placed(tokens=tokens, rows=[-1, *range(n), -1], together=rows, bidirectional=rows)

    def begin(self, ctx: Context, inputs: Mapping[str, Tensor]) -> State:
        return (self.weights.patches(inputs["patches"]) + self.weights.places(inputs["columns"], inputs["rows"]),)

    def layer(self, look: Look, state: State, inputs: Mapping[str, Tensor], index: int) -> State:
        o, layer, (x,) = self.options, self.weights.layers[index], state

        def through(name: str, linear: Linear, x: Tensor) -> Tensor:
            return self._through(f"v.blk.{index}.{name}", linear, x)

        y = layer.attention_norm(x, o.eps)
        parts = (("attn_q", layer.query), ("attn_k", layer.key), ("attn_v", layer.value))
        query, key, value = (through(name, linear, y).reshape(o.head_dim, o.n_heads, x.shape[1]) for name, linear in parts)
        query = self._turned(layer.query_norm(query, o.eps), inputs)
        key = self._turned(layer.key_norm(key, o.eps), inputs)
        mixed = look(query, key, value.rms_norm(o.eps), scale=1.0)
        x = x + layer.attention_post_norm(through("attn_out", layer.output, mixed), o.eps)
        y = layer.mlp_norm(x, o.eps)
        gated = through("ffn_gate", layer.gate, y).geglu(through("ffn_up", layer.up, y))
        x = x + layer.mlp_post_norm(through("ffn_down", layer.down, gated), o.eps)
        return (x if layer.scale is None else x * layer.scale,)

    def _through(self, name: str, linear: Linear, x: Tensor) -> Tensor:
        clamps = self._clamps.get(name)
        return clamps(linear, x) if clamps else linear(x)

    def _turned(self, x: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Half of each head by the column, half by the row: x [head_dim, n_heads, n]."""
        half = x.shape[0] // 2
        halves = (x.view((half, *x.shape[1:3]), x.strides[1:3], i * half * x.strides[0]) for i in (0, 1))
        first, second = (part.rope(inputs[name], self._rope) for part, name in zip(halves, ("columns", "rows"), strict=True))
        return first.concat(second, 0)

    def end(self, ctx: Context, state: State, inputs: Mapping[str, Tensor]) -> Tensor:
        o, w, (x,), n_cell = self.options, self.weights, state, self._cell**2
        n = x.shape[1] // n_cell
        # The patches of a cell are neighbours: their mean is a sum over the middle axis.
        cells = x.reshape(o.n_embd, n_cell, n).permute(1, 0, 2, 3).contiguous()
        rows = cells.sum_rows().reshape(o.n_embd, n).scale(math.sqrt(o.n_embd) / n_cell)
        if w.mean is not None and w.deviation is not None:
            rows = (rows - w.mean) * w.deviation
        return self._through(PROJECTION, w.projection, rows.rms_norm(o.eps))

    def max_nodes(self) -> int:
        return 64 + MAX_NODES_OF_LAYER * self.n_layers
