"""What most families of decoders have in common: names, axes and keys of Llama's shape."""

from __future__ import annotations

from collections.abc import Mapping

from puna.errors import FileFormatError, UnsupportedModel
from puna.gguf.convert.fields import Fields
from puna.gguf.convert.rotation import Factors, Rotation
from puna.gguf.convert.table import Line, Value, interleaved, positive, stated, whole

MATRICES = {  # of a layer: name in GGUF, name in the checkpoint
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def n_heads(fields: Fields) -> int:
    return fields.whole("num_attention_heads", high=1 << 16)


def n_kv_heads(fields: Fields) -> int:
    """Errors: FileFormatError also when the heads cannot share them."""
    found = fields.whole("num_key_value_heads", default=n_heads(fields), high=1 << 16)
    if n_heads(fields) % found or head(fields) % 2:
        raise FileFormatError(f"{fields.file}: {n_heads(fields)} heads of {head(fields)} cannot share {found} for keys")
    return found


def head(fields: Fields) -> int:
    """The width of one."""
    return fields.whole(
        "head_dim", "attention_head_dim", default=max(1, fields.whole("hidden_size") // n_heads(fields)), high=1 << 16
    )


def n_layers(fields: Fields) -> int:
    return fields.whole("num_hidden_layers", high=1024)


LENGTHS: Mapping[str, Value] = {
    "embd": whole("hidden_size", high=1 << 20),
    "ff": whole("intermediate_size", high=1 << 24),
    "heads": n_heads,
    "kv_heads": n_kv_heads,
    "head": head,
    "q": lambda fields: n_heads(fields) * head(fields),
    "k": lambda fields: n_kv_heads(fields) * head(fields),
    "v": lambda fields: n_kv_heads(fields) * head(fields),
    "mixed": lambda fields: n_heads(fields) * head(fields),
}

SIZES: Mapping[str, Value] = {
    "context_length": whole("max_position_embeddings"),
    "embedding_length": whole("hidden_size", high=1 << 20),
    "block_count": n_layers,
    "feed_forward_length": whole("intermediate_size", high=1 << 24),
}
HEADS: Mapping[str, Value] = {
    "attention.head_count": n_heads,
    "attention.head_count_kv": n_kv_heads,
    "attention.key_length": head,
    "attention.value_length": head,
}
EPS: Mapping[str, Value] = {"attention.layer_norm_rms_epsilon": positive("rms_norm_eps", default=1e-6)}
KEYS: Mapping[str, Value] = {**SIZES, **HEADS, **EPS}

SILU = {"hidden_act": ("silu", "swish")}

TABLE = Line("token_embd", "embed_tokens", "vocab embd")
OUTPUT_NORM = Line("output_norm", "norm", "embd")


def is_untied(fields: Fields) -> bool:
    return not fields.flag("tie_word_embeddings", default=False)


HEAD = Line("output", "/lm_head", "vocab embd", when=is_untied)
ENDS = (TABLE, OUTPUT_NORM, HEAD)

NORMS = (Line("attn_norm", "input_layernorm", "embd"), Line("ffn_norm", "post_attention_layernorm", "embd"))
_ATTENDS_WITH, _MLP_WITH = stated("attention_bias"), stated("mlp_bias")

QKV = (
    Line("attn_q", "self_attn.q_proj", "q embd", biased=_ATTENDS_WITH),
    Line("attn_k", "self_attn.k_proj", "k embd", biased=_ATTENDS_WITH),
    Line("attn_v", "self_attn.v_proj", "v embd", biased=_ATTENDS_WITH),
)
# Where GGUF's rotation turns neighbouring rows: checkpoints keep the two halves of a head apart.
PAIRED_QKV = (
    Line("attn_q", "self_attn.q_proj", "q embd", interleaved("heads"), biased=_ATTENDS_WITH),
    Line("attn_k", "self_attn.k_proj", "k embd", interleaved("kv_heads"), biased=_ATTENDS_WITH),
    Line("attn_v", "self_attn.v_proj", "v embd", biased=_ATTENDS_WITH),
)
MIXED = Line("attn_output", "self_attn.o_proj", "embd mixed", biased=_ATTENDS_WITH)
HEAD_NORMS = (Line("attn_q_norm", "self_attn.q_norm", "head"), Line("attn_k_norm", "self_attn.k_norm", "head"))


def swiglu(theirs: str = "mlp.{}_proj", *, on: str = "", suffix: str = "", width: str = "ff") -> tuple[Line, ...]:
    """A gated MLP; {} stands for its part, *suffix* follows the names in GGUF."""
    return (
        Line(f"ffn_gate{suffix}", theirs.format("gate"), f"{width} embd", on=on, biased=_MLP_WITH),
        Line(f"ffn_up{suffix}", theirs.format("up"), f"{width} embd", on=on, biased=_MLP_WITH),
        Line(f"ffn_down{suffix}", theirs.format("down"), f"embd {width}", on=on, biased=_MLP_WITH),
    )


def router(theirs: str, *, on: str = "") -> Line:
    """Small, and much depends on it."""
    return Line("ffn_gate_inp", theirs, "experts embd", on=on, exact=True)


def experts(theirs: str = "mlp.experts.{e}.{part}_proj", *, on: str = "") -> tuple[Line, ...]:
    """A matrix of each expert; {part} stands for which."""
    return tuple(
        Line(f"ffn_{part}_exps", theirs.replace("{part}", part), dims, on=on)
        for part, dims in (("gate", "ff_expert embd"), ("up", "ff_expert embd"), ("down", "embd ff_expert"))
    )


def mixture(count: Value, used: Value, width: Value) -> tuple[Mapping[str, Value], Mapping[str, Value]]:
    """Keys and axes of experts."""

    def n_used(fields: Fields) -> int:
        found, n = used(fields), count(fields)
        if found > n:
            raise fields.wrong("num_experts_per_tok", found, f"not from 1 to {n}")
        return int(found)

    keys = {"expert_count": count, "expert_used_count": n_used, "expert_feed_forward_length": width}
    return keys, {"experts": count, "ff_expert": width}


def count(*names: str) -> Value:
    """How many experts."""
    return whole(*names, high=1 << 12)


def used(*names: str) -> Value:
    """How many experts of each token."""
    return whole(*names, high=1 << 12)


def everywhere(fields: Fields, *, is_normalised: bool) -> None:
    """Errors: UnsupportedModel unless all layers have experts, and weights are normalised or not as the architecture has it."""
    if fields.flag("norm_topk_prob", default=False) is not is_normalised:
        is_or_not = "normalised" if is_normalised else "not normalised"
        raise UnsupportedModel(f"{fields.file}: only models with experts whose weights are {is_or_not} can be converted")
    if fields.whole("decoder_sparse_step", default=1) != 1 or fields.items("mlp_only_layers", default=[]):
        raise UnsupportedModel(f"{fields.file}: only models with experts in every layer can be converted")


def rope(*kinds: str, part: str = "") -> Value:
    return lambda fields: Rotation(fields, head(fields), kinds, part).keys()


def factors(*kinds: str) -> Value:
    def made(fields: Fields) -> Factors:
        return Rotation(fields, head(fields), kinds).factors()

    return made


def per_layer(fields: Fields, name: str, default: list[str]) -> list[str]:
    """What each layer is.

    Errors: FileFormatError for another number of layers.
    """
    return [str(kind) for kind in fields.items(name, default=default, length=n_layers(fields))]


def every(fields: Fields, period: int, usual: str, last: str) -> list[str]:
    """The last of so many layers is of one kind, the others of another."""
    return [last if (i + 1) % period == 0 else usual for i in range(n_layers(fields))]


WINDOW, FULL = "sliding_attention", "full_attention"


def windows(period: int) -> Mapping[str, Value]:
    """Keys of models in which the layers of some kind see a window, the last of so many everything where it is not stated."""

    def pattern(fields: Fields) -> list[bool]:
        kinds = per_layer(fields, "layer_types", every(fields, period, WINDOW, FULL))
        if unknown := set(kinds) - {WINDOW, FULL}:
            raise UnsupportedModel(f"{fields.file}: layer_types has {sorted(unknown)[0][:60]!r}, which cannot be converted")
        return [kind == WINDOW for kind in kinds]

    return {"attention.sliding_window": whole("sliding_window"), "attention.sliding_window_pattern": pattern}
