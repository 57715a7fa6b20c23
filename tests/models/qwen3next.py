from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from puna.gguf.types import TensorType, ValueType
from tests.models.dialect import Translation
from tests.models.row import Row, TinyFile
from tests.tiny import RandomWeights

DIM, N_KEY_HEADS, WIDTH = 32, 2, 4


def write_qwen3next(
    path: Path,
    *,
    architecture: str = "qwen3next",
    kinds: str = "ddda",
    n_experts: int = 8,
    packed: bool = False,
    n_heads: int = 4,
    n_predicting: int = 0,
    tied: bool = False,
    stated: str = "interval",
    **options: Any,
) -> Path:
    """*kinds* of the layers: d is a delta net, a attention; *n_heads* those of a delta net's values."""
    kinds += "a" * n_predicting
    n_layers = len(kinds)
    metadata = {**_delta_net(n_heads), **_stated(stated, kinds)}
    if architecture != "qwen3next":
        metadata["rope__dimension_sections"] = [6, 5, 5, 0]
    if n_experts:
        metadata |= {"expert_count": n_experts, "expert_used_count": 2, "expert_feed_forward_length": 256}
        metadata["expert_shared_feed_forward_length"] = 256
    if n_predicting:
        metadata["nextn_predict_layers"] = n_predicting
    file = TinyFile(architecture, n_layers=n_layers, **{**metadata, **options})
    plain = RandomWeights(file.writer, 7, TensorType.F32)
    file.ends(tied=tied)
    for i, kind in enumerate(kinds):
        prefix = f"blk.{i}"
        file.norms(prefix, "attn_norm", "post_attention_norm")
        if kind == "a":
            file.norms(prefix, "attn_q_norm", "attn_k_norm", n=64)
            file.matrices(prefix, {"attn_q": (512, 256), "attn_k": (128, 256), "attn_v": (128, 256)})
            file.matrices(prefix, {"attn_output": (256, 256)}, gain=4.0)
        else:
            _add_delta_net(file, plain, prefix, n_heads, is_qwen3next=architecture == "qwen3next", packed=packed)
        _add_mlp(file, plain, prefix, n_experts)
        if i >= n_layers - n_predicting:
            file.matrices(prefix, {"nextn.eh_proj": (256, 512)})
            file.norms(prefix, "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm")
    return file.save(path)


def _delta_net(n_heads: int) -> dict[str, Any]:
    return {
        "attention__key_length": 64,
        "attention__value_length": 64,
        "rope__dimension_count": 32,
        "ssm__conv_kernel": WIDTH,
        "ssm__inner_size": DIM * n_heads,
        "ssm__state_size": DIM,
        "ssm__time_step_rank": n_heads,
        "ssm__group_count": N_KEY_HEADS,
    }


def _stated(how: str, kinds: str) -> dict[str, Any]:
    """Which layers attend, in one of the ways that files say it."""
    if how == "interval":
        return {"full_attention_interval": kinds.index("a") + 1}
    if how == "list":
        return {"attention__recurrent_layers": [kind != "a" for kind in kinds]}
    return {"n_kv_heads": [2 if kind == "a" else 0 for kind in kinds]}


def _add_mlp(file: TinyFile, plain: RandomWeights, prefix: str, n_experts: int) -> None:
    if n_experts:
        file.experts(prefix, n_experts=n_experts, n_ff=256)
        plain.matrix(f"{prefix}.ffn_gate_inp_shexp.weight", 1, 256)
        file.matrices(prefix, {"ffn_gate_shexp": (256, 256), "ffn_up_shexp": (256, 256)})
        file.matrices(prefix, {"ffn_down_shexp": (256, 256)}, gain=3.0)
    else:
        file.matrices(prefix, {"ffn_gate": (512, 256), "ffn_up": (512, 256)})
        file.matrices(prefix, {"ffn_down": (256, 512)}, gain=3.0)


def _add_delta_net(file: TinyFile, plain: RandomWeights, prefix: str, n_heads: int, *, is_qwen3next: bool, packed: bool) -> None:
    keys, values = DIM * N_KEY_HEADS, DIM * n_heads
    channels = 2 * keys + values
    if packed:
        file.matrices(prefix, {"ssm_in": (channels + values, 256)})
    else:
        file.matrices(prefix, {"attn_qkv": (channels, 256), "attn_gate": (values, 256)})
    names = {"ssm_ba": 2 * n_heads} if is_qwen3next else {"ssm_beta": n_heads, "ssm_alpha": n_heads}
    file.matrices(prefix, {name: (n_out, 256) for name, n_out in names.items()})
    plain.matrix(f"{prefix}.ssm_conv1d.weight", channels, WIDTH)
    # Slow enough that a state remembers some hundred tokens.
    decay = -file.weights.random.uniform(0.01, 0.3, n_heads)
    file.writer.add_tensor(f"{prefix}.ssm_a", decay.astype(np.float32))
    file.weights.bias(f"{prefix}.ssm_dt.bias", n_heads)
    file.norms(prefix, "ssm_norm", n=DIM)
    file.matrices(prefix, {"ssm_out": (256, values)}, gain=2.0)


def write_qwen35_dialect(path: Path, **options: Any) -> Path:
    """Layers without key/value heads instead of an interval, sections of three numbers, another name of a bias."""
    norm = write_qwen3next(path.with_suffix(".norm"), architecture="qwen35", n_experts=0, stated="kv-heads", **options)
    file = Translation(norm)
    file.values["rope.dimension_sections"] = ([6, 5, 5], ValueType.INT32)
    file.rename({"ssm_dt.bias": "ssm_dt"})
    return file.save(path, "qwen35")


def write_interleaved(path: Path, **options: Any) -> Path:
    """A Qwen 3.5 whose heads stand in the order of Qwen3-Next, and with the packed matrix of that."""
    file = Translation(write_qwen3next(path.with_suffix(".norm"), **options))
    file.values["ssm.v_head_reordered"] = (False, None)
    return file.save(path, "qwen35moe")


_STATES = "a recurrent state; every fourth everything"

QWEN3NEXT = Row(
    models="Qwen3-Next 80B-A3B, Qwen3-Coder-Next",
    attends=_STATES,
    write=write_qwen3next,
    variants={
        "f32": {},
        "f16": {"dtype": "f16"},
        "q8_0": {"dtype": "q8_0"},
        "q4_K": {"dtype": "q4_K", "n_heads": 8},
        "packed-delta-net-last": {"packed": True, "kinds": "ad", "stated": "list"},
        "head-per-key": {"n_heads": 2, "packed": True},
        "predicting": {"n_predicting": 1, "kinds": "dda"},
        "tied": {"tied": True, "kinds": "dda"},
    },
    can_shift=False,
    is_recurrent=True,
)

QWEN35 = Row(
    models="Qwen 3.5 and 3.6: 0.8B to 27B",
    attends=_STATES,
    write=partial(write_qwen3next, architecture="qwen35", n_experts=0),
    variants={
        "f32": {},
        "f16-tied": {"dtype": "f16", "tied": True},
        "q8_0": {"dtype": "q8_0"},
        "predicting": {"n_predicting": 1, "kinds": "dda"},
        "delta-net-last": {"kinds": "dad", "stated": "list"},
        "cache-q8_0": {},
    },
    can_shift=False,
    is_recurrent=True,
)

QWEN35_DIALECT = Row(
    models="files of other programs",
    attends=_STATES,
    write=write_qwen35_dialect,
    norm=QWEN35.write,
    variants={"f32": {}},
    can_shift=False,
    is_recurrent=True,
)

QWEN35_INTERLEAVED = Row(
    models="files of other programs",
    attends=_STATES,
    write=write_interleaved,
    norm=write_qwen3next,
    variants={"f32": {}, "packed": {"packed": True}},
    can_shift=False,
    is_recurrent=True,
)

# The engines compute a prefill to the same bits; steps of three sequences are cut differently, which with weights in F16
# changes the router's log-probabilities by up to 7e-3. Of 28784 choices, in 200 files, one falls otherwise: two experts are
# 1.3e-3 apart there, the engines 1.7e-3. The contract's file has no such tie.
QWEN35_MOE = Row(
    models="Qwen 3.5 and 3.6: 35B-A3B and larger",
    attends=_STATES,
    write=partial(write_qwen3next, architecture="qwen35moe"),
    variants={"f32": {}, "f16": {"dtype": "f16"}, "q8_0": {"dtype": "q8_0"}},
    can_shift=False,
    is_recurrent=True,
)
