"""The eyes of MiniCPM-V 2.5 to 4.5 (Yao et al. 2024): SigLIP at nearly an image's own proportions, and learned queries that look.

An image is resized to the area that was trained with, at its own proportions. A larger one is also cut into a grid of at most
nine slices, each of about that area, which follow the whole. Whatever the size of a piece, a fixed number of queries attends to
its patches, which know their places by sines, and becomes its rows.

libmtmd resizes a small image to a square, cuts what is wide or tall and yet small, and rounds halves up. The published processor
also numbers the images of a prompt, which nobody does here: an image does not know how many are before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile
from puna.ml.backend import Backend, Context, Use
from puna.ml.tensor import Tensor
from puna.nn.declare import bind, gguf
from puna.nn.layers import LayerNorm, Linear
from puna.tokenizer.tokenizer import Tokenizer
from puna.vision.budget import MAX_ASPECT, check_aspect
from puna.vision.look import Group, Kept, Look, LookAtOnce
from puna.vision.metadata import HALF, Activation, VisionMetadata, VisionOptions
from puna.vision.model import Divided, Piece, Pixels, Placed, Prepared, State
from puna.vision.pixels import Filter, Floats, Size, normalised, patches, resized, size_of
from puna.vision.special import PLACEHOLDER, special
from puna.vision.vit import MAX_NODES_OF_LAYER, PatchEmbedding, Positions, layers_of

MOST_SLICES = 9
BUCKETS = 70  # along a side, to which the places of patches are rounded down
QUERY_HEAD_DIM = 128
SINE_BASE = 10000.0
FIRST_VERSION = 2  # MiniCPM-V 2.5, whose slices stand together between tokens of their own


@dataclass
class Weights:
    patches: PatchEmbedding = gguf("v.patch_embd")
    positions: Positions = gguf("v.position_embd")
    norm: LayerNorm = gguf("v.post_ln", dims="embd")
    queries: Tensor = gguf("resampler.query", dims="text queries", use=Use.VECTOR)
    seen: Linear = gguf("resampler.kv", dims="embd text")
    query_norm: LayerNorm = gguf("resampler.ln_q", dims="text")
    seen_norm: LayerNorm = gguf("resampler.ln_kv", dims="text")
    query: Linear = gguf("resampler.attn.q", dims="text text")
    key: Linear = gguf("resampler.attn.k", dims="text text")
    value: Linear = gguf("resampler.attn.v", dims="text text")
    output: Linear = gguf("resampler.attn.out", dims="text text")
    last_norm: LayerNorm = gguf("resampler.ln_post", dims="text")
    projection: Linear = gguf("resampler.proj", dims="text text")


def sines(rows: int, columns: int, width: int) -> Floats:
    """Of the patches of a grid, [n, width]: sines and cosines of the column, then of the row."""
    frequencies = SINE_BASE ** -(np.arange(width // 4) / (width // 4))

    def of(places: np.ndarray) -> np.ndarray:
        angles = places.reshape(-1, 1) * frequencies
        return np.concatenate([np.sin(angles), np.cos(angles)], 1)

    row, column = np.mgrid[:rows, :columns]
    return np.concatenate([of(column), of(row)], 1).astype(np.float32)


class MiniCPMVVision:
    is_cross_attended = False

    def __init__(self, file: GGUFFile, backend: Backend, text: GGUFFile, tokenizer: Tokenizer) -> None:
        meta = VisionMetadata(file)
        self.options = o = VisionOptions.read(meta, mean=HALF, std=HALF, eps=1e-6)
        self.activation = meta.activation(Activation.GELU)
        self.n_layers = o.n_layers
        self.kept = Kept(o.head_dim, o.n_heads)
        self.n_out = text.metadata.integer("embedding_length")
        if self.n_out % QUERY_HEAD_DIM:
            raise FileFormatError(f"{meta.path}: vectors of {self.n_out} cannot be split into heads of {QUERY_HEAD_DIM}")
        self._is_first = meta.integer("minicpmv_version", default=FIRST_VERSION, low=0, high=1 << 20) <= FIRST_VERSION
        names = ("<image>", "</image>", "<slice>", "</slice>", "\n")
        self._begin, self._end, self._slice, self._slice_end, self._line_end = (special(tokenizer, name) for name in names)
        dims = {"embd": o.n_embd, "ff": o.n_ff, "patch": o.patch_size, "positions": BUCKETS**2, "text": self.n_out}
        dims |= dict.fromkeys(("q", "k", "v", "mixed"), o.n_heads * o.head_dim)
        self.weights = bind(Weights, backend, file, {}, dims)
        self.layers = bind(layers_of(file, o), backend, file, {"layers": o.n_layers}, dims).layers
        self.n_piece = self.weights.queries.shape[1]

    def _whole(self, length: float) -> int:
        return max(round(length / self.options.patch_size), 1) * self.options.patch_size

    def _fit(self, width: float, height: float, *, may_grow: bool) -> Size:
        """The trained area at these proportions, in whole patches."""
        side = self.options.image_size
        if width * height > side**2 or may_grow:
            ratio = width / height
            height = int(side / math.sqrt(ratio))
            width = int(height * ratio)
        return self._whole(width), self._whole(height)

    def _grid(self, width: int, height: int) -> Size | None:
        """Columns and rows of slices: of about as many as the image's area asks for, those nearest to its proportions."""
        wanted = min(math.ceil(width * height / self.options.image_size**2), MOST_SLICES)
        if wanted <= 1:
            return None
        counts = [n for n in (wanted - 1, wanted, wanted + 1) if 1 < n <= MOST_SLICES]
        grids = [(columns, n // columns) for n in counts for columns in range(1, n + 1) if n % columns == 0]
        return min(grids, key=lambda grid: abs(math.log(width / height) - math.log(grid[0] / grid[1])))

    def _sliced(self, width: int, height: int, grid: Size) -> Size:
        """What an image is resized to before it is cut into equal slices."""
        of_slice = [max(round(side / n), 1) for side, n in zip((width, height), grid, strict=True)]
        columns, rows = self._fit(*of_slice, may_grow=True)
        return columns * grid[0], rows * grid[1]

    def size(self, width: int, height: int) -> tuple[int, int]:
        check_aspect(width, height)
        grid = self._grid(width, height)
        placed = self._placed(grid)
        return max(placed.rows) + 1, len(placed.tokens)

    def largest(self) -> Size:
        """Of the proportions with the most patches, since both sides are rounded up, cut into as many slices as there are."""
        area, least = self.options.image_size**2, math.ceil(self.options.image_size / math.sqrt(MAX_ASPECT))
        thin = [(area // height, height) for height in range(least, self.options.image_size + 1)]
        width, height = max(thin, key=lambda size: math.prod(self._fit(*size, may_grow=True)))
        return 3 * width, 3 * height

    def prepare(self, pixels: Pixels) -> Prepared:
        width, height = size_of(pixels)
        check_aspect(width, height)
        grid = self._grid(width, height)
        parts = [resized(pixels, self._fit(width, height, may_grow=grid is None), Filter.BICUBIC)]
        if grid:
            whole = resized(pixels, self._sliced(width, height, grid), Filter.BICUBIC)
            columns, rows = (side // n for side, n in zip(size_of(whole), grid, strict=True))
            corners = [(y * rows, x * columns) for y in range(grid[1]) for x in range(grid[0])]
            parts += [whole[y : y + rows, x : x + columns] for y, x in corners]
        return Prepared([self._piece(part) for part in parts], self._placed(grid), len(parts) * self.n_piece)

    def _piece(self, pixels: Pixels) -> Piece:
        o = self.options
        columns, rows = (side // o.patch_size for side in size_of(pixels))
        row, column = (np.arange(n, dtype=np.int32) * BUCKETS // n for n in (rows, columns))
        places = (row[:, None] * BUCKETS + column).reshape(-1)
        cut = patches(normalised(pixels, o.mean, o.std), o.patch_size)
        arrays = {"patches": cut, "places": places.astype(np.int32), "sines": sines(rows, columns, self.n_out)}
        divided = Divided(len(cut), (0, len(cut)), 0, {"patches": 0, "places": 0}, begins=True)  # every query looks at all
        return Piece(arrays, divided)

    def _placed(self, grid: Size | None) -> Placed:
        tokens: list[int] = []
        rows: list[int] = []

        def add(*names: int) -> None:
            tokens.extend(names)
            rows.extend([-1] * len(names))

        def add_piece(begin: int, end: int) -> None:
            add(begin)
            first = max(rows) + 1
            tokens.extend([PLACEHOLDER] * self.n_piece)
            rows.extend(range(first, first + self.n_piece))
            add(end)

        around: Sequence[int] = (self._begin, self._end) if self._is_first else (self._slice, self._slice_end)
        add_piece(self._begin, self._end)
        if grid:
            columns, lines = grid
            add(*[self._slice] if self._is_first else [])
            for line in range(lines):
                for _ in range(columns):
                    add_piece(*around)
                add(*[self._line_end] if line < lines - 1 else [])
            add(*[self._slice_end] if self._is_first else [])
        return Placed(tokens, rows)

    def begin(self, ctx: Context, inputs: Mapping[str, Tensor]) -> State:
        return (self.weights.patches(inputs["patches"]) + self.weights.positions(inputs["places"]),)

    def layer(self, look: Look, state: State, inputs: Mapping[str, Tensor], index: int) -> State:
        return (self.layers[index](look, state[0], self.options, self.activation),)

    def end(self, ctx: Context, state: State, inputs: Mapping[str, Tensor]) -> Tensor:
        w, eps, n_heads = self.weights, self.options.eps, self.n_out // QUERY_HEAD_DIM
        seen = w.seen_norm(w.seen(w.norm(state[0], eps)), eps)
        query = w.query(w.query_norm(ctx.use(w.queries), eps))
        key, value = w.key(seen + inputs["sines"]), w.value(seen)
        query, key, value = (x.unflatten(QUERY_HEAD_DIM, n_heads) for x in (query, key, value))
        looked = LookAtOnce(ctx)(query, key, value, [Group(0, self.n_piece, n_seen=seen.shape[1])])
        return w.projection(w.last_norm(w.output(looked), eps))

    def max_nodes(self) -> int:
        return 64 + MAX_NODES_OF_LAYER * self.n_layers
