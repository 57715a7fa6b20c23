"""Llama and the models of its shape (Mistral, Mixtral, Qwen 2 and 3) as their authors publish them, to GGUF.

Reads config.json, the tokenizer's files and the tensors. Names, keys, the order of rows and the frequency factors are
llama.cpp's for these architectures. Mistral's window is not written: llama.cpp's architecture ``llama`` has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from puna.errors import FileFormatError, UnsupportedModel
from puna.gguf.convert import vocabulary
from puna.gguf.convert.checkpoint import Checkpoint, OnBytes, Tensors, ignore
from puna.gguf.convert.numbers import check_range
from puna.gguf.convert.output import Output, Rows, file_type, unchanged
from puna.gguf.convert.rotation import Rotation
from puna.gguf.types import ValueType
from puna.gguf.writer import GGUFWriter

LIMITS = {
    "hidden_size": 1 << 20,
    "num_hidden_layers": 1024,
    "num_attention_heads": 1 << 16,
    "intermediate_size": 1 << 24,
    "max_position_embeddings": 1 << 31,
    "n_kv_heads": 1 << 16,
    "head_width": 1 << 16,
}
TABLE, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


MATRICES = {  # of a layer: name in GGUF, name in the checkpoint
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class Experts:
    """Names of a layer's router and of each expert's matrices, {} standing for its number."""

    router: str
    gate: str
    up: str
    down: str
    is_normalised: bool = True  # the weights of the chosen add up to one; False: only if norm_topk_prob says so


_MIXTRAL = Experts(
    "block_sparse_moe.gate",
    gate="block_sparse_moe.experts.{}.w1",
    up="block_sparse_moe.experts.{}.w3",
    down="block_sparse_moe.experts.{}.w2",
)
_QWEN = Experts(
    "mlp.gate",
    gate="mlp.experts.{}.gate_proj",
    up="mlp.experts.{}.up_proj",
    down="mlp.experts.{}.down_proj",
    is_normalised=False,
)


class Config(msgspec.Struct, frozen=True):
    """The part of config.json that matters."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None  # newer checkpoints: all about the rotation in one place
    tie_word_embeddings: bool = False
    use_sliding_window: bool = False
    hidden_act: str = "silu"
    partial_rotary_factor: float = 1.0
    num_local_experts: int | None = None
    num_experts: int | None = None
    num_experts_per_tok: int = 2
    moe_intermediate_size: int | None = None
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    norm_topk_prob: bool | None = None
    bos_token_id: int | list[int] | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | list[int] | None = None

    @property
    def n_kv_heads(self) -> int:
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden_size // max(1, self.num_attention_heads)

    @property
    def n_experts(self) -> int:
        return self.num_local_experts or self.num_experts or 0

    @property
    def expert_width(self) -> int:
        return self.moe_intermediate_size or self.intermediate_size

    @property
    def rotation(self) -> Rotation:
        options = self.rope_parameters or self.rope_scaling or {}
        return Rotation(options, self.rope_theta, self.max_position_embeddings, self.head_width)

    def check(self) -> None:
        """Errors: FileFormatError naming the field; UnsupportedModel for an arithmetic that the architecture has not."""
        check_range(self, LIMITS)
        if self.num_attention_heads % self.n_kv_heads or self.head_width % 2:
            raise FileFormatError(
                f"config.json: {self.num_attention_heads} heads of {self.head_width} cannot share {self.n_kv_heads} for keys"
            )
        if not 0 < self.rms_norm_eps < 1:
            raise FileFormatError(f"config.json: rms_norm_eps is {self.rms_norm_eps}")
        if self.hidden_act != "silu" or self.partial_rotary_factor != 1.0 or self.use_sliding_window:
            raise UnsupportedModel(
                "config.json: only models with hidden_act silu, whole heads rotated and no sliding window can be converted"
            )

    def check_experts(self, experts: Experts) -> None:
        """Errors: as check."""
        check_range(self, {"n_experts": 1 << 12, "num_experts_per_tok": max(1, self.n_experts), "expert_width": 1 << 24})
        is_normalised = experts.is_normalised if self.norm_topk_prob is None else self.norm_topk_prob
        if self.decoder_sparse_step != 1 or self.mlp_only_layers or not is_normalised:
            raise UnsupportedModel(
                "config.json: only models with experts in every layer, whose weights are normalised, can be converted"
            )


@dataclass(frozen=True)
class Family:
    """How an architecture of this shape differs from Llama."""

    architecture: str
    interleaves: bool = False  # rotation turns neighbouring rows; checkpoints keep the two halves of a head apart
    normalises_heads: bool = False
    needs_biases: bool = False  # of queries, keys and values
    experts: Experts | None = None


FAMILIES = {
    "LlamaForCausalLM": Family("llama", interleaves=True),
    "MistralForCausalLM": Family("llama", interleaves=True),
    "Qwen2ForCausalLM": Family("qwen2", needs_biases=True),
    "MixtralForCausalLM": Family("llama", interleaves=True, experts=_MIXTRAL),
    "Qwen3ForCausalLM": Family("qwen3", normalises_heads=True),
    "Qwen3MoeForCausalLM": Family("qwen3moe", normalises_heads=True, experts=_QWEN),
}


class _Architectures(msgspec.Struct, frozen=True):
    architectures: list[str] = []


def convert(checkpoint: Checkpoint, target: Path, on_bytes: OnBytes = ignore) -> None:
    """Write *target* from a checkpoint.

    Errors: FileFormatError naming file and tensor; UnsupportedModel for what has no counterpart in GGUF.
    """
    names = checkpoint.decoded("config.json", _Architectures).architectures
    family = FAMILIES.get(names[0] if names else "")
    if family is None:
        raise UnsupportedModel(f"config.json: architecture {names[:1]} is none of {', '.join(FAMILIES)}")
    config = checkpoint.decoded("config.json", Config)
    config.check()
    if family.experts is not None:
        config.check_experts(family.experts)
    with checkpoint.tensors() as tensors:
        n_tokens = vocabulary.n_embeddings(tensors, TABLE, config.hidden_size)
        ids = msgspec.structs.asdict(config)
        words = vocabulary.read(checkpoint, n_tokens, ids)
        writer = GGUFWriter(family.architecture)
        writer.add("general.file_type", file_type(tensors, TABLE), ValueType.UINT32)
        _add_options(writer, family, config, n_tokens)
        words.add_to(writer)
        output = Output(writer, tensors)
        for name, (source, shape, n_heads) in _layout(family, config, n_tokens, tensors).items():
            rearrange = partial(interleaved, n_heads) if n_heads else unchanged
            output.add(name, source, shape, rearrange, is_exact="ffn_gate_inp" in name)  # routers are small and matter
        for i in range(config.num_hidden_layers):
            for name, (sources, shape) in _stacks(family, config, i).items():
                output.add_stack(name, sources, shape)
        factors = config.rotation.frequency_factors()
        if factors is not None:
            writer.add_tensor("rope_freqs.weight", factors)
        output.write(target, on_bytes)


def _add_options(writer: GGUFWriter, family: Family, config: Config, n_tokens: int) -> None:
    numbers = {
        "vocab_size": n_tokens,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.n_kv_heads,
        "rope.dimension_count": config.head_width,
    }
    if config.head_width * config.num_attention_heads != config.hidden_size or family.normalises_heads:
        numbers |= {"attention.key_length": config.head_width, "attention.value_length": config.head_width}
    if family.experts is not None:
        numbers |= {"expert_count": config.n_experts, "expert_used_count": config.num_experts_per_tok}
        numbers["expert_feed_forward_length"] = config.expert_width
    for key, whole in numbers.items():
        writer.add(f"{family.architecture}.{key}", whole, ValueType.UINT32)
    for key, value in {"attention.layer_norm_rms_epsilon": config.rms_norm_eps, **config.rotation.keys()}.items():
        writer.add(f"{family.architecture}.{key}", value)


def interleaved(n_heads: int, rows: Rows) -> Rows:
    """The rows of each head so that those which are rotated together stand beside each other."""
    return rows.reshape(n_heads, 2, rows.shape[0] // n_heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


_Place = tuple[str, tuple[int, ...], int]  # tensor of the checkpoint, its shape, heads whose rows change their order


def _layout(family: Family, config: Config, n_tokens: int, tensors: Tensors) -> dict[str, _Place]:
    """Every tensor of the GGUF file.

    Errors: UnsupportedModel naming a tensor of the checkpoint that has no place in it.
    """
    width, inner = config.hidden_size, config.intermediate_size
    q_width, kv_width = config.num_attention_heads * config.head_width, config.n_kv_heads * config.head_width
    turned = (config.num_attention_heads, config.n_kv_heads) if family.interleaves else (0, 0)
    places: dict[str, _Place] = {
        "token_embd.weight": (TABLE, (n_tokens, width), 0),
        "output_norm.weight": ("model.norm.weight", (width,), 0),
    }
    if not config.tie_word_embeddings:
        places["output.weight"] = (_HEAD, (n_tokens, width), 0)
    matrices = {
        "attn_q": (q_width, width, turned[0]),
        "attn_k": (kv_width, width, turned[1]),
        "attn_v": (kv_width, width, 0),
        "attn_output": (width, q_width, 0),
    }
    if family.experts is None:
        matrices |= {"ffn_gate": (inner, width, 0), "ffn_up": (inner, width, 0), "ffn_down": (width, inner, 0)}
    vectors = {"attn_norm": ("input_layernorm", width), "ffn_norm": ("post_attention_layernorm", width)}
    if family.normalises_heads:
        vectors |= {
            "attn_q_norm": ("self_attn.q_norm", config.head_width),
            "attn_k_norm": ("self_attn.k_norm", config.head_width),
        }
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        for ours, (n_out, n_in, n_heads) in matrices.items():
            places[f"blk.{i}.{ours}.weight"] = (f"{layer}.{MATRICES[ours]}.weight", (n_out, n_in), n_heads)
            bias = f"{layer}.{MATRICES[ours]}.bias"
            if bias in tensors or (family.needs_biases and ours in ("attn_q", "attn_k", "attn_v")):
                places[f"blk.{i}.{ours}.bias"] = (bias, (n_out,), n_heads)
        for ours, (theirs, length) in vectors.items():
            places[f"blk.{i}.{ours}.weight"] = (f"{layer}.{theirs}.weight", (length,), 0)
        if family.experts is not None:
            router = f"{layer}.{family.experts.router}.weight"
            places[f"blk.{i}.ffn_gate_inp.weight"] = (router, (config.n_experts, width), 0)
    stacks = (_stacks(family, config, i).values() for i in range(config.num_hidden_layers))
    known = {source for source, _, _ in places.values()} | {_HEAD}
    known |= {source for layer_stacks in stacks for sources, _ in layer_stacks for source in sources}
    unknown = [name for name in tensors if name not in known and not name.endswith("rotary_emb.inv_freq")]
    if unknown:
        raise UnsupportedModel(
            f"{tensors.home(unknown[0]).name}: tensor {unknown[0][:200]} has no place in a {family.architecture} of "
            f"{config.num_hidden_layers} layers"
        )
    return places


def _stacks(family: Family, config: Config, layer: int) -> dict[str, tuple[list[str], tuple[int, int]]]:
    """The experts' tensors of one layer: those of the checkpoint that make one, and the shape of each."""
    if family.experts is None:
        return {}
    width, inner = config.hidden_size, config.expert_width
    shapes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    return {
        f"blk.{layer}.ffn_{part}_exps.weight": (
            [f"model.layers.{layer}.{getattr(family.experts, part).format(e)}.weight" for e in range(config.n_experts)],
            shape,
        )
        for part, shape in shapes.items()
    }
