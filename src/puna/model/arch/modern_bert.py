"""ModernBERT (Warner et al. 2024): gte-modernbert, Granite Embedding R2 and other encoders of texts.

Unlike BERT: norms stand before what they norm, the first of them behind the embedding alone; rotary positions; GeGLU from one
matrix, or SwiGLU; no biases. Of three layers the first sees the whole text, the others half a window to either side and
rotate by a base of their own.

Source: the paper, and llama.cpp's graph of the same name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from puna.errors import UnsupportedModel
from puna.gguf.reader import GGUFFile
from puna.kvcache.cache import Cache, Limits
from puna.kvcache.uncached import Uncached
from puna.ml.backend import Backend
from puna.ml.tensor import DType, Gate, Tensor
from puna.model.decoder import LAYER_NORM_EPS, Decoder, Step
from puna.model.encoder import EncoderAttention
from puna.model.windows import WindowedOptions, window_base
from puna.nn.declare import gguf
from puna.nn.layers import Embedding, FeedForwardLinear, LayerNorm, gated

LOCAL_BASE = 10000.0  # of the rotation in layers with a window, in files that do not say
GATES = {"gelu": Gate.GELU, "silu": Gate.SILU}


@dataclass(frozen=True)
class Options(WindowedOptions):
    gate: Gate = Gate.GELU

    eps_key: ClassVar[str] = LAYER_NORM_EPS
    period: ClassVar[int] = 3
    is_full_first: ClassVar[bool] = True

    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        name = file.metadata.string("hidden_activation", "gelu")
        if name not in GATES:
            raise UnsupportedModel(
                f"{file.path}: {file.metadata.full_key('hidden_activation')} is {name[:60]!r}, not gelu or silu"
            )
        return replace(super().read(file), gate=GATES[name], window_base=window_base(file, LOCAL_BASE))


@dataclass
class MLP:
    """Gate and up in one matrix, the gate's rows first."""

    gate_up: FeedForwardLinear = gguf("ffn_up", dims="embd 2*ff")
    down: FeedForwardLinear = gguf("ffn_down", dims="ff embd")


@dataclass
class Layer:
    attention: EncoderAttention
    mlp: MLP
    attention_norm: LayerNorm | None = gguf("attn_norm", dims="embd", optional=True)  # the first layer has none
    mlp_norm: LayerNorm = gguf("ffn_norm", dims="embd")

    def __call__(self, x: Tensor, step: Step, o: Options) -> Tensor:
        normed = x if self.attention_norm is None else self.attention_norm(x, o.eps)
        mixed, x = step.outputs_only(self.attention(normed, step, o), x)
        x = mixed + x
        return self.mlp.down(gated(self.mlp_norm(x, o.eps), o.gate, self.mlp.gate_up)) + x


@dataclass
class Weights:
    layers: list[Layer] = gguf("blk")
    embedding: Embedding = gguf("token_embd", dims="embd vocab")
    embedding_norm: LayerNorm = gguf("token_embd_norm", dims="embd")
    output_norm: LayerNorm = gguf("output_norm", dims="embd")


class ModernBert(Decoder[Options]):
    Options = Options
    Weights = Weights

    sees_whole_text: Literal[True] = True

    def __init__(self, file: GGUFFile, backend: Backend, n_ctx: int) -> None:
        super().__init__(file, backend, n_ctx)
        self.embeds = True

    def enter(self, x: Tensor, step: Step) -> Tensor:
        normed: Tensor = self.weights.embedding_norm(x, self.options.eps)
        return normed

    def make_cache(self, backend: Backend, limits: Limits, dtype: DType) -> Cache:
        o = self.options
        return Uncached([o.window if is_windowed else 0 for is_windowed in o.is_windowed])
