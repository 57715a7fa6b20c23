"""LFM2-VL's eyes (Liquid AI 2025): SigLIP 2 (Tschannen et al. 2025) for images of any proportions, two by two patches merged.

A small image is one piece of whole cells near its own size. A large one is cut into the grid of square tiles whose proportions
are nearest to its own, with all of it made small as the last piece. As the published processor and the ancestor have it the
image fills that grid, whatever that does to its proportions; libmtmd puts black at its sides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile
from puna.ml.backend import Backend, Context
from puna.ml.tensor import Tensor
from puna.nn.declare import bind, gguf
from puna.nn.layers import LayerNorm, Linear
from puna.tokenizer.tokenizer import Tokenizer
from puna.vision.budget import Budget
from puna.vision.grid import nearest_grid
from puna.vision.look import Kept, Look
from puna.vision.metadata import HALF, MAX_IMAGE_SIZE, Activation, VisionMetadata, VisionOptions
from puna.vision.model import Divided, Piece, Pixels, Placed, Prepared, State
from puna.vision.pixels import Filter, Size, normalised, patches, resized, size_of
from puna.vision.resampled import ResampledPositions, position_arrays
from puna.vision.special import PLACEHOLDER, special
from puna.vision.vit import MAX_NODES_OF_LAYER, Layers, PatchEmbedding

PROJECTOR_EPS = 1e-5
# Several times as many as any model was trained with.
MOST_TILES = 64
MOST_POSITIONS = 128  # along a side


@dataclass
class Weights(Layers):
    patches: PatchEmbedding = gguf("v.patch_embd")
    positions: ResampledPositions = gguf("v.position_embd")
    norm: LayerNorm = gguf("v.post_ln", dims="embd")
    merged_norm: LayerNorm | None = gguf("mm.input_norm", alt="mm.layer_norm", dims="merged", optional=True)
    first: Linear = gguf("mm.1", dims="merged wide")
    second: Linear = gguf("mm.2", dims="wide text")


@dataclass(frozen=True)
class Cutting:
    """How an image becomes pieces; sides in pixels."""

    whole: Budget  # of an image as one piece
    patch: int
    tolerance: float  # an image is cut where it is so many times the most
    tile: int
    min_tiles: int
    max_tiles: int
    has_thumbnail: bool

    @classmethod
    def read(cls, meta: VisionMetadata, patch: int, cell: int) -> Cutting:
        unit = patch * cell
        least = meta.integer("vision.min_image_tokens", default=64)
        most = meta.integer("vision.max_image_tokens", default=256)
        is_cut = meta.boolean("vision.do_image_splitting", default=True)
        max_tiles = meta.integer("vision.max_tiles", default=10, high=MOST_TILES)
        cutting = cls(
            whole=Budget(unit, least * unit**2, most * unit**2),
            patch=patch,
            tolerance=meta.number("vision.max_pixels_tolerance", default=2.0, low=1.0) if is_cut else math.inf,
            tile=meta.integer("vision.tile_size", default=512, high=MAX_IMAGE_SIZE),
            min_tiles=meta.integer("vision.min_tiles", default=min(2, max_tiles), high=max_tiles),
            max_tiles=max_tiles,
            has_thumbnail=meta.boolean("vision.use_thumbnail", default=True),
        )
        if cutting.tile % unit:
            raise FileFormatError(f"{meta.path}: tiles of {cutting.tile} pixels are not whole cells of {unit}")
        if least > most:
            raise FileFormatError(f"{meta.path}: no image has at least {least} and at most {most} tokens")
        return cutting

    @property
    def unit(self) -> int:
        """The side of a cell."""
        return self.whole.multiple

    def grid(self, width: int, height: int) -> Size | None:
        """Columns and rows of tiles, None where the image is not cut."""
        area = max(self.patch, self._rounded(width)) * max(self.patch, self._rounded(height))
        if area <= self.whole.high * self.tolerance or self.max_tiles == 1:
            return None
        return nearest_grid(width, height, self.tile, self.min_tiles, self.max_tiles)

    def _rounded(self, side: int) -> int:
        """Halves to even numbers of cells."""
        return round(side / self.unit) * self.unit


class LFM2Vision:
    is_cross_attended = False

    def __init__(self, file: GGUFFile, backend: Backend, text: GGUFFile, tokenizer: Tokenizer) -> None:
        meta = VisionMetadata(file)
        self.options = o = VisionOptions.read(meta, mean=HALF, std=HALF, eps=1e-6)
        self.activation = meta.activation(Activation.GELU)
        self.cell = meta.integer("vision.projector.scale_factor", default=2, high=64)
        self.cutting = c = Cutting.read(meta, o.patch_size, self.cell)
        self.n_layers = o.n_layers
        self.kept = Kept(o.head_dim, o.n_heads)
        self.n_out = text.metadata.integer("embedding_length")
        self._start, self._end = special(tokenizer, "<|image_start|>"), special(tokenizer, "<|image_end|>")
        self._thumbnail = special(tokenizer, "<|img_thumbnail|>") if c.has_thumbnail else PLACEHOLDER
        sides = range(c.max_tiles) if c.tolerance < math.inf else ()
        self._tiles = {
            (row, column): special(tokenizer, f"<|img_row_{row + 1}_col_{column + 1}|>")
            for row in sides
            for column in sides
            if (row + 1) * (column + 1) <= c.max_tiles
        }
        dims = {"embd": o.n_embd, "ff": o.n_ff, "patch": o.patch_size, "text": self.n_out, "merged": o.n_embd * self.cell**2}
        dims |= dict.fromkeys(("q", "k", "v", "mixed"), o.n_heads * o.head_dim)
        self.weights = bind(Weights, backend, file, {"layers": o.n_layers}, dims)
        # The ancestor's files may hold a norm that their models pass over.
        self.has_norm = meta.boolean("vision.projector.use_layernorm", default=True) and self.weights.merged_norm is not None
        n_positions = self.weights.positions.weight.shape[1]
        self._side = math.isqrt(n_positions)
        if self._side**2 != n_positions or self._side > MOST_POSITIONS:
            raise FileFormatError(f"{file.path}: {n_positions} learned positions are no square of at most {MOST_POSITIONS}")

    def size(self, width: int, height: int) -> tuple[int, int]:
        unit = self.cutting.unit
        fitted = self.cutting.whole.fit(width, height)
        n_fitted = fitted[0] * fitted[1] // unit**2
        grid = self.cutting.grid(width, height)
        if grid is None:
            return n_fitted, n_fitted + 2
        n_tiles = grid[0] * grid[1]
        has_thumbnail = self._has_thumbnail(grid)
        n_rows = n_tiles * (self.cutting.tile // unit) ** 2 + (n_fitted if has_thumbnail else 0)
        return n_rows, n_rows + 2 + n_tiles + has_thumbnail

    def _has_thumbnail(self, grid: Size) -> bool:
        return self.cutting.has_thumbnail and grid != (1, 1)

    def largest(self) -> tuple[int, int]:
        """Of tiles the most, if it is cut at all: so wide, with an area that the last piece can have to the cell."""
        c = self.cutting
        n_cells = c.whole.high // c.unit**2
        if c.tolerance == math.inf or c.max_tiles == 1:
            return c.whole.largest()
        rows = max(row for row in range(1, max(1, math.isqrt(n_cells // c.max_tiles)) + 1) if n_cells % row == 0)
        times = math.ceil(math.sqrt(c.tolerance)) + 1
        return n_cells // rows * c.unit * times, rows * c.unit * times

    def prepare(self, pixels: Pixels) -> Prepared:
        size = size_of(pixels)
        grid = self.cutting.grid(*size)
        whole = resized(pixels, self.cutting.whole.fit(*size), Filter.BILINEAR)
        if grid is None:
            pieces, tokens, counts = [self._piece(whole)], [[self._start]], [self._n_rows(whole)]
        else:
            tile, (columns, rows) = self.cutting.tile, grid
            filled = resized(pixels, (columns * tile, rows * tile), Filter.BILINEAR)
            places = [(row, column) for row in range(rows) for column in range(columns)]
            tiles = [filled[r * tile : (r + 1) * tile, c * tile : (c + 1) * tile] for r, c in places]
            tokens = [[self._tiles[place]] for place in places]
            if self._has_thumbnail(grid):
                tiles.append(whole)
                tokens.append([self._thumbnail])
            tokens[0].insert(0, self._start)
            pieces, counts = [self._piece(part) for part in tiles], [self._n_rows(part) for part in tiles]
        return Prepared(pieces, self._placed(tokens, counts), sum(counts))

    def _n_rows(self, pixels: Pixels) -> int:
        width, height = size_of(pixels)
        return width * height // self.cutting.unit**2

    def _piece(self, pixels: Pixels) -> Piece:
        o = self.options
        width, height = size_of(pixels)
        cut = patches(normalised(pixels, o.mean, o.std), o.patch_size, self.cell)
        n_rows, n_columns = height // o.patch_size, width // o.patch_size
        arrays = {"patches": cut, **position_arrays(self._side, n_rows, n_columns, self.cell)}
        n = n_rows * n_columns
        by_row = {"patches": 0, "shares": 0}
        return Piece(arrays, Divided(n, (0, n), self.cell**2, by_row, begins=True))

    def _placed(self, before: Sequence[Sequence[int]], counts: Sequence[int]) -> Placed:
        """Tokens stand before the rows of each piece."""
        tokens: list[int] = []
        rows: list[int] = []
        first = 0
        for ahead, count in zip(before, counts, strict=True):
            tokens += [*ahead, *[PLACEHOLDER] * count]
            rows += [*[-1] * len(ahead), *range(first, first + count)]
            first += count
        return Placed([*tokens, self._end], [*rows, -1])

    def begin(self, ctx: Context, inputs: Mapping[str, Tensor]) -> State:
        w = self.weights
        return (w.patches(inputs["patches"]) + w.positions(inputs),)

    def layer(self, look: Look, state: State, inputs: Mapping[str, Tensor], index: int) -> State:
        return (self.weights.layers[index](look, state[0], self.options, self.activation),)

    def end(self, ctx: Context, state: State, inputs: Mapping[str, Tensor]) -> Tensor:
        w, o = self.weights, self.options
        x = w.norm(state[0], o.eps)
        # The patches of a cell are neighbours.
        x = x.reshape(o.n_embd * self.cell**2, x.shape[1] // self.cell**2)
        if self.has_norm and w.merged_norm:
            x = w.merged_norm(x, PROJECTOR_EPS)
        return w.second(w.first(x).gelu())

    def max_nodes(self) -> int:
        return 64 + MAX_NODES_OF_LAYER * self.n_layers
