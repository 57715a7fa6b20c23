"""Models with Mamba-2 layers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from puna.gguf.types import TensorType
from tests.models.row import Row, TinyFile
from tests.tiny import RandomWeights

WIDTH, D_STATE, N_HEADS = 4, 32, 8


class MambaFile(TinyFile):
    """*inner* channels in 8 heads, whose b and c are shared within *n_groups*."""

    def __init__(self, architecture: str, *, inner: int = 512, n_groups: int = 2, **options: Any) -> None:
        stated = {
            "ssm__conv_kernel": WIDTH,
            "ssm__inner_size": inner,
            "ssm__state_size": D_STATE,
            "ssm__time_step_rank": N_HEADS,
            "ssm__group_count": n_groups,
        }
        super().__init__(architecture, **{**stated, **options})
        self.inner, self.n_groups = inner, n_groups
        self.plain = RandomWeights(self.writer, 7, TensorType.F32)

    def mamba(self, prefix: str, *, norm: bool = True) -> None:
        inner, n_groups = self.inner, self.n_groups
        channels = inner + 2 * n_groups * D_STATE
        self.matrices(prefix, {"ssm_in": (inner + channels + N_HEADS, 256)})
        self.plain.matrix(f"{prefix}.ssm_conv1d.weight", channels, WIDTH)
        self.weights.bias(f"{prefix}.ssm_conv1d.bias", channels)  # libllama crashes without one
        self.weights.bias(f"{prefix}.ssm_dt.bias", N_HEADS)
        # Slow enough that a state remembers some hundred tokens.
        decay = -self.weights.random.uniform(0.01, 0.3, (N_HEADS, 1))
        self.writer.add_tensor(f"{prefix}.ssm_a", decay.astype(np.float32))
        self.writer.add_tensor(f"{prefix}.ssm_d", self.weights.random.uniform(0.5, 1.5, (N_HEADS, 1)).astype(np.float32))
        if norm:
            scale = 1 + 0.3 * self.weights.random.standard_normal((n_groups, inner // n_groups))
            self.writer.add_tensor(f"{prefix}.ssm_norm.weight", scale.astype(np.float32))
        self.matrices(prefix, {"ssm_out": (256, inner)}, gain=2.0 if norm else 0.3)

    def attention(self, prefix: str, *, biases: bool = False) -> None:
        self.matrices(prefix, {"attn_q": (256, 256), "attn_k": (128, 256), "attn_v": (128, 256)}, biases=biases)
        self.matrices(prefix, {"attn_output": (256, 256)}, gain=2.0, biases=biases)

    def swiglu(self, prefix: str) -> None:
        self.matrices(prefix, {"ffn_gate": (512, 256), "ffn_up": (512, 256)})
        self.matrices(prefix, {"ffn_down": (256, 512)}, gain=3.0)


def write_mamba2(path: Path, *, tied: bool = False, **options: Any) -> Path:
    stated = {"n_heads": 0, "n_kv_heads": None, "feed_forward_length": 0, "rope__freq_base": None, **options}
    file = MambaFile("mamba2", n_layers=3, **stated)
    file.ends(tied=tied)
    for i in range(3):
        file.norms(f"blk.{i}", "attn_norm")
        file.mamba(f"blk.{i}")
    return file.save(path)


def write_nemotron_h(
    path: Path,
    *,
    kinds: str = "mfam",
    n_experts: int = 0,
    latent: int = 0,
    biases: bool = False,
    **options: Any,
) -> Path:
    """*kinds* of the layers: m is Mamba-2, a attention, f an MLP or experts."""
    stated: dict[str, Any] = {
        "n_kv_heads": [2 if kind == "a" else 0 for kind in kinds],
        "feed_forward_length": [512 if kind == "f" else 0 for kind in kinds],
        "attention__layer_norm_epsilon": 1e-5,
    }
    if n_experts:
        experts = {"expert_count": n_experts, "expert_used_count": 2, "expert_feed_forward_length": 256, "expert_shared_count": 1}
        stated |= {**experts, "expert_shared_feed_forward_length": 256, "expert_weights_norm": True, "expert_weights_scale": 2.5}
    if latent:
        stated["moe_latent_size"] = latent
    file = MambaFile("nemotron_h_moe" if n_experts else "nemotron_h", n_layers=len(kinds), **{**stated, **options})
    file.ends()
    for i, kind in enumerate(kinds):
        prefix = f"blk.{i}"
        file.norms(prefix, "attn_norm")
        if kind == "m":
            file.mamba(prefix)
        elif kind == "a":
            file.attention(prefix, biases=biases)
        elif n_experts:
            _add_nemotron_experts(file, prefix, n_experts, latent)
        else:
            file.matrices(prefix, {"ffn_up": (512, 256)}, biases=biases)
            file.matrices(prefix, {"ffn_down": (256, 512)}, biases=biases)
    return file.save(path)


def _add_nemotron_experts(file: MambaFile, prefix: str, n_experts: int, latent: int) -> None:
    file.plain.matrix(f"{prefix}.ffn_gate_inp.weight", n_experts, 256, std=2.0 / 16)
    file.weights.bias(f"{prefix}.exp_probs_b.bias", n_experts)
    width = latent or 256
    file.weights.stack(f"{prefix}.ffn_up_exps.weight", n_experts, 256, width)
    file.weights.stack(f"{prefix}.ffn_down_exps.weight", n_experts, width, 256)
    file.matrices(prefix, {"ffn_up_shexp": (256, 256), "ffn_down_shexp": (256, 256)})
    if latent:
        file.matrices(prefix, {"ffn_latent_down": (latent, 256), "ffn_latent_up": (256, latent)})


def write_granite_hybrid(
    path: Path, *, kinds: str = "mam", n_experts: int = 0, shared: bool = False, tied: bool = False, **options: Any
) -> Path:
    stated: dict[str, Any] = {"n_kv_heads": [2 if kind == "a" else 0 for kind in kinds]}
    if n_experts:
        stated |= {"expert_count": n_experts, "expert_used_count": 2}
        stated |= {"expert_shared_feed_forward_length": 256} if shared else {}
    file = MambaFile("granitehybrid", n_layers=len(kinds), **{**stated, **options})
    file.ends(tied=tied)
    for i, kind in enumerate(kinds):
        prefix = f"blk.{i}"
        file.norms(prefix, "attn_norm", "ffn_norm")
        if kind == "m":
            file.mamba(prefix)
        else:
            file.attention(prefix)
        if not n_experts:
            file.swiglu(prefix)
            continue
        file.experts(prefix, n_experts=n_experts, n_ff=512)
        if shared:
            file.matrices(prefix, {"ffn_gate_shexp": (256, 256), "ffn_up_shexp": (256, 256)})
            file.matrices(prefix, {"ffn_down_shexp": (256, 256)}, gain=3.0)
    return file.save(path)


def write_falcon_h1(path: Path, *, norm: bool = False, **options: Any) -> Path:
    file = MambaFile("falcon-h1", n_layers=3, **{"attention__key_length": 64, "attention__value_length": 64, **options})
    file.ends()
    for i in range(3):
        prefix = f"blk.{i}"
        file.norms(prefix, "attn_norm")
        file.writer.add_tensor(f"{prefix}.ffn_norm", (1 + 0.1 * file.weights.random.standard_normal(256)).astype(np.float32))
        file.mamba(prefix, norm=norm)
        file.attention(prefix)
        file.swiglu(prefix)
    return file.save(path)


MAMBA2 = Row(
    models="Mamba-2 130M to 2.7B, Mamba-Codestral",
    attends="a recurrent state",
    write=write_mamba2,
    variants={
        "f32": {},
        "f16": {"dtype": "f16"},
        "q8_0": {"dtype": "q8_0"},
        "one-group-tied": {"n_groups": 1, "tied": True},
    },
    can_shift=False,
    is_recurrent=True,
)

NEMOTRON_H = Row(
    models="Nemotron-H 4B to 56B, Nemotron Nano 2",
    attends="a recurrent state; some everything",
    write=write_nemotron_h,
    variants={
        "f32": {},
        "f16-biases": {"dtype": "f16", "biases": True},
        "q8_0": {"dtype": "q8_0"},
        "mlp-last": {"kinds": "maf"},
        "attention-last": {"kinds": "fma"},
        "cache-q8_0": {},
    },
    can_shift=False,
    is_recurrent=True,
)

NEMOTRON_H_MOE = Row(
    models="Nemotron 3 Nano 30B-A3B",
    attends="a recurrent state; some everything",
    write=partial(write_nemotron_h, n_experts=8),
    variants={
        "f32": {},
        "q8_0": {"dtype": "q8_0"},
        "latent": {"latent": 128, "kinds": "amf"},
        "plain-weights": {"expert_weights_norm": None, "expert_weights_scale": None},
    },
    can_shift=False,
    is_recurrent=True,
)

GRANITE_HYBRID = Row(
    models="Granite 4.0 H Micro, Tiny, Small",
    attends="a recurrent state; some everything",
    write=write_granite_hybrid,
    variants={
        "f32": {"embedding_scale": 3.0, "residual_scale": 0.4, "logit_scale": 2.0, "attention__scale": 0.06},
        "f16-tied-no-positions": {"dtype": "f16", "tied": True, "rope__scaling__finetuned": False},
        "q8_0": {"dtype": "q8_0"},
        "experts": {"n_experts": 8, "residual_scale": 0.4},
        "shared-expert": {"n_experts": 8, "shared": True},
    },
    can_shift=False,
    is_recurrent=True,
)

FALCON_H1 = Row(
    models="Falcon-H1 0.5B to 34B",
    attends="everything, and a recurrent state",
    write=write_falcon_h1,
    variants={
        "f32": {},
        "f16-norm": {"dtype": "f16", "norm": True},
        "q8_0": {"dtype": "q8_0"},
        "cache-q8_0": {},
    },
    can_shift=False,
    is_recurrent=True,
)
