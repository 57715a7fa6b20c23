from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from puna.gguf.types import TensorType
from tests.models.row import Row, TinyFile
from tests.tiny import RandomWeights


def write_lfm2(
    path: Path,
    *,
    architecture: str = "lfm2",
    kinds: str = "ccaca",
    n_dense: int | None = None,
    packed: bool = False,
    width: int = 3,
    norm_name: str = "token_embd_norm",
    **options: Any,
) -> Path:
    """*kinds* of the layers: c is a convolution, a attention; experts follow after n_dense layers."""
    n_layers, n_experts = len(kinds), 8
    if n_dense is not None:
        experts = {"expert_count": n_experts, "expert_used_count": 2, "expert_feed_forward_length": 256}
        options = {"leading_dense_block_count": n_dense, "expert_gating_func": 2, **experts, **options}
    file = TinyFile(
        architecture,
        n_layers=n_layers,
        n_kv_heads=[2 if kind == "a" else 0 for kind in kinds],
        shortconv__l_cache=width,
        **options,
    )
    plain = RandomWeights(file.writer, 7, TensorType.F32)
    file.ends(tied=True, norm_name=norm_name)
    for i, kind in enumerate(kinds):
        prefix = f"blk.{i}"
        file.norms(prefix, "attn_norm", "ffn_norm")
        if kind == "c":
            plain.matrix(f"{prefix}.shortconv.conv.weight", 256, width)
            file.matrices(prefix, {"shortconv.in_proj": (768, 256), "shortconv.out_proj": (256, 256)})
        else:
            file.norms(prefix, "attn_q_norm", "attn_k_norm", n=64)
            separate = {"attn_q": (256, 256), "attn_k": (128, 256), "attn_v": (128, 256)}
            file.matrices(prefix, {"attn_qkv": (512, 256)} if packed else separate)
            file.matrices(prefix, {"attn_output": (256, 256)}, gain=2.0)
        if n_dense is None or i < n_dense:
            file.matrices(prefix, {"ffn_gate": (512, 256), "ffn_up": (512, 256)})
            file.matrices(prefix, {"ffn_down": (256, 512)}, gain=3.0)
        else:
            file.experts(prefix, n_experts=n_experts, n_ff=256)
            file.weights.bias(f"{prefix}.exp_probs_b.bias", n_experts)
    return file.save(path)


LFM2 = Row(
    models="LFM2 350M, 700M, 1.2B, 2.6B",
    attends="their last inputs; some everything",
    write=write_lfm2,
    variants={
        "f32": {},
        "f16-convolution-last": {"dtype": "f16", "kinds": "aacc"},
        "q8_0": {"dtype": "q8_0"},
        "q4_K": {"dtype": "q4_K"},
        "width-4-packed": {"width": 4, "packed": True, "kinds": "cac"},
        "window-50": {"attention__sliding_window": 50, "kinds": "cac"},
        "cache-q8_0": {},
    },
    can_shift=False,
    is_recurrent=True,
)

LFM2_DIALECT = Row(
    models="files with output_norm",
    attends=LFM2.attends,
    write=partial(write_lfm2, norm_name="output_norm"),
    norm=write_lfm2,
    variants={"f32": {}},
    can_shift=False,
    is_recurrent=True,
)

LFM2_MOE = Row(
    models="LFM2 8B-A1B",
    attends="their last inputs; some everything",
    write=partial(write_lfm2, architecture="lfm2moe", n_dense=1),
    variants={"f32": {}, "f16-all-experts": {"dtype": "f16", "n_dense": 0}, "q8_0": {"dtype": "q8_0"}},
    can_shift=False,
    is_recurrent=True,
)
