"""BERT (Devlin et al. 2018) as an encoder of texts: MiniLM, BGE, E5, Arctic Embed, MPNet-like sentence models, rerankers, …

Learned positions, biases everywhere, GELU (in ggml's approximation by tanh, where the original has the exact one).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile
from puna.kvcache.cache import Cache
from puna.ml.backend import Backend, Context
from puna.ml.tensor import RopeOptions, Tensor
from puna.model.decoder import LAYER_NORM_EPS, DecoderOptions, Step
from puna.model.encoder import EncoderLayer, EncoderWeights, TextEncoder
from puna.model.model import Inputs
from puna.model.rank import RankHead
from puna.nn.declare import gguf
from puna.nn.layers import Embedding
from puna.nn.mlp import GELU


@dataclass(frozen=True)
class Options(DecoderOptions):
    eps_key: ClassVar[str] = LAYER_NORM_EPS

    def rope_of(self, layer: int) -> RopeOptions | None:
        return None


@dataclass
class Layer(EncoderLayer):
    mlp: GELU


@dataclass
class Weights(EncoderWeights):
    layers: list[Layer] = gguf("blk")
    positions: Embedding = gguf("position_embd", dims="embd positions")


class Bert(TextEncoder[Options]):
    Options = Options
    Weights = Weights

    def __init__(self, file: GGUFFile, backend: Backend, n_ctx: int) -> None:
        positions = file.tensors.get("position_embd.weight")
        super().__init__(file, backend, n_ctx)
        assert positions is not None, "bind reports what is missing"
        if positions.shape[1] < n_ctx:
            raise FileFormatError(f"{file.path}: position_embd.weight has {positions.shape[1]} positions, the context is {n_ctx}")
        self._rank = RankHead.read(file, backend, self.options.n_embd)

    def enter(self, x: Tensor, step: Step) -> Tensor:
        at_their_places: Tensor = x + self.weights.positions(step.inputs.positions)
        return at_their_places

    def forward(self, ctx: Context, inputs: Inputs, cache: Cache) -> Tensor:
        """Hidden states [n_embd, n_outputs]; of a cross encoder, whose outputs are first tokens, scores [n_labels, n_outputs]."""
        hidden = super().forward(ctx, inputs, cache)
        return hidden if self._rank is None else self._rank(hidden)

    @property
    def ranks(self) -> bool:
        return self._rank is not None
