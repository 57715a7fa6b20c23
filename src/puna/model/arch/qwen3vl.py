"""Qwen 3-VL (Qwen Team 2025), the language part, dense and with experts.

Qwen 3's layer. The pairs of each head turn by time, height and width, one after another (interleaved M-RoPE). A row of an
image brings the first layers vectors of their own, which its encoder took from layers in between: each is added to what the
layer gives (DeepStack, Meng et al. 2024). They follow the embedding in the row; those of text are zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile
from puna.ml.backend import Backend
from puna.ml.tensor import SectionOrder, Tensor
from puna.model.decoder import Step
from puna.model.per_layer import part
from puna.model.prenorm import NormalisedAttention, PreNormDecoder, PreNormLayer, PreNormOptions, PreNormWeights
from puna.model.rope import rope_sections
from puna.model.routing import needed_routing
from puna.nn.declare import gguf
from puna.nn.experts import Experts
from puna.nn.mlp import SwiGLU

# Of 64 pairs, in files that do not say.
SECTIONS = (24, 20, 20)


@dataclass(frozen=True)
class Options(PreNormOptions):
    n_deepstack: int = 0  # layers that a row of an image brings something

    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        o, meta = super().read(file), file.metadata
        # A file that holds the encoder too says in which of its layers they come from.
        default = len(meta.integers("vision.deepstack_visual_indexes", []))
        n_deepstack = meta.integer("n_deepstack_layers", default)
        if not 0 <= n_deepstack <= o.n_layers:
            raise FileFormatError(f"{file.path}: {n_deepstack} of {o.n_layers} layers cannot be brought something by images")
        sections = rope_sections(file, SectionOrder.INTERLEAVED, SECTIONS)
        return replace(o, n_deepstack=n_deepstack, rope=replace(o.rope, sections=sections))


@dataclass(frozen=True)
class MoEOptions(Options):
    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        return replace(super().read(file), routing=needed_routing(file, is_normalised=True))


@dataclass
class Layer(PreNormLayer):
    attention: NormalisedAttention
    mlp: SwiGLU | Experts

    def __call__(self, x: Tensor, step: Step, o: Options) -> Tensor:  # type: ignore[override]  # the family's own options
        y = super().__call__(x, step, o)
        if step.per_layer is None or step.layer >= o.n_deepstack:
            return y
        given = part(step.per_layer, step.layer)
        if step.is_selected:
            (given,) = step.outputs_only(given)
        return y + given


@dataclass
class Weights(PreNormWeights):
    layers: list[Layer] = gguf("blk")


class Qwen3VL(PreNormDecoder[Options]):
    Options = Options
    Weights = Weights
    has_axes = True

    def __init__(self, file: GGUFFile, backend: Backend, n_ctx: int) -> None:
        super().__init__(file, backend, n_ctx)
        self.n_embd = (1 + self.options.n_deepstack) * self.options.n_embd

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens I32 [n] to what a row of an image may stand in for: embedding and what the layers are given."""
        return super().embed(tokens).pad(self.options.n_deepstack * self.options.n_embd)

    def enter(self, x: Tensor, step: Step) -> Tensor:
        n_embd, n_deepstack, n = self.options.n_embd, self.options.n_deepstack, x.shape[1]
        if not n_deepstack:
            return x
        if step.inputs.embeddings is not None:
            step.per_layer = x.view((n_embd, n, n_deepstack), (x.strides[1], 4 * n_embd), 4 * n_embd)
        return x.view((n_embd, n), (x.strides[1],), 0).contiguous()


class Qwen3VLMoE(Qwen3VL):
    Options = MoEOptions
