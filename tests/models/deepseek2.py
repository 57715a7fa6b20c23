from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.models.dialect import Translation
from tests.models.row import Row, TinyFile

N_EMBD, N_HEADS, N_EXPERTS, N_FF = 256, 4, 8, 128
# Of each head: what does not rotate, what does, values; latents. Keys of 64 values, so that their scale is exact in F32.
OWN, ROPE, VALUE, KV_RANK = 32, 32, 96, 128


def write_deepseek2(
    path: Path,
    *,
    cut: bool = True,
    q_rank: int = 96,
    n_layers: int = 4,
    n_dense: int = 1,
    bias: bool = True,
    packed: bool = False,
    **options: Any,
) -> Path:
    """*cut*: the form in which the latents are the keys."""
    lengths = (KV_RANK + ROPE, KV_RANK) if cut else (OWN + ROPE, VALUE)
    stated: dict[str, Any] = dict(zip(("attention__key_length", "attention__value_length"), lengths, strict=True))
    if cut:
        stated |= {"attention__key_length_mla": OWN + ROPE, "attention__value_length_mla": VALUE}
    stated |= {"attention__q_lora_rank": q_rank, "attention__kv_lora_rank": KV_RANK, "rope__dimension_count": ROPE}
    stated |= {"expert_count": N_EXPERTS, "expert_used_count": 3, "expert_shared_count": 1, "expert_feed_forward_length": N_FF}
    stated |= {"leading_dense_block_count": n_dense, "expert_weights_scale": 1.5, "expert_weights_norm": True}
    stated |= {"expert_gating_func": 2}
    n_kv_heads = 1 if cut else N_HEADS
    file = TinyFile("deepseek2", n_layers=n_layers, n_heads=N_HEADS, n_kv_heads=n_kv_heads, **{**stated, **options})
    file.ends()
    for i in range(n_layers):
        prefix = f"blk.{i}"
        file.norms(prefix, "attn_norm", "ffn_norm")
        _write_attention(file, prefix, cut, q_rank)
        if i < n_dense:
            file.mlp(prefix, n_ff=512)
            continue
        names = ("gate_up", "down") if packed else ("gate", "up", "down")
        file.experts(prefix, n_experts=N_EXPERTS, n_ff=N_FF, names=names)
        file.mlp(prefix, n_ff=N_FF, suffix="_shexp")
        if bias:
            file.selection_bias(prefix, N_EXPERTS)
    return file.save(path)


def _write_attention(file: TinyFile, prefix: str, cut: bool, q_rank: int) -> None:
    n_query = N_HEADS * (OWN + ROPE)
    file.matrices(prefix, {"attn_kv_a_mqa": (KV_RANK + ROPE, N_EMBD)})
    file.norms(prefix, "attn_kv_a_norm", n=KV_RANK)
    if q_rank:
        file.matrices(prefix, {"attn_q_a": (q_rank, N_EMBD), "attn_q_b": (n_query, q_rank)})
        file.norms(prefix, "attn_q_a_norm", n=q_rank)
    else:
        file.matrices(prefix, {"attn_q": (n_query, N_EMBD)})
    if cut:
        file.weights.stack(f"{prefix}.attn_k_b.weight", N_HEADS, KV_RANK, OWN, std=KV_RANK**-0.5)
        file.weights.stack(f"{prefix}.attn_v_b.weight", N_HEADS, VALUE, KV_RANK)
    else:
        file.matrices(prefix, {"attn_kv_b": (N_HEADS * (OWN + VALUE), KV_RANK)})
    file.matrices(prefix, {"attn_output": (N_EMBD, N_HEADS * VALUE)}, gain=2.0)


STRETCHED = {"rope__scaling__factor": 8.0, "rope__scaling__original_context_length": 256}
YARN = {"rope__scaling__type": "yarn", **STRETCHED}

DEEPSEEK2 = Row(
    models="DeepSeek V2, V2.5, V3 and R1, Kimi K2, GLM-4.7-Flash",
    attends="everything before, through latents",
    write=write_deepseek2,
    variants={
        "f32": {"expert_group_count": 4, "expert_group_used_count": 2},
        "f16": {"dtype": "f16"},
        "q8_0": {"dtype": "q8_0"},
        "whole": {"cut": False},
        "whole-yarn": {"cut": False, "rope__scaling__yarn_log_multiplier": 0.0707, **YARN},
        "lite": {"q_rank": 0, "bias": False, "expert_gating_func": None, "expert_weights_norm": None},
        "lite-whole": {"cut": False, "q_rank": 0, "n_dense": 2, "packed": True},
        "softmax-groups": {"expert_gating_func": 1, "bias": False, "expert_group_count": 2, "expert_group_used_count": 1},
        "yarn": {"rope__scaling__yarn_log_multiplier": 0.0707, **YARN},
        "yarn-one": {"rope__scaling__yarn_log_multiplier": 0.1, "rope__scaling__attn_factor": 1.2, **YARN},
        "yarn-plain": YARN,
        "rope-linear": STRETCHED,
        "temperature": {"attention__temperature_scale": 0.3, "attention__temperature_length": 64},
        "cache-q8_0": {},
    },
    # In F16 the engine differs from itself by 1.1e-3 where libllama computes three sequences one by one.
    worst=2e-3,
    shifted_alone={"yarn-plain": [{}], "yarn-one": [{}], "cache-q8_0": [{}]},
    note="libllama multiplies shifted keys by YaRN's magnitude a second time, and crashes shifting quantised latents",
)


def write_lite(path: Path, **options: Any) -> Path:
    """As the ancestor writes it: the lengths of heads the other way round."""
    file = Translation(write_deepseek2(path, **options))
    for kind in ("key", "value"):
        one, other = f"attention.{kind}_length", f"attention.{kind}_length_mla"
        file.values[one], file.values[other] = file.values[other], file.values[one]
    file.values["attention.head_count_kv"] = (N_HEADS, None)
    return file.save(path, "glm4moelite")


LITE = Row(
    models="GLM-4.7-Flash in files of the ancestor",
    attends=DEEPSEEK2.attends,
    write=write_lite,
    norm=write_deepseek2,
    variants={"f32": {}, "q8_0": {"dtype": "q8_0"}},
)
