"""The eyes of Idefics 3 and SmolVLM (Laurençon et al. 2024): SigLIP over square tiles, squares of whose patches are merged.

An image is made as long as the file says, whatever its size, and cut into tiles that it fills; all of it made as small as a tile
comes last. Each piece has its own tokens before it, and lines of tiles end with a line's end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile
from puna.ml.backend import Backend, Context
from puna.ml.tensor import Tensor
from puna.nn.declare import bind, gguf
from puna.nn.layers import LayerNorm, Linear
from puna.tokenizer.tokenizer import Tokenizer
from puna.vision.look import Kept, Look
from puna.vision.metadata import HALF, MAX_IMAGE_SIZE, Activation, VisionMetadata, VisionOptions
from puna.vision.model import Divided, Piece, Pixels, Placed, Prepared, State
from puna.vision.pixels import Filter, Size, by_cells, normalised, patches, resized, size_of
from puna.vision.special import PLACEHOLDER, special
from puna.vision.vit import MAX_NODES_OF_LAYER, PatchEmbedding, Positions, layers_of

TILES_ALONG = 4  # where the file does not say how long images become
MOST_ALONG = 8


@dataclass
class Weights:
    patches: PatchEmbedding = gguf("v.patch_embd")
    positions: Positions = gguf("v.position_embd")
    norm: LayerNorm = gguf("v.post_ln", dims="embd")
    projection: Linear = gguf("mm.model.fc", dims="merged text")


class Idefics3Vision:
    is_cross_attended = False

    def __init__(self, file: GGUFFile, backend: Backend, text: GGUFFile, tokenizer: Tokenizer) -> None:
        meta = VisionMetadata(file)
        self.options = o = VisionOptions.read(meta, mean=HALF, std=HALF, eps=1e-6)
        self.activation = meta.activation(Activation.GELU)
        self.n_layers = o.n_layers
        self.kept = Kept(o.head_dim, o.n_heads)
        self.n_out = text.metadata.integer("embedding_length")
        self._side = o.image_size // o.patch_size
        self.cell = meta.integer("vision.projector.scale_factor", default=1, high=self._side)
        if self._side % self.cell:
            raise FileFormatError(f"{file.path}: {self._side} patches along a side are not whole squares of {self.cell}")
        self.longest = meta.integer("vision.preproc_image_size", default=TILES_ALONG * o.image_size, high=MAX_IMAGE_SIZE)
        along = -(-self.longest // o.image_size)
        if along > MOST_ALONG:
            raise FileFormatError(f"{file.path}: images of {self.longest} pixels are more than {MOST_ALONG} tiles long")
        self.n_piece = (self._side // self.cell) ** 2
        self._around, self._whole = special(tokenizer, "<fake_token_around_image>"), special(tokenizer, "<global-img>")
        self._tiles = [
            [special(tokenizer, f"<row_{row + 1}_col_{column + 1}>") for column in range(along)] for row in range(along)
        ]
        self._line_end, self._last_end = (tokenizer.encode(end, add_special=False) for end in ("\n", "\n\n"))
        dims = {"embd": o.n_embd, "ff": o.n_ff, "patch": o.patch_size, "positions": self._side**2}
        dims |= {"merged": o.n_embd * self.cell**2, "text": self.n_out}
        dims |= dict.fromkeys(("q", "k", "v", "mixed"), o.n_heads * o.head_dim)
        self.weights = bind(Weights, backend, file, {}, dims)
        self.layers = bind(layers_of(file, o), backend, file, {"layers": o.n_layers}, dims).layers

    def _lengthened(self, width: int, height: int) -> Size:
        """The longer side as long as the file says, the shorter one even."""
        if width >= height:
            short = int(self.longest / (width / height))
            return self.longest, short + short % 2
        short = int(self.longest * (width / height))
        return short + short % 2, self.longest

    def _grid(self, width: int, height: int) -> Size:
        """Columns and rows of tiles: the longer side rounded up, and then the shorter one as long as it is beside that."""
        tile, (w, h) = self.options.image_size, self._lengthened(width, height)
        if w >= h:
            columns = math.ceil(w / tile)
            return columns, max(1, math.ceil(int(columns * tile / (w / max(1, h))) / tile))
        rows = math.ceil(h / tile)
        return max(1, math.ceil(int(rows * tile * (max(1, w) / h)) / tile)), rows

    def size(self, width: int, height: int) -> tuple[int, int]:
        grid = self._grid(width, height)
        n_tiles = grid[0] * grid[1] if grid != (1, 1) else 0
        return (n_tiles + 1) * self.n_piece, len(self._placed(grid).tokens)

    def largest(self) -> tuple[int, int]:
        return self.longest, self.longest

    def prepare(self, pixels: Pixels) -> Prepared:
        tile, (width, height) = self.options.image_size, size_of(pixels)
        columns, rows = grid = self._grid(width, height)
        w, h = self._lengthened(width, height)
        filled = resized(pixels, (max(1, w), max(1, h)), Filter.LANCZOS)
        filled = resized(filled, (columns * tile, rows * tile), Filter.LANCZOS)
        parts = [resized(filled, (tile, tile), Filter.LANCZOS)]
        if grid != (1, 1):
            corners = [(y, x) for y in range(0, rows * tile, tile) for x in range(0, columns * tile, tile)]
            parts = [*(filled[y : y + tile, x : x + tile] for y, x in corners), *parts]
        return Prepared([self._piece(part) for part in parts], self._placed(grid), len(parts) * self.n_piece)

    def _piece(self, pixels: Pixels) -> Piece:
        o, side = self.options, self._side
        cut = patches(normalised(pixels, o.mean, o.std), o.patch_size, self.cell)
        places = by_cells(np.arange(side**2, dtype=np.int32).reshape(side, side), self.cell)
        divided = Divided(side**2, (0, side**2), self.cell**2, {"patches": 0, "places": 0}, begins=True)
        return Piece({"patches": cut, "places": places}, divided)

    def _placed(self, grid: Size) -> Placed:
        tokens: list[int] = []
        rows: list[int] = []

        def add(names: Sequence[int], n_rows: int = 0) -> None:
            first = max(rows, default=-1) + 1
            tokens.extend([*names, *[PLACEHOLDER] * n_rows])
            rows.extend([*[-1] * len(names), *range(first, first + n_rows)])

        columns, lines = grid
        if grid != (1, 1):
            for row in range(lines):
                for column in range(columns):
                    add([self._around, self._tiles[row][column]], self.n_piece)
                add(self._last_end if row == lines - 1 else self._line_end)
        add([self._around, self._whole], self.n_piece)
        add([self._around])
        return Placed(tokens, rows)

    def begin(self, ctx: Context, inputs: Mapping[str, Tensor]) -> State:
        return (self.weights.patches(inputs["patches"]) + self.weights.positions(inputs["places"]),)

    def layer(self, look: Look, state: State, inputs: Mapping[str, Tensor], index: int) -> State:
        return (self.layers[index](look, state[0], self.options, self.activation),)

    def end(self, ctx: Context, state: State, inputs: Mapping[str, Tensor]) -> Tensor:
        x = self.weights.norm(state[0], self.options.eps)
        # The patches of a cell are neighbours.
        return self.weights.projection(x.reshape(self.options.n_embd * self.cell**2, x.shape[1] // self.cell**2))

    def max_nodes(self) -> int:
        return 64 + MAX_NODES_OF_LAYER * self.n_layers
