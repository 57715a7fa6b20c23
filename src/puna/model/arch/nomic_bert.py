"""Nomic BERT (Nussbaum et al. 2024), the encoder of nomic-embed-text.

BERT with rotary positions, queries, keys and values from one matrix, SwiGLU, and no biases but those of the norms.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from puna.gguf.reader import GGUFFile
from puna.model.decoder import LAYER_NORM_EPS, DecoderOptions
from puna.model.encoder import EncoderLayer, EncoderWeights, TextEncoder
from puna.nn.declare import gguf
from puna.nn.mlp import SwiGLU

BASE = 1000.0  # of the rotation, in files that do not say


@dataclass(frozen=True)
class Options(DecoderOptions):
    eps_key: ClassVar[str] = LAYER_NORM_EPS

    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        o = super().read(file)
        return o if file.metadata.has("rope.freq_base") else replace(o, rope=replace(o.rope, base=BASE))


@dataclass
class Layer(EncoderLayer):
    mlp: SwiGLU


@dataclass
class Weights(EncoderWeights):
    layers: list[Layer] = gguf("blk")


class NomicBert(TextEncoder[Options]):
    Options = Options
    Weights = Weights
