"""BERT (Devlin et al. 2018) as an encoder of texts: MiniLM, BGE, E5, Arctic Embed, MPNet-like sentence models, rerankers, …

Every token sees the whole text. Post-norm with LayerNorm, learned positions, biases everywhere, GELU (in ggml's
approximation by tanh, where the original has the exact one). All tokens are of segment 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from puna.errors import FileFormatError, UnsupportedModel
from puna.gguf.reader import GGUFFile
from puna.gguf.types import TensorType
from puna.kvcache.cache import Cache, Limits
from puna.kvcache.uncached import Uncached
from puna.ml.backend import Backend, Context, Use
from puna.ml.tensor import DType, Tensor
from puna.model.model import Inputs
from puna.model.rank import MAX_NODES, RankHead
from puna.model.shapes import check_shapes, found_shape
from puna.nn.attention import attention
from puna.nn.declare import bind, gguf
from puna.nn.layers import Embedding, LayerNorm, Linear


@dataclass(frozen=True)
class Options:
    n_layers: int
    n_embd: int
    n_heads: int
    eps: float

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_heads

    @classmethod
    def read(cls, file: GGUFFile) -> Options:
        meta = file.metadata
        n_layers, n_embd, n_heads = (
            meta.integer("block_count"),
            meta.integer("embedding_length"),
            meta.integer("attention.head_count"),
        )
        if min(n_layers, n_embd, n_heads) < 1 or n_embd % n_heads:
            raise FileFormatError(f"{file.path}: {n_layers} layers, {n_embd} wide, {n_heads} heads is not a BERT")
        return cls(n_layers, n_embd, n_heads, meta.number("attention.layer_norm_epsilon"))


@dataclass
class Attention:
    query: Linear = gguf("attn_q")
    key: Linear = gguf("attn_k")
    value: Linear = gguf("attn_v")
    output: Linear = gguf("attn_output")

    def __call__(self, ctx: Context, x: Tensor, cache: Cache, o: Options) -> Tensor:
        heads = (o.head_dim, o.n_heads, x.shape[1])
        query, key, value = (project(x).reshape(*heads) for project in (self.query, self.key, self.value))
        return self.output(attention(ctx, query, key, value, cache, o.head_dim**-0.5))


@dataclass
class MLP:
    up: Linear = gguf("ffn_up")
    down: Linear = gguf("ffn_down")

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).gelu())


@dataclass
class Layer:
    attention: Attention
    mlp: MLP
    attention_norm: LayerNorm = gguf("attn_output_norm")
    mlp_norm: LayerNorm = gguf("layer_output_norm")


@dataclass
class Weights:
    embedding: Embedding = gguf("token_embd")
    positions: Embedding = gguf("position_embd")
    embedding_norm: LayerNorm = gguf("token_embd_norm")
    layers: list[Layer] = gguf("blk")
    segments: Tensor | None = gguf("token_types.weight", use=Use.VECTOR, optional=True)


class Bert:
    sees_whole_text: Literal[True] = True

    def __init__(self, file: GGUFFile, backend: Backend, n_ctx: int) -> None:
        self.options = Options.read(file)
        self.n_ctx_train = file.metadata.integer("context_length", 0)
        _check_shapes(file, self.options, n_ctx)
        self.n_vocab = file.tensors["token_embd.weight"].shape[1] if "token_embd.weight" in file.tensors else 0
        self.weights = bind(Weights, backend, file, {"layers": self.options.n_layers})
        self._rank = RankHead.read(file, backend, self.options.n_embd)

    def forward(self, ctx: Context, inputs: Inputs, cache: Cache) -> Tensor:
        """Hidden states [n_embd, n_outputs]; of a cross encoder, whose outputs are first tokens, scores [n_labels, n_outputs]."""
        o, w = self.options, self.weights
        x = w.embedding(inputs.tokens)
        if w.segments is not None:
            x = x + ctx.use(w.segments).view((o.n_embd,), (), 0)
        x = w.embedding_norm(x + w.positions(inputs.positions), o.eps)
        for i, layer in enumerate(w.layers):
            cache.layer(i)
            mixed = layer.attention(ctx, x, cache, o)
            if i == o.n_layers - 1 and inputs.outputs is not None:
                mixed, x = mixed.rows(inputs.outputs), x.rows(inputs.outputs)
            x = layer.attention_norm(mixed + x, o.eps)
            x = layer.mlp_norm(layer.mlp(x) + x, o.eps)
        return x if self._rank is None else self._rank(x)

    @property
    def ranks(self) -> bool:
        return self._rank is not None

    def make_cache(self, backend: Backend, limits: Limits, dtype: DType) -> Cache:
        return Uncached()

    def max_nodes(self, limits: Limits) -> int:
        return 64 + MAX_NODES + self.options.n_layers * 48


def _check_shapes(file: GGUFFile, o: Options, n_ctx: int) -> None:
    shapes: dict[str, tuple[int, ...]] = {f"token_embd_norm.{part}": (o.n_embd,) for part in ("weight", "bias")}
    n_rows = {name: (*found_shape(file, f"{name}.weight"), 0, 0)[1] for name in ("token_embd", "position_embd", "token_types")}
    shapes |= {f"{name}.weight": (o.n_embd, max(n, 1)) for name, n in n_rows.items()}
    for i in range(o.n_layers):
        n_ff = (*found_shape(file, f"blk.{i}.ffn_up.weight"), 0, 0)[1]
        matrices = {name: (o.n_embd, o.n_embd) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
        matrices |= {"ffn_up": (o.n_embd, n_ff), "ffn_down": (n_ff, o.n_embd)}
        for name, (n_in, n_out) in matrices.items():
            shapes[f"blk.{i}.{name}.weight"], shapes[f"blk.{i}.{name}.bias"] = (n_in, n_out), (n_out,)
        for name in ("attn_output_norm", "layer_output_norm"):
            shapes |= {f"blk.{i}.{name}.{part}": (o.n_embd,) for part in ("weight", "bias")}
    check_shapes(file, shapes)
    if 0 < n_rows["position_embd"] < n_ctx:
        raise FileFormatError(
            f"{file.path}: position_embd.weight has {n_rows['position_embd']} positions, the context is {n_ctx}"
        )
    if "token_types.weight" in file.tensors and file.tensors["token_types.weight"].type is not TensorType.F32:
        raise UnsupportedModel(f"{file.path}: token_types.weight must be of type F32")
