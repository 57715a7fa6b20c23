"""The eyes of Qwen 2-VL and 2.5-VL (Qwen Team 2024, 2025): a vision transformer at the image's own proportions.

In 2.5-VL most layers attend within windows, every eighth or those that the file names to everything; 2-VL's all see everything,
with LayerNorm and an MLP without a gate. Queries and keys turn by row and column. Four neighbouring patches are merged into a
row; around an image's rows stand two tokens, and they have their places along the axes of M-RoPE. The patch embedding takes two
frames of a film; an image is a film of two equal ones. Patches are encoded window by window; where their rows stand is known.

Resized as the published processor does, to the nearest multiples whatever that does to the proportions; libmtmd puts black at the
sides instead, and rounds halves up. An image has as many rows as libmtmd allows, a quarter of what the processor would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile
from puna.ml.backend import Backend, Context, Use
from puna.ml.tensor import Tensor
from puna.nn.declare import bind, gguf
from puna.nn.layers import LayerNorm, Linear, RMSNorm
from puna.nn.mlp import SwiGLU
from puna.nn.projections import QKV
from puna.tokenizer.tokenizer import Tokenizer
from puna.vision.budget import Budget
from puna.vision.look import Kept, Look
from puna.vision.metadata import CLIP_MEAN, CLIP_STD, Activation, VisionMetadata, VisionOptions
from puna.vision.model import Divided, Piece, Pixels, Placed, Prepared, State
from puna.vision.mrope import patch_places, patch_rope, placed
from puna.vision.pixels import Filter, normalised, patches, resized
from puna.vision.special import special
from puna.vision.vit import MAX_NODES_OF_LAYER, FeedForward
from puna.vision.windows import in_windows, window_arrays, window_groups

MIN_TOKENS, MAX_TOKENS = 8, 4096
WINDOW = 112  # pixels
PATTERN = 8  # the last of so many layers sees everything


@dataclass
class FrameEmbedding:
    """One matrix for each of two frames."""

    first: Tensor = gguf("v.patch_embd.weight", alt="v.patch_embd_0.weight", dims="patch patch 3 embd", use=Use.MATRIX)
    second: Tensor = gguf("v.patch_embd.weight.1", alt="v.patch_embd_1.weight", dims="patch patch 3 embd", use=Use.MATRIX)

    def __call__(self, patches: Tensor) -> Tensor:
        """Patches [3 * patch * patch, n], the same in both frames, to [n_embd, n]."""
        width, height, n_channels, n_embd = self.first.shape
        both = [w.beside(patches).reshape(width * height * n_channels, n_embd) for w in (self.first, self.second)]
        return both[0].mul_mat(patches) + both[1].mul_mat(patches)


@dataclass
class Attention:
    qkv: QKV
    output: Linear = gguf("attn_out", dims="mixed embd")


@dataclass
class Layer:
    attention: Attention
    mlp: SwiGLU
    norm1: RMSNorm = gguf("ln1", dims="embd")
    norm2: RMSNorm = gguf("ln2", dims="embd")


@dataclass
class Weights:
    patches: FrameEmbedding
    layers: list[Layer] = gguf("v.blk")
    norm: RMSNorm = gguf("v.post_ln", alt="v.merger.ln_q", dims="embd")
    merger: Linear = gguf("mm.0", alt="v.merger.mlp.0", dims="merged hidden")
    projection: Linear = gguf("mm.2", alt="v.merger.mlp.2", dims="hidden text")


@dataclass
class FirstLayer(Layer):
    """Of Qwen 2-VL."""

    mlp: FeedForward  # type: ignore[assignment]  # it is called otherwise
    norm1: LayerNorm = gguf("ln1", dims="embd")  # type: ignore[assignment]
    norm2: LayerNorm = gguf("ln2", dims="embd")  # type: ignore[assignment]


@dataclass
class FirstWeights(Weights):
    layers: list[FirstLayer] = gguf("v.blk")  # type: ignore[assignment]  # a list of what a Layer is
    norm: LayerNorm = gguf("v.post_ln", dims="embd")  # type: ignore[assignment]


class Qwen25VLVision:
    is_cross_attended = False
    Weights: type[Weights] = Weights

    def __init__(self, file: GGUFFile, backend: Backend, text: GGUFFile, tokenizer: Tokenizer) -> None:
        meta = VisionMetadata(file)
        self.options = o = VisionOptions.read(meta, mean=CLIP_MEAN, std=CLIP_STD, eps=1e-6, image_size=1 << 14, n_ff=0)
        self.n_layers = o.n_layers
        self.kept = Kept(o.head_dim, o.n_heads)
        self.n_out = text.metadata.integer("embedding_length")
        self._cell = meta.integer("vision.spatial_merge_size", default=2, high=16)
        if o.head_dim % 4:
            raise FileFormatError(f"{meta.path}: heads of {o.head_dim} cannot turn by row and column")
        self._rope = patch_rope(o.head_dim, meta.number("vision.rope.freq_base", default=10000.0, low=1.0))
        self._sees_all = self._layers_that_see_all(meta)
        self._window = max(meta.integer("vision.window_size", default=WINDOW) // o.patch_size // self._cell, 1)
        self._budget = self._read_budget(meta)
        names = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
        self._tokens = [special(tokenizer, name) for name in names]
        dims = {"embd": o.n_embd, "patch": o.patch_size, "merged": self._cell**2 * o.n_embd, "text": self.n_out}
        dims |= dict.fromkeys(("q", "k", "v", "mixed"), o.n_heads * o.head_dim) | {"qkv": 3 * o.n_heads * o.head_dim}
        self.weights = bind(self.Weights, backend, file, {"layers": o.n_layers}, dims)

    def _layers_that_see_all(self, meta: VisionMetadata) -> set[int]:
        """Files of llama.cpp say every how many-th, the ancestor's which."""
        pattern = meta.integer("vision.n_wa_pattern", default=PATTERN, low=0)
        default = [i for i in range(self.n_layers) if not pattern or (i + 1) % pattern == 0]
        return set(meta.integers("vision.fullatt_block_indexes", default=default))

    def _read_budget(self, meta: VisionMetadata) -> Budget:
        multiple = self.options.patch_size * self._cell
        low, high = MIN_TOKENS * multiple**2, MAX_TOKENS * multiple**2
        low = meta.integer("vision.image_min_pixels", default=low, high=high)
        return Budget(
            multiple, low, meta.integer("vision.image_max_pixels", "vision.max_pixels", default=high, low=low, high=high)
        )

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
        values = patches(normalised(resized(pixels, fitted, Filter.BICUBIC), o.mean, o.std), o.patch_size, cell)
        n, windows = rows * columns, window_arrays(rows, columns, self._window)
        order = in_windows(np.arange(n), windows)
        places = patch_places(rows * cell, columns * cell, cell).reshape(4, n, cell**2)
        arrays = {
            "patches": values.reshape(n, -1)[order].reshape(values.shape),
            "places": places[:, order].reshape(4, n * cell**2),
            **windows,
        }
        divided = Divided(n * cell**2, (0, n * cell**2), cell**2, {"patches": 0, "places": 1}, begins=True)
        return Prepared([Piece(arrays, divided)], self._placed(rows, columns, np.argsort(order)), n)

    def _placed(self, rows: int, columns: int, numbers: npt.NDArray[np.int64]) -> Placed:
        """*numbers*: of the encoded rows, cell by cell."""
        begin, padding, end = self._tokens
        return replace(placed(rows, columns, begin, padding, end), rows=[-1, *numbers.tolist(), -1])

    def begin(self, ctx: Context, inputs: Mapping[str, Tensor]) -> State:
        return (self.weights.patches(inputs["patches"]),)

    def layer(self, look: Look, state: State, inputs: Mapping[str, Tensor], index: int) -> State:
        o, layer, x = self.options, self.weights.layers[index], state[0]
        query, key, value = layer.attention.qkv(layer.norm1(x, o.eps), o.n_heads, o.n_heads, o.head_dim)
        query, key = (part.rope(inputs["places"].flatten(), self._rope) for part in (query, key))
        mixed = look(query, key, value, None if index in self._sees_all else window_groups(inputs, self._cell**2))
        x = x + layer.attention.output(mixed)
        return (x + self._fed_forward(layer, layer.norm2(x, o.eps)),)

    def _fed_forward(self, layer: Layer, x: Tensor) -> Tensor:
        return layer.mlp(x)

    def end(self, ctx: Context, state: State, inputs: Mapping[str, Tensor]) -> Tensor:
        w, n_patches = self.weights, self._cell**2
        x = w.norm(state[0], self.options.eps)
        cells = x.reshape(x.shape[0] * n_patches, x.shape[1] // n_patches)
        return w.projection(w.merger(cells).gelu())

    def max_nodes(self) -> int:
        return 64 + MAX_NODES_OF_LAYER * self.n_layers


class Qwen2VLVision(Qwen25VLVision):
    Weights = FirstWeights

    def __init__(self, file: GGUFFile, backend: Backend, text: GGUFFile, tokenizer: Tokenizer) -> None:
        super().__init__(file, backend, text, tokenizer)
        self._activation = VisionMetadata(file).activation(Activation.GELU_QUICK)

    def _layers_that_see_all(self, meta: VisionMetadata) -> set[int]:
        return set(range(self.n_layers))

    def _fed_forward(self, layer: Any, x: Tensor) -> Tensor:
        fed: Tensor = layer.mlp(x, self._activation)
        return fed
