from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.models.dialect import Translation
from tests.models.row import WINDOW_AS_BATCH, Row, TinyFile

YARN = {"rope__scaling__type": "yarn", "rope__scaling__factor": 8.0, "rope__scaling__original_context_length": 256}


def write_olmo2(path: Path, *, n_layers: int = 5, n_kv_heads: int = 2, **options: Any) -> Path:
    file = TinyFile("olmo2", n_layers=n_layers, n_kv_heads=n_kv_heads, **options)
    file.ends()
    n_kv = 64 * n_kv_heads
    for i in range(n_layers):
        prefix = f"blk.{i}"
        file.norms(prefix, "post_attention_norm", "post_ffw_norm", "attn_q_norm")
        file.norms(prefix, "attn_k_norm", n=n_kv)
        file.matrices(prefix, {"attn_q": (256, 256), "attn_k": (n_kv, 256), "attn_v": (n_kv, 256), "attn_output": (256, 256)})
        file.matrices(prefix, {"ffn_gate": (512, 256), "ffn_up": (512, 256), "ffn_down": (256, 512)})
    return file.save(path)


OLMO2 = Row(
    models="OLMo 2 1B to 32B",
    attends="everything before",
    write=write_olmo2,
    variants={
        "f32": {"n_kv_heads": 4},
        "shared-keys": {},
        "f16": {"dtype": "f16"},
        "q8_0": {"dtype": "q8_0"},
        "rope-linear": {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
    },
)

WINDOW = {"attention__sliding_window": 48, **YARN}

OLMO3 = Row(
    models="OLMo 3 7B and 32B",
    attends="a window; every fourth everything",
    write=write_olmo2,
    variants={
        "f32": WINDOW,
        "f16": {"dtype": "f16", **WINDOW},
        "pattern": {"attention__sliding_window_pattern": [True, False, False, True, True], **WINDOW},
        "no-yarn": {"attention__sliding_window": 48},
        "no-flash-small-batches": WINDOW_AS_BATCH,
    },
    shifted_alone={variant: [{"attention__sliding_window_pattern": n} for n in (0, 1)] for variant in ("f32", "f16", "pattern")},
    note="libllama multiplies shifted keys by YaRN's magnitude, in windowed layers too",
)


def write_olmo3(path: Path, **options: Any) -> Path:
    """As the ancestor names it."""
    return Translation(write_olmo2(path, **options)).save(path, "olmo3")


OLMO3_DIALECT = Row(
    models="the same in files of the ancestor",
    attends=OLMO3.attends,
    write=write_olmo3,
    norm=write_olmo2,
    variants={"f32": WINDOW},
    shifted_alone={"f32": OLMO3.shifted_alone["f32"]},
    note=OLMO3.note,
)
