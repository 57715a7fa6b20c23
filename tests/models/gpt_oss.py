from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.models.dialect import Translation
from tests.models.row import WINDOW_AS_BATCH, Row, TinyFile

# The published base and context: the stretch sets in at pair 8 of 32 and is whole at 18, so that both of YaRN's betas count.
YARN = {
    "rope__freq_base": 150000.0,
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 8.0,
    "rope__scaling__original_context_length": 4096,
}


def write_gpt_oss(path: Path, *, n_experts: int = 8, n_layers: int = 4, experts: str = "", **options: Any) -> Path:
    n_heads, head_dim, n_ff = 4, 64, 128
    stated: dict[str, Any] = {
        "attention__key_length": head_dim,
        "attention__value_length": head_dim,
        "rope__dimension_count": head_dim,
    }
    stated |= {"expert_feed_forward_length": n_ff, "expert_count": n_experts, "expert_used_count": 3}
    stated |= {"attention__sliding_window": 48} | YARN
    file = TinyFile("gpt-oss", n_layers=n_layers, n_heads=n_heads, **{**stated, **options})
    file.ends()
    for i in range(n_layers):
        prefix = f"blk.{i}"
        file.norms(prefix, "attn_norm", "post_attention_norm")
        file.matrices(prefix, {"attn_q": (256, 256), "attn_k": (128, 256), "attn_v": (128, 256)}, biases=True)
        file.matrices(prefix, {"attn_output": (256, 256)}, biases=True, gain=2.0)
        sinks = file.weights.random.normal(1.0, 1.5, n_heads)
        file.writer.add_tensor(f"{prefix}.attn_sinks.weight", sinks.astype("float32"))
        file.experts(prefix, n_experts=n_experts, n_ff=n_ff, biases=True, dtype=experts, gain=3.0)  # some values are clamped
    return file.save(path)


def write_gptoss(path: Path, **options: Any) -> Path:
    """As the ancestor writes it: gate and up in turn in one tensor, YaRN not stated."""
    file = Translation(write_gpt_oss(path, **options))
    for i in range(file.values["block_count"][0]):
        for kind in ("weight", "bias"):
            gate, up, both = (f"blk.{i}.ffn_{name}_exps.{kind}" for name in ("gate", "up", "gate_up"))
            file.interleave(gate, up, both)
    del file.values["rope.scaling.type"]
    file.rename({"attn_output": "attn_out", "attn_sinks.weight": "attn_sinks", "post_attention_norm": "ffn_norm"})
    return file.save(path, "gptoss")


GPT_OSS = Row(
    models="gpt-oss 20B and 120B",
    attends="a window and everything, in turn",
    write=write_gpt_oss,
    variants={
        "f32": {},
        "f16": {"dtype": "f16"},
        "mxfp4": {"dtype": "f16", "experts": "mxfp4"},
        "q8_0": {"dtype": "q8_0"},
        "no-yarn": dict.fromkeys(YARN),
        "no-flash-small-batches-no-yarn": {**dict.fromkeys(YARN), **WINDOW_AS_BATCH},
        "pattern": {"attention__sliding_window_pattern": [True, True, False, True], "rope__freq_base_swa": 500.0},
    },
    shifted_alone={
        variant: [{"attention__sliding_window_pattern": n} for n in (0, 1)]
        for variant in ("f32", "f16", "mxfp4", "q8_0", "pattern")
    },
    note="libllama multiplies shifted keys by YaRN's magnitude a second time",
)

# The ancestor's window shows a row one key more; libllama's is followed.
GPTOSS = Row(
    models="the same in files of the ancestor",
    attends=GPT_OSS.attends,
    write=write_gptoss,
    norm=write_gpt_oss,
    variants={"f32": {}, "mxfp4": {"dtype": "f16", "experts": "mxfp4"}},
    shifted_alone={"f32": GPT_OSS.shifted_alone["f32"], "mxfp4": GPT_OSS.shifted_alone["mxfp4"]},
    note=GPT_OSS.note,
)
