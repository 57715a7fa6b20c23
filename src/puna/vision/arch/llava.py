"""LLaVA (Liu et al. 2023) and its like: CLIP (Radford et al. 2021) or SigLIP, and a small network into any text model.

Of CLIP the token of the class comes first and leaves no row. All layers that a file holds are computed: converters leave out
those after the one whose values are wanted. libmtmd differs in both: it has the class last, so that each patch gets its
neighbour's position and the first leaves no row, and it passes over the last layer. Images get a border of CLIP's mean colour
that makes them squares, and are resized then; libmtmd resizes first. Those of LLaVA 1.6 are cut as puna.vision.anyres says, with
a learned row at the end of each row of patches, as was published; in libmtmd the tiles follow one another, and the whole image
comes last.
"""

from __future__ import annotations

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
from puna.vision.anyres import Size, across_tiles, best_canvas, without_margins
from puna.vision.look import Kept, Look
from puna.vision.metadata import MAX_IMAGE_SIZE, Activation, VisionMetadata, VisionOptions
from puna.vision.model import Divided, Piece, Pixels, Placed, Prepared, State
from puna.vision.pixels import Filter, normalised, on_canvas, patches, resized, size_of, squared
from puna.vision.special import PLACEHOLDER
from puna.vision.vit import MAX_NODES_OF_LAYER, PatchEmbedding, Positions, layers_of

MEAN_COLOUR = (122, 116, 104)
BLACK = (0, 0, 0)
MOST_TILES = 64


@dataclass
class Projector:
    """Two matrices, or one."""

    first: Linear = gguf("mm.0", dims="features wide")
    second: Linear | None = gguf("mm.2", dims="wide text", optional=True)

    def __call__(self, x: Tensor, _eps: float) -> Tensor:
        y = self.first(x).gelu()
        return self.second(y) if self.second else y


@dataclass
class NormalisedProjector:
    """With norms after both, as Yi's have it."""

    first: Linear = gguf("mm.0", dims="features wide")
    first_norm: LayerNorm = gguf("mm.1", dims="wide")
    second: Linear = gguf("mm.3", dims="wide text")
    second_norm: LayerNorm = gguf("mm.4", dims="text")

    def __call__(self, x: Tensor, eps: float) -> Tensor:
        return self.second_norm(self.second(self.first_norm(self.first(x), eps).gelu()), eps)


@dataclass
class Weights:
    patches: PatchEmbedding = gguf("v.patch_embd")
    positions: Positions = gguf("v.position_embd")
    class_token: Tensor | None = gguf("v.class_embd", dims="embd", use=Use.VECTOR, optional=True)
    first_norm: LayerNorm | None = gguf("v.pre_ln", dims="embd", optional=True)
    norm: LayerNorm | None = gguf("v.post_ln", dims="embd", optional=True)
    newline: Tensor | None = gguf("model.image_newline", alt="v.image_newline", dims="text", use=Use.VECTOR, optional=True)


class LlavaVision:
    is_cross_attended = False

    def __init__(self, file: GGUFFile, backend: Backend, text: GGUFFile, tokenizer: Tokenizer) -> None:
        meta = VisionMetadata(file)
        self.options = o = VisionOptions.read(meta)
        self.activation = meta.activation(Activation.GELU_QUICK)
        self.n_out = text.metadata.integer("embedding_length")
        # Values of which layers are taken; 0 is what the first one gets.
        self.features = sorted(set(meta.integers("vision.feature_layer", default=[o.n_layers], high=o.n_layers)))
        self.n_layers = self.features[-1]
        self.kept = Kept(o.head_dim, o.n_heads)
        self._side = o.image_size // o.patch_size
        self._canvases = self._canvases_of(meta)
        has_class = "v.class_embd" in file.tensors
        dims = {"embd": o.n_embd, "ff": o.n_ff, "patch": o.patch_size, "text": self.n_out}
        dims |= {"positions": self._side**2 + has_class, "features": o.n_embd * len(self.features)}
        dims |= dict.fromkeys(("q", "k", "v", "mixed"), o.n_heads * o.head_dim)
        self.weights = bind(Weights, backend, file, {}, dims)
        self.layers = bind(layers_of(file, o), backend, file, {"layers": self.n_layers}, dims).layers
        self.projector = self._projector(backend, file, dims)
        # A row more at the end of each piece, which stands where a row of patches ends.
        is_unpadded = meta.string("vision.mm_patch_merge_type", default="flat") == "spatial_unpad"
        self.ends_rows = bool(self._canvases) and is_unpadded and self.weights.newline is not None
        self.n_patches = self._side**2
        self.n_piece = self.n_patches + self.ends_rows

    def _projector(self, backend: Backend, file: GGUFFile, dims: dict[str, int]) -> Projector | NormalisedProjector:
        if "mm.3.weight" in file.tensors:
            return bind(NormalisedProjector, backend, file, {}, dims)
        is_one = "mm.2.weight" not in file.tensors
        return bind(Projector, backend, file, {}, dims | ({"wide": self.n_out} if is_one else {}))

    def _canvases_of(self, meta: VisionMetadata) -> Sequence[Size]:
        sides = meta.integers("vision.image_grid_pinpoints", default=[], low=1, high=MAX_IMAGE_SIZE)
        size = self.options.image_size
        found = list(zip(sides[::2], sides[1::2], strict=False))
        most = max((width * height for width, height in found), default=0) // size**2
        if len(sides) % 2 or any(side % size for side in sides) or most > MOST_TILES:
            raise FileFormatError(f"{meta.path}: vision.image_grid_pinpoints {sides} are no sizes of at most {MOST_TILES} tiles")
        return found

    def size(self, width: int, height: int) -> tuple[int, int]:
        canvas = self._canvas(width, height)
        if canvas is None:
            return self.n_piece, self.n_patches
        return self._n_pieces(canvas) * self.n_piece, len(self._order(width, height, canvas))

    def largest(self) -> tuple[int, int]:
        return max(self._canvases, key=lambda canvas: canvas[0] * canvas[1], default=(self.options.image_size,) * 2)

    def _canvas(self, width: int, height: int) -> Size | None:
        """Of the tiles, None where there are none."""
        is_small = max(width, height) <= self.options.image_size
        # Tiles that only follow one another are libmtmd's, which has none of small images.
        if not self._canvases or (is_small and not self.ends_rows):
            return None
        return best_canvas(width, height, self._canvases)

    def _n_pieces(self, canvas: Size) -> int:
        return 1 + canvas[0] * canvas[1] // self.options.image_size**2

    def _order(self, width: int, height: int, canvas: Size) -> Sequence[int]:
        """Which encoded row stands at each place: first those of the whole image."""
        if not self.ends_rows:
            return range(self._n_pieces(canvas) * self.n_piece)
        across, down = (side // self.options.image_size for side in canvas)
        columns, rows = without_margins(width, height, across * self._side, down * self._side)
        lines = across_tiles(columns, rows, self._side, across, self.n_piece)
        of_tiles = [place for line in lines for place in [*(self.n_piece + row for row in line), self.n_patches]]
        return [*range(self.n_patches), *of_tiles]

    def prepare(self, pixels: Pixels) -> Prepared:
        size = self.options.image_size
        width, height = size_of(pixels)
        canvas = self._canvas(width, height)
        order: Sequence[int] = range(self.n_patches)
        if not self._canvases:
            parts = [squared(pixels, size, Filter.BICUBIC, MEAN_COLOUR)]
        else:
            parts = [resized(pixels, (size, size), Filter.BICUBIC)]
        if canvas:
            whole = on_canvas(pixels, canvas, Filter.BICUBIC, BLACK)
            corners = [(y, x) for y in range(0, canvas[1], size) for x in range(0, canvas[0], size)]
            parts += [whole[y : y + size, x : x + size] for y, x in corners]
            order = self._order(width, height, canvas)
        placed = Placed([PLACEHOLDER] * len(order), list(order))
        return Prepared([self._piece(part) for part in parts], placed, len(parts) * self.n_piece)

    def _piece(self, pixels: Pixels) -> Piece:
        o = self.options
        values = normalised(pixels, o.mean, o.std)
        n = self.n_patches + (self.weights.class_token is not None)
        arrays = {"patches": patches(values, o.patch_size), "places": np.arange(n, dtype=np.int32)}
        # A row that ends others is made of nothing that there is.
        n_each = 0 if self.ends_rows else 1
        return Piece(arrays, Divided(n, (n - self.n_patches, n), n_each))

    def begin(self, ctx: Context, inputs: Mapping[str, Tensor]) -> State:
        w, o = self.weights, self.options
        x = w.patches(inputs["patches"])
        if w.class_token is not None:
            x = ctx.use(w.class_token).reshape(o.n_embd, 1).concat(x, 1)
        x = x + w.positions(inputs["places"])
        if w.first_norm:
            x = w.first_norm(x, o.eps)
        return self._kept((x,), 0)

    def layer(self, look: Look, state: State, inputs: Mapping[str, Tensor], index: int) -> State:
        x, *kept = state
        return self._kept((self.layers[index](look, x, self.options, self.activation), *kept), index + 1)

    def _kept(self, state: State, layer: int) -> State:
        """The values now, and after them those that are taken of earlier layers."""
        return (*state, state[0]) if layer in self.features[:-1] else state

    def end(self, ctx: Context, state: State, inputs: Mapping[str, Tensor]) -> Tensor:
        w, o = self.weights, self.options
        x, *kept = state
        if w.norm:
            x = w.norm(x, o.eps)
        features = x
        for i, part in enumerate([*kept, x]):
            features = part if i == 0 else features.concat(part, 0)
        rows = self.projector(features, o.eps)
        if self.ends_rows and w.newline is not None:
            rows = rows.concat(ctx.use(w.newline).reshape(self.n_out, 1), 1)
        return rows

    def max_nodes(self) -> int:
        return 64 + len(self.features) + MAX_NODES_OF_LAYER * self.n_layers
