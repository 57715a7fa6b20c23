"""Qwen 3 (Qwen Team 2025), dense; also Qwen3-Embedding and Qwen3-Reranker, which the pooling in a file tells apart.

Llama's layer with queries and keys normalised head by head, rotary positions on halves of a head, no biases, and heads
whose width the file states. A reranker is asked whether a text answers a query, and its head has the rows of "yes" and
"no" alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from puna.gguf.reader import GGUFFile
from puna.kvcache.cache import Cache
from puna.ml.backend import Backend, Context
from puna.ml.tensor import Tensor
from puna.model.model import Inputs
from puna.model.prenorm import NormalisedAttention, PreNormDecoder, PreNormLayer, PreNormOptions, PreNormWeights
from puna.model.rank import RankHead
from puna.nn.declare import gguf
from puna.nn.mlp import SwiGLU


@dataclass
class Layer(PreNormLayer):
    attention: NormalisedAttention
    mlp: SwiGLU


@dataclass
class Weights(PreNormWeights):
    layers: list[Layer] = gguf("blk")


class Qwen3(PreNormDecoder[PreNormOptions]):
    Options = PreNormOptions
    Weights = Weights

    def __init__(self, file: GGUFFile, backend: Backend, n_ctx: int) -> None:
        super().__init__(file, backend, n_ctx)
        self._rank = RankHead.read(file, backend, self.options.n_embd)

    def forward(self, ctx: Context, inputs: Inputs, cache: Cache) -> Tensor:
        """As of all decoders; of a reranker, probabilities [n_labels, n_outputs]."""
        y = super().forward(ctx, inputs, cache)
        return y if self._rank is None else self._rank(y).softmax()

    @property
    def ranks(self) -> bool:
        return self._rank is not None
