"""Llama 3.2's eyes (Meta 2024): an image cut into up to four tiles, which a local and a global transformer see all at once.

The image is laid on the canvas of tiles that fits it best and padded with black to the right and below. Each tile's patches and
its class token know their place in the tile, the tile's place in the image, and the image's proportions. After the local
layers the tiles are told from one another once more; the global layers add what they find through gates. A row is the last
state together with the states before some of the local layers, value by value beside each other, projected.

There are always as many tiles as there may be, and each is filled to a multiple of 8 rows. What is filling sees only what is not,
but is seen by all, as the published model has it: its mask hides filling from filling alone. So what is not filling is put
first here and sees everything, and the rest sees the first part, without a mask. The ancestor has filling see filling too, and
fills a tile that is whole already. Text looks only at the tiles that the image has.

Files have their gates after tanh, that of the places as what is left for them beside the tiles' places.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from puna.errors import BadRequest, FileFormatError, MissingTensors
from puna.gguf.layers import MAX_LAYERS
from puna.gguf.reader import GGUFFile
from puna.ml.backend import Backend, Context, Use
from puna.ml.tensor import DType, Tensor
from puna.nn.declare import bind, gguf
from puna.nn.layers import LayerNorm, Linear
from puna.nn.projections import QKV
from puna.tokenizer.tokenizer import Tokenizer
from puna.vision.look import Group, Kept, Look
from puna.vision.metadata import CLIP_MEAN, CLIP_STD, VisionMetadata, VisionOptions
from puna.vision.model import Divided, Piece, Pixels, Placed, Prepared, State
from puna.vision.pixels import Filter, normalised, patches, resized, size_of
from puna.vision.special import special
from puna.vision.vit import MAX_NODES_OF_LAYER, FeedForward, PatchEmbedding, SwappedFeedForward, is_swapped

IMAGE = "<|image|>"
FILLED_TO = 8  # rows of a tile are a multiple of it
MAX_TILES = 16


def canvases(max_tiles: int) -> list[tuple[int, int]]:
    """Rows and columns of tiles that there may be, in the order in which the model numbers them, from 1 on."""
    counts = range(1, max_tiles + 1)
    return [(rows, columns) for rows in counts for columns in counts if rows * columns <= max_tiles]


@dataclass(frozen=True)
class Options(VisionOptions):
    n_local: int  # of the layers
    n_global: int
    taken: tuple[int, ...]  # local layers whose inputs are a part of the result
    max_tiles: int

    @property
    def n_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def n_rows(self) -> int:
        """Of a tile: a class token and patches."""
        return self.n_patches + 1

    @property
    def n_filling(self) -> int:
        """Rows that a tile is filled up with."""
        return -self.n_rows % FILLED_TO

    @classmethod
    def of(cls, meta: VisionMetadata) -> Options:
        o = VisionOptions.read(meta, mean=CLIP_MEAN, std=CLIP_STD, eps=1e-5)
        n_global = meta.integer("vision.global.block_count", low=0, high=MAX_LAYERS)
        taken = meta.integers("vision.intermediate_layers_indices", high=o.n_layers)
        if taken != sorted(set(taken)):
            raise FileFormatError(f"{meta.path}: vision.intermediate_layers_indices {taken} do not ascend")
        max_tiles = meta.integer("vision.max_num_tiles", high=MAX_TILES)
        known = {**vars(o), "n_layers": o.n_layers + n_global}
        return cls(**known, n_local=o.n_layers, n_global=n_global, taken=tuple(taken), max_tiles=max_tiles)


@dataclass
class Table:
    """A vector, or a list of them, for each number; the gate is a factor."""

    weight: Tensor = gguf("weight", use=Use.ROWS)
    gate: Tensor | None = gguf("gate", dims="1", use=Use.VECTOR, optional=True)

    def __call__(self, numbers: Tensor, n_embd: int) -> Tensor:
        """Numbers I32 [n] of vectors to [n_embd, n]."""
        n_values = self.weight.shape[0] * self.weight.shape[1]
        vectors = self.weight.beside(numbers).reshape(n_embd, n_values // n_embd).rows(numbers)
        return vectors if self.gate is None else vectors * self.gate


@dataclass
class PlaceTable(Table):
    weight: Tensor = gguf("weight", dims="embd rows", use=Use.ROWS)


@dataclass
class TileTable(Table):
    weight: Tensor = gguf("weight", dims="tiles canvases", use=Use.ROWS)


@dataclass
class TilePlaceTable(Table):
    weight: Tensor = gguf("weight", dims="tiles_rows canvases", use=Use.ROWS)


@dataclass
class Ends:
    """What comes before, between and after the layers."""

    patches: PatchEmbedding = gguf("v.patch_embd")
    class_token: Tensor = gguf("v.class_embd", dims="embd", use=Use.VECTOR)
    places: PlaceTable = gguf("v.position_embd")
    tile_places: TilePlaceTable = gguf("v.tile_position_embd")
    tiles_before: TileTable = gguf("v.pre_tile_position_embd")
    tiles_after: TileTable = gguf("v.post_tile_position_embd")
    norm_before: LayerNorm = gguf("v.pre_ln", dims="embd")
    norm_after: LayerNorm = gguf("v.post_ln", dims="embd")
    projection: Linear = gguf("mm.0", dims="joined text")


@dataclass
class Attention:
    qkv: QKV
    output: Linear = gguf("attn_out", alt="attn_output", dims="mixed embd")

    def __call__(self, look: Look, x: Tensor, o: Options, groups: Sequence[Group]) -> Tensor:
        query, key, value = self.qkv(x, o.n_heads, o.n_heads, o.head_dim)
        # In F32: as fast as F16 where there are so many rows, and with thousands of them sums in F16 would lose a digit.
        return self.output(look(query, key, value, groups, dtype=DType.F32))


@dataclass
class Layer:
    attention: Attention
    mlp: FeedForward
    norm1: LayerNorm = gguf("ln1", alt="attn_norm", dims="embd")
    norm2: LayerNorm = gguf("ln2", alt="ffn_norm", dims="embd")
    attention_gate: Tensor | None = gguf("attn_gate", dims="1", use=Use.VECTOR, optional=True)
    mlp_gate: Tensor | None = gguf("ffn_gate", dims="1", use=Use.VECTOR, optional=True)

    def __call__(self, look: Look, x: Tensor, o: Options, groups: Sequence[Group]) -> Tensor:
        """X [n_embd, n] to [n_embd, n]."""
        x = x + _gated(self.attention(look, self.norm1(x, o.eps), o, groups), self.attention_gate)
        return x + _gated(self.mlp.down(self.mlp.up(self.norm2(x, o.eps)).gelu_erf()), self.mlp_gate)


@dataclass
class SwappedLayer(Layer):
    mlp: SwappedFeedForward


@dataclass
class Layers:
    local: list[Layer] = gguf("v.blk")
    beyond: list[Layer] = gguf("v.global.blk")


@dataclass
class SwappedLayers:
    local: list[SwappedLayer] = gguf("v.blk")
    beyond: list[SwappedLayer] = gguf("v.global.blk")


def _gated(x: Tensor, gate: Tensor | None) -> Tensor:
    return x if gate is None else x * gate


def _check_gates(beyond: Sequence[Layer]) -> None:
    """Errors: MissingTensors where one of the global layers would add all that it finds."""
    gates = [(i, name, gate) for i, it in enumerate(beyond) for name, gate in (("attn", it.attention_gate), ("ffn", it.mlp_gate))]
    missing = [f"v.global.blk.{i}.{name}_gate" for i, name, gate in gates if gate is None]
    if missing:
        raise MissingTensors(missing)


class MLlamaVision:
    is_cross_attended = True

    def __init__(self, file: GGUFFile, backend: Backend, text: GGUFFile, tokenizer: Tokenizer) -> None:
        self.options = o = Options.of(VisionMetadata(file))
        self.n_layers = o.n_layers
        self.kept = Kept(o.head_dim, o.n_heads, DType.F32)
        self.n_out = text.metadata.integer("embedding_length")
        self._canvases = canvases(o.max_tiles)
        self._image = special(tokenizer, IMAGE)
        dims = {
            "embd": o.n_embd,
            "ff": o.n_ff,
            "patch": o.patch_size,
            "rows": o.n_rows,
            "tiles": o.n_embd * o.max_tiles,
            "tiles_rows": o.n_embd * o.n_rows * o.max_tiles,
            "canvases": 1 + len(self._canvases),
            "joined": o.n_embd * (1 + len(o.taken)),
            "text": self.n_out,
        }
        dims |= dict.fromkeys(("q", "k", "v", "mixed"), o.n_heads * o.head_dim)
        self.weights = bind(Ends, backend, file, {}, dims)
        cls: type[Any] = SwappedLayers if is_swapped(file, replace(o, n_layers=o.n_local)) else Layers
        layers = bind(cls, backend, file, {"local": o.n_local, "beyond": o.n_global}, dims)
        self.layers: list[Layer] = [*layers.local, *layers.beyond]
        _check_gates(layers.beyond)

    # Images.

    def size(self, width: int, height: int) -> tuple[int, int]:
        rows, columns = self.canvas(width, height)
        return rows * columns * self.options.n_rows, 1

    def largest(self) -> tuple[int, int]:
        return self.options.image_size * self.options.max_tiles, self.options.image_size

    def canvas(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of the tiles that an image of this size is laid on.

        Those on which it need be made larger least, or else smaller least, and of several those with the smallest area.
        """
        if min(width, height) < 1:
            raise BadRequest(f"an image of {width} x {height} pixels shows nothing")
        side = self.options.image_size
        scales = [min(rows * side / height, columns * side / width) for rows, columns in self._canvases]
        enlarging = [scale for scale in scales if scale >= 1]
        chosen = min(enlarging) if enlarging else max(scales)
        fitting = [canvas for canvas, scale in zip(self._canvases, scales, strict=True) if scale == chosen]
        return min(fitting, key=lambda canvas: canvas[0] * canvas[1])

    def prepare(self, pixels: Pixels) -> Prepared:
        o = self.options
        rows, columns = canvas = self.canvas(*size_of(pixels))
        tiles = normalised(self._laid_on(pixels, canvas), o.mean, o.std)
        side = o.image_size
        cut = [patches(tiles[r * side :, c * side :][:side, :side], o.patch_size) for r in range(rows) for c in range(columns)]
        n_rows = rows * columns * o.n_rows
        arrays = {"patches": np.concatenate(cut), "own": np.arange(n_rows, dtype=np.int32)}
        arrays |= self._numbers(1 + self._canvases.index(canvas))
        n = (o.n_rows + o.n_filling) * o.max_tiles
        divided = Divided(n, (0, n_rows), 1, {"owners": 0})
        return Prepared([Piece(arrays, divided)], Placed(tokens=[self._image], rows=[-1]), n_rows)

    def _laid_on(self, pixels: Pixels, canvas: tuple[int, int]) -> Pixels:
        """As large as fits, but never larger than it is unless it is smaller than a tile."""
        side = self.options.image_size
        (width, height), (canvas_height, canvas_width) = size_of(pixels), (side * canvas[0], side * canvas[1])
        to_width, to_height = min(max(width, side), canvas_width), min(max(height, side), canvas_height)
        if to_width / width < to_height / height:
            size = to_width, max(min(math.floor(height * (to_width / width)), to_height), 1)
        else:
            size = max(min(math.floor(width * (to_height / height)), to_width), 1), to_height
        laid: Pixels = np.zeros((canvas_height, canvas_width, 3), np.uint8)
        laid[: size[1], : size[0]] = resized(pixels, size, Filter.BILINEAR)
        return laid

    def _numbers(self, canvas: int) -> dict[str, npt.NDArray[np.int32]]:
        """What is looked up: for rows of a tile, tiles, rows of all tiles, and tiles of all rows, the filling's last."""
        o = self.options
        tiles = canvas * o.max_tiles + np.arange(o.max_tiles, dtype=np.int32)
        places = canvas * o.max_tiles * o.n_rows + np.arange(o.max_tiles * o.n_rows, dtype=np.int32)
        owners = np.concatenate([np.repeat(tiles, o.n_rows), np.repeat(tiles, o.n_filling)])
        return {"rows": np.arange(o.n_rows, dtype=np.int32), "tiles": tiles, "places": places, "owners": owners}

    # Arithmetic. Rows are those of the image's tiles, of the other tiles, and the filling of all.

    def begin(self, ctx: Context, inputs: Mapping[str, Tensor]) -> State:
        o, w = self.options, self.weights
        n, n_tiles = o.n_embd, inputs["patches"].shape[1] // o.n_patches
        # The patches of tiles that the image does not have are zeros, whatever black would be.
        x = w.patches(inputs["patches"]).reshape(n, o.n_patches, n_tiles).pad(0, 0, o.max_tiles - n_tiles)
        x = x + w.tiles_before(inputs["tiles"], n).reshape(n, 1, o.max_tiles)
        first = w.class_token.beside(x).reshape(n, 1, 1).repeat(n, 1, o.max_tiles, 1)
        x = first.concat(x, 1) + w.places(inputs["rows"], n)
        x = x.reshape(n, o.n_rows * o.max_tiles) + w.tile_places(inputs["places"], n)
        return (w.norm_before(x, o.eps).pad(0, o.n_filling * o.max_tiles),)

    def _groups(self, n_seen: int) -> list[Group]:
        """The first *n_seen* rows see all, and are all that the others see."""
        o = self.options
        n = (o.n_rows + o.n_filling) * o.max_tiles
        groups = [Group(0, n_seen, n_seen=n)]
        return [*groups, Group(n_seen, n - n_seen, n_seen=n_seen)] if n_seen < n else groups

    def layer(self, look: Look, state: State, inputs: Mapping[str, Tensor], index: int) -> State:
        o = self.options
        x, *taken = state
        if index in o.taken and index < o.n_local:
            taken.append(x)
        x = self.layers[index](look, x, o, self._groups(inputs["own"].shape[0]))
        if index == o.n_local - 1:
            if o.n_local in o.taken:
                taken.append(x)
            x = self.weights.norm_after(x, o.eps) + self.weights.tiles_after(inputs["owners"], o.n_embd)
        return x, *taken

    def end(self, ctx: Context, state: State, inputs: Mapping[str, Tensor]) -> Tensor:
        x, *taken = state
        n, n_rows, _, _ = x.shape
        if taken:
            beside, *others = (y.reshape(1, n, n_rows) for y in taken)
            for other in others:
                beside = beside.concat(other, 0)
            x = x.concat(beside.reshape(n * len(taken), n_rows), 0)
        return self.weights.projection(x)

    def max_nodes(self) -> int:
        return 128 + MAX_NODES_OF_LAYER * self.n_layers
