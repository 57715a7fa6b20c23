"""Qwen 2-VL and 2.5-VL (Qwen Team 2024, 2025), the language part.

Qwen 2's layer. The pairs of each head turn by time, height and width in turn (M-RoPE): text moves along all three at once,
the rows of an image stand at one time, each at its own height and width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from puna.gguf.reader import GGUFFile
from puna.ml.tensor import SectionOrder
from puna.model.prenorm import PreNormDecoder, PreNormLayer, PreNormOptions, PreNormWeights
from puna.model.rope import rope_sections
from puna.nn.declare import gguf
from puna.nn.mlp import SwiGLU


@dataclass(frozen=True)
class Options(PreNormOptions):
    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        o = super().read(file)
        n_pairs = o.rope.n_dims // 2
        # In files that do not say, as in all sizes that were published.
        default = n_pairs - 2 * (3 * n_pairs // 8), 3 * n_pairs // 8, 3 * n_pairs // 8
        return replace(o, rope=replace(o.rope, sections=rope_sections(file, SectionOrder.IN_TURN, default)))


@dataclass
class Layer(PreNormLayer):
    mlp: SwiGLU


@dataclass
class Weights(PreNormWeights):
    layers: list[Layer] = gguf("blk")


class Qwen2VL(PreNormDecoder[Options]):
    Options = Options
    Weights = Weights
    has_axes = True
