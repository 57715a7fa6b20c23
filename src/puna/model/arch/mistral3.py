"""Mistral 3 (Mistral AI 2025): Mistral Small 3.1 and 3.2, Ministral 3, text.

Llama's layer with heads whose width the file states. Ministral 3 is stretched by YaRN (Peng et al. 2023), and its queries
grow with their position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile
from puna.ml.tensor import RopeOptions, Tensor
from puna.model.prenorm import PreNormDecoder, PreNormLayer, PreNormOptions, PreNormWeights
from puna.model.routing import routing_of
from puna.model.temperature import Temperature
from puna.nn.declare import gguf
from puna.nn.experts import Experts
from puna.nn.mlp import SwiGLU


@dataclass(frozen=True)
class Options(PreNormOptions):
    temperature: Temperature | None = None

    is_neox: ClassVar[bool] = False

    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        o = super().read(file)
        rope = _yarn(file, o.rope)
        return replace(o, rope=rope, routing=routing_of(file, is_normalised=True), temperature=_temperature(file, rope))


def _yarn(file: GGUFFile, rope: RopeOptions) -> RopeOptions:
    """YaRN as this family states it: its magnitude 1 + 0.1 ln(factor) may be divided by 1 + 0.1 * multiplier * ln(factor)."""
    meta = file.metadata
    # The ancestor's names; there two keys together ask for the multiplier 1.
    is_cancelled = all(meta.number(f"rope.scaling.{key}", 0.0) for key in ("mscale", "mscale_all_dim"))
    multiplier = meta.number("rope.scaling.yarn_log_multiplier", float(is_cancelled))
    magnitude = 1 - 0.1 * multiplier * math.log(rope.scale) if rope.ext_factor and rope.scale < 1 else 1.0
    if not (math.isfinite(magnitude) and magnitude > 0):
        raise FileFormatError(f"{file.path}: rope.scaling.yarn_log_multiplier {multiplier} is not usable")
    return replace(
        rope,
        attn_factor=rope.attn_factor / magnitude,
        beta_fast=meta.number("rope.scaling.beta_fast", rope.beta_fast),
        beta_slow=meta.number("rope.scaling.beta_slow", rope.beta_slow),
    )


def _temperature(file: GGUFFile, rope: RopeOptions) -> Temperature | None:
    meta = file.metadata
    scale = meta.number("attention.temperature_scale", meta.number("rope.scaling_beta", 0.0))
    if not scale:
        return None
    if not math.isfinite(scale) or rope.original_ctx < 1:
        raise FileFormatError(f"{file.path}: attention.temperature_scale {scale} for contexts of {rope.original_ctx}")
    return Temperature(scale, rope.original_ctx)


@dataclass
class Layer(PreNormLayer):
    mlp: SwiGLU | Experts


@dataclass
class Weights(PreNormWeights):
    layers: list[Layer] = gguf("blk")


class Mistral3(PreNormDecoder[Options]):
    Options = Options
    Weights = Weights

    def temperature(self, positions: Tensor) -> Tensor | None:
        scale = self.options.temperature
        return scale(positions) if scale else None
