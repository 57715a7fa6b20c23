"""Qwen 3-VL's eyes (Qwen Team 2025): a vision transformer at the image's own proportions.

Unlike Qwen 2.5-VL's every layer attends to everything, positions are learned as well as turned by, and some layers give the
language part something beside the last (DeepStack): merged as the last is, behind it in the row. Also the eyes of Qwen 3.5,
without that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from math import isqrt

from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile
from puna.ml.backend import Backend, Context, Use
from puna.ml.tensor import Tensor
from puna.nn.declare import bind, gguf
from puna.nn.layers import LayerNorm, Linear
from puna.tokenizer.tokenizer import Tokenizer
from puna.vision.budget import Budget
from puna.vision.interpolated import InterpolatedPositions, position_arrays
from puna.vision.look import Kept, Look
from puna.vision.metadata import HALF, VisionMetadata, VisionOptions
from puna.vision.model import Divided, Piece, Pixels, Prepared, State
from puna.vision.mrope import patch_places, patch_rope, placed
from puna.vision.pixels import Filter, normalised, patches, resized
from puna.vision.special import special
from puna.vision.vit import MAX_NODES_OF_LAYER, Attention

MIN_TOKENS, MAX_TOKENS = 8, 4096


@dataclass
class FrameEmbedding:
    """A matrix for each of two frames, of which an image is two equal ones."""

    first: Tensor = gguf("v.patch_embd.weight", dims="patch patch 3 embd", use=Use.MATRIX)
    second: Tensor = gguf("v.patch_embd.weight.1", dims="patch patch 3 embd", use=Use.MATRIX)
    bias: Tensor = gguf("v.patch_embd.bias", dims="embd", use=Use.VECTOR)

    def __call__(self, patches: Tensor) -> Tensor:
        """Patches [3 * patch * patch, n] to [n_embd, n]."""
        width, height, n_channels, n_embd = self.first.shape
        both = [w.beside(patches).reshape(width * height * n_channels, n_embd) for w in (self.first, self.second)]
        return both[0].mul_mat(patches) + both[1].mul_mat(patches) + self.bias


@dataclass
class FilmEmbedding:
    """The same as one matrix, in which the two frames of a channel follow one another."""

    both: Tensor = gguf("v.patch_embed.weight", dims="patch patch 2 3*embd", use=Use.MATRIX)
    bias: Tensor = gguf("v.patch_embed.bias", dims="embd", use=Use.VECTOR)

    def __call__(self, patches: Tensor) -> Tensor:
        n_values, n = self.both.shape[0] * self.both.shape[1], patches.shape[1]
        n_channels = patches.shape[0] // n_values
        matrix = self.both.beside(patches).reshape(2 * patches.shape[0], self.both.shape[3] // n_channels)
        frames = patches.reshape(n_values, 1, n_channels, n).repeat(n_values, 2, n_channels, n)
        return matrix.mul_mat(frames.reshape(2 * patches.shape[0], n)) + self.bias


@dataclass
class FeedForward:
    up: Linear = gguf("ffn_up", alt="mlp.linear_fc1", dims="embd ff")
    down: Linear = gguf("ffn_down", alt="mlp.linear_fc2", dims="ff embd")

    def __call__(self, x: Tensor) -> Tensor:
        """X [n_embd, n] to [n_embd, n]."""
        return self.down(self.up(x).gelu())


@dataclass
class Layer:
    attention: Attention
    mlp: FeedForward
    norm1: LayerNorm = gguf("ln1", alt="norm1", dims="embd")
    norm2: LayerNorm = gguf("ln2", alt="norm2", dims="embd")


@dataclass
class Merger:
    """Of a layer in between: normalised as a whole cell."""

    norm: LayerNorm = gguf("norm", dims="merged")
    first: Linear = gguf("fc1", alt="linear_fc1", dims="merged hidden")
    second: Linear = gguf("fc2", alt="linear_fc2", dims="hidden text")

    def __call__(self, cells: Tensor, eps: float) -> Tensor:
        """Cells [n_merged, n] to [n_text, n]."""
        return self.second(self.first(self.norm(cells, eps)).gelu())


@dataclass
class PerhapsMerger:
    merger: Merger | None


@dataclass
class ByLayer:
    """As llama.cpp's files number them."""

    mergers: list[PerhapsMerger] = gguf("v.deepstack")


@dataclass
class InTurn:
    """As the ancestor's do, which say apart of which layers they are."""

    mergers: list[Merger] = gguf("v.deepstack_merger")


@dataclass
class Weights:
    patches: FrameEmbedding | FilmEmbedding
    positions: InterpolatedPositions = gguf("v.position_embd", alt="v.pos_embed")
    layers: list[Layer] = gguf("v.blk")
    norm: LayerNorm = gguf("v.post_ln", alt="v.merger.norm", dims="embd")
    merger: Linear = gguf("mm.0", alt="v.merger.linear_fc1", dims="merged hidden")
    projection: Linear = gguf("mm.2", alt="v.merger.linear_fc2", dims="hidden text")


class Qwen3VLVision:
    is_cross_attended = False

    def __init__(self, file: GGUFFile, backend: Backend, text: GGUFFile, tokenizer: Tokenizer) -> None:
        meta = VisionMetadata(file)
        self.options = o = VisionOptions.read(meta, mean=HALF, std=HALF, eps=1e-6, image_size=1 << 14, n_ff=0)
        self.n_layers = o.n_layers
        self.kept = Kept(o.head_dim, o.n_heads)
        self._cell = meta.integer("vision.spatial_merge_size", default=2, high=16)
        if o.head_dim % 4:
            raise FileFormatError(f"{meta.path}: heads of {o.head_dim} cannot turn by row and column")
        self._rope = patch_rope(o.head_dim, meta.number("vision.rope.freq_base", default=10000.0, low=1.0))
        multiple = o.patch_size * self._cell
        low, high = MIN_TOKENS * multiple**2, MAX_TOKENS * multiple**2
        low = meta.integer("vision.image_min_pixels", default=low, high=high)
        self._budget = Budget(multiple, low, meta.integer("vision.image_max_pixels", default=high, low=low, high=high))
        names = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
        self._tokens = [special(tokenizer, name) for name in names]
        n_text, width = text.metadata.integer("embedding_length"), o.n_heads * o.head_dim
        dims = {"embd": o.n_embd, "patch": o.patch_size, "merged": self._cell**2 * o.n_embd, "text": n_text}
        dims |= dict.fromkeys(("q", "k", "v", "mixed"), width) | {"qkv": 3 * width}
        self.weights = bind(Weights, backend, file, {"layers": o.n_layers}, dims)
        self._deepstack = self._read_deepstack(meta, backend, file, dims)
        self.n_out = (1 + len(self._deepstack)) * n_text
        n_positions = self.weights.positions.weight.shape[1]
        self._side = isqrt(n_positions)
        if self._side**2 != n_positions:
            raise FileFormatError(f"{meta.path}: {n_positions} learned positions make no square")
        n_taken = text.metadata.integer("n_deepstack_layers", len(text.metadata.integers("vision.deepstack_visual_indexes", [])))
        if n_taken != len(self._deepstack):
            given = f"{len(self._deepstack)} of its layers give something to the language part"
            raise FileFormatError(f"{meta.path}: {given}, and {n_taken} layers of {text.path} take something")

    def _read_deepstack(self, meta: VisionMetadata, backend: Backend, file: GGUFFile, dims: dict[str, int]) -> dict[int, Merger]:
        """By layer."""
        layers = meta.integers("vision.deepstack_visual_indexes", default=[], high=self.n_layers - 1)
        if meta.is_projector:
            found = bind(ByLayer, backend, file, {"mergers": self.n_layers}, dims).mergers
            return {i: perhaps.merger for i, perhaps in enumerate(found) if perhaps.merger}
        mergers = bind(InTurn, backend, file, {"mergers": len(layers)}, dims).mergers
        if layers != sorted(set(layers)):
            raise FileFormatError(f"{meta.path}: vision.deepstack_visual_indexes {layers[:8]} are not in order")
        return dict(zip(layers, mergers, strict=True))

    def size(self, width: int, height: int) -> tuple[int, int]:
        columns, rows = (side // self._budget.multiple for side in self._budget.fit(width, height))
        return rows * columns, rows * columns + 2

    def largest(self) -> tuple[int, int]:
        return self._budget.largest()

    def prepare(self, pixels: Pixels) -> Prepared:
        o, cell = self.options, self._cell
        height, width, _ = pixels.shape
        fitted = self._budget.fit(width, height)
        columns, rows = (side // self._budget.multiple for side in fitted)
        arrays = {
            "patches": patches(normalised(resized(pixels, fitted, Filter.BICUBIC), o.mean, o.std), o.patch_size, cell),
            "places": patch_places(rows * cell, columns * cell, cell),
            **position_arrays(rows * cell, columns * cell, self._side, cell),
        }
        begin, padding, end = self._tokens
        n = rows * columns
        by_row = {"patches": 0, "places": 1, "corners": 1, "shares": 1}
        piece = Piece(arrays, Divided(n * cell**2, (0, n * cell**2), cell**2, by_row, begins=True))
        return Prepared([piece], placed(rows, columns, begin, padding, end), n)

    def begin(self, ctx: Context, inputs: Mapping[str, Tensor]) -> State:
        return (self.weights.patches(inputs["patches"]) + self.weights.positions(inputs),)

    def layer(self, look: Look, state: State, inputs: Mapping[str, Tensor], index: int) -> State:
        """What layers in between give stands behind the last one's in the state."""
        o, layer, (x, *given) = self.options, self.weights.layers[index], state
        x = x + layer.attention(look, layer.norm1(x, o.eps), o, lambda y: y.rope(inputs["places"].flatten(), self._rope))
        x = x + layer.mlp(layer.norm2(x, o.eps))
        if index in self._deepstack:
            given.append(self._deepstack[index](self._cells(x), o.eps))
        return (x, *given)

    def end(self, ctx: Context, state: State, inputs: Mapping[str, Tensor]) -> Tensor:
        w, (x, *given) = self.weights, state
        rows = w.projection(w.merger(self._cells(w.norm(x, self.options.eps))).gelu())
        return reduce(lambda a, b: a.concat(b, 0), given, rows)

    def _cells(self, x: Tensor) -> Tensor:
        """Patches [n_embd, n] as cells."""
        return x.reshape(x.shape[0] * self._cell**2, x.shape[1] // self._cell**2)

    def max_nodes(self) -> int:
        return 128 + MAX_NODES_OF_LAYER * self.n_layers
