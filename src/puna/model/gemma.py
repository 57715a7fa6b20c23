"""What Gemma's generations since the second have in common (Gemma Team 2024, 2025).

Beside Llama: norms after attention and MLP too, GeGLU, embeddings scaled by sqrt(n_embd), most layers with a window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Self, TypeVar

from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile
from puna.ml.tensor import Tensor
from puna.model.decoder import Decoder, Step
from puna.model.prenorm import Attention
from puna.model.windows import WindowedOptions
from puna.nn.declare import gguf
from puna.nn.layers import Embedding, Linear, RMSNorm, softcap
from puna.nn.mlp import GeGLU


@dataclass(frozen=True)
class GemmaOptions(WindowedOptions):
    logit_cap: float = 0.0  # 0: none

    default_logit_cap: ClassVar[float] = 0.0
    n_layers_of_largest: ClassVar[int] = 0  # of the model whose attention is scaled otherwise

    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        o = super().read(file)
        # The largest model divides by what its heads would be wide if they shared the embedding.
        width = o.n_embd / o.n_heads[0] if o.n_layers == cls.n_layers_of_largest else o.head_dim
        return replace(o, scale=width**-0.5, logit_cap=cap(file, "final_logit_softcapping", cls.default_logit_cap))


def cap(file: GGUFFile, key: str, default: float) -> float:
    """Errors: FileFormatError for what is no cap."""
    found = file.metadata.number(key, default)
    if not (math.isfinite(found) and found >= 0):
        raise FileFormatError(f"{file.path}: {file.metadata.full_key(key)}: a cap of {found} is not usable")
    return found


@dataclass
class GemmaLayer:
    attention: Attention
    mlp: GeGLU
    attention_norm: RMSNorm = gguf("attn_norm", dims="embd")
    attention_post_norm: RMSNorm = gguf("post_attention_norm", dims="embd")
    mlp_norm: RMSNorm = gguf("ffn_norm", dims="embd")
    mlp_post_norm: RMSNorm = gguf("post_ffw_norm", dims="embd")

    def __call__(self, x: Tensor, step: Step, o: GemmaOptions) -> Tensor:
        mixed, x = step.outputs_only(self.attention(self.attention_norm(x, o.eps), step, o), x)
        x = self.attention_post_norm(mixed, o.eps) + x
        return self.mlp_post_norm(self.mlp(self.mlp_norm(x, o.eps)), o.eps) + x


@dataclass
class GemmaWeights:
    layers: list[Any] = gguf("blk")
    embedding: Embedding = gguf("token_embd", dims="embd vocab")
    output_norm: RMSNorm = gguf("output_norm", dims="embd")
    output: Linear = gguf("output", alt="token_embd", dims="embd vocab")


OptionsT = TypeVar("OptionsT", bound=GemmaOptions)


class GemmaDecoder(Decoder[OptionsT], Generic[OptionsT]):
    def embed(self, tokens: Tensor) -> Tensor:
        return super().embed(tokens).scale(math.sqrt(self.options.n_embd))

    def head(self, hidden: Tensor) -> Tensor:
        logits = super().head(hidden)
        return softcap(logits, self.options.logit_cap) if self.options.logit_cap else logits
