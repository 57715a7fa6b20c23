from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from puna.gguf.types import ValueType
from tests.models.dialect import Translation
from tests.models.prenorm import WIDE_HEADS, write_prenorm
from tests.models.row import Row

YARN = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 4.0,
    "rope__scaling__original_context_length": 256,
}
YARN_NOTE = "libllama multiplies shifted keys by YaRN's magnitude a second time"

QWEN2 = Row(
    models="Qwen 2 and 2.5, QwQ, DeepSeek-R1 distilled into Qwen",
    attends="everything before",
    write=partial(write_prenorm, architecture="qwen2", biases=("attn_q", "attn_k", "attn_v")),
    variants={
        "f32": {},
        "f16": {"dtype": "f16"},
        "q8_0": {"dtype": "q8_0"},
        "q4_K": {"dtype": "q4_K"},
        "tied": {"tied": True, "rope__freq_base": 1e6},
        "no-biases": {"biases": ()},
        "yarn": YARN,
        "cache-q8_0": {},
    },
    shifted_alone={"yarn": [{}]},
    note=YARN_NOTE,
)

_QWEN3: dict[str, Any] = {"architecture": "qwen3", "query_key_norms": True, "head_dim": 96}

QWEN3 = Row(
    models="Qwen 3 0.6B to 32B",
    attends="everything before",
    write=partial(write_prenorm, **_QWEN3),
    variants={
        "f32": {},
        "f16": {"dtype": "f16"},
        "q8_0": {"dtype": "q8_0"},
        "tied": {"tied": True, "rope__freq_base": 1e6},
        "yarn": YARN,
    },
    worst=WIDE_HEADS,
    shifted_alone={"yarn": [{}]},
    note=YARN_NOTE,
)

QWEN3_EMBEDDER = Row(
    models="Qwen3-Embedding",
    attends="everything before",
    write=partial(write_prenorm, tied=True, spm=True, **_QWEN3),
    variants={"last": {"pooling_type": 3}, "mean": {"pooling_type": 1}},
)

AXES_NOTE = "libllama moves no positions with axes"

_SECTIONS: dict[str, Any] = {"rope__dimension_sections": [8, 12, 12, 0]}
_QWEN2VL: dict[str, Any] = {"biases": ("attn_q", "attn_k", "attn_v"), **_SECTIONS}

QWEN2VL = Row(
    models="Qwen 2-VL and 2.5-VL 2B to 72B",
    attends="everything before",
    write=partial(write_prenorm, architecture="qwen2vl", **_QWEN2VL),
    variants={
        "f32": {},
        "f16": {"dtype": "f16"},
        "q8_0": {"dtype": "q8_0"},
        "tied": {"tied": True, "rope__freq_base": 1e6},
        "sections-of-all-axes": {"rope__dimension_sections": [8, 8, 8, 8]},
        "cache-q8_0": {},
    },
    # With the same weights libllama's qwen2 gives other digits than its qwen2vl; Puna's two and libllama's qwen2 agree.
    worst=3e-3,
    shifted_alone={name: [{}] for name in ("f32", "f16", "q8_0", "tied", "sections-of-all-axes", "cache-q8_0")},
    note=AXES_NOTE,
)


def write_qwen25vl(path: Path, **options: Any) -> Path:
    """Sections of three numbers under another name."""
    file = Translation(QWEN2VL.write(path.with_suffix(".norm"), **options))
    sections, _ = file.values.pop("rope.dimension_sections")
    file.values["rope.mrope_section"] = (sections[:3], ValueType.INT32)
    return file.save(path, "qwen25vl")


QWEN25VL = Row(
    models="files of other programs",
    attends="everything before",
    write=write_qwen25vl,
    norm=QWEN2VL.write,
    variants={"f32": {}},
    worst=QWEN2VL.worst,
    shifted_alone={"f32": [{}]},
    note=AXES_NOTE,
)

_EXPERTS: dict[str, Any] = {"n_experts": 8}

QWEN2MOE = Row(
    models="Qwen1.5-MoE A2.7B, Qwen 2 57B-A14B",
    attends="everything before",
    write=partial(
        write_prenorm,
        architecture="qwen2moe",
        biases=("attn_q", "attn_k", "attn_v"),
        n_ff_shared=512,
        shared_gate=True,
        **_EXPERTS,
    ),
    variants={
        "f32": {},
        "f16": {"dtype": "f16"},
        "q8_0": {"dtype": "q8_0"},
        "one-of-4": {"n_experts": 4, "n_used": 1},
    },
)

QWEN3MOE = Row(
    models="Qwen 3 30B-A3B, 235B-A22B, Qwen3-Coder",
    attends="everything before",
    write=partial(write_prenorm, **{**_QWEN3, **_EXPERTS, "architecture": "qwen3moe"}),
    variants={
        "f32": {},
        "f16": {"dtype": "f16"},
        "q4_K": {"dtype": "q4_K", "head_dim": 64},
        "many-experts": {"n_experts": 32, "n_used": 8, "n_ff_expert": 64},
        # With 8 experts one row of one step is a tie between two of them, which the engines break differently.
        "tied": {"tied": True, "n_experts": 12},
    },
    worst=WIDE_HEADS,
)

_ONE_LAYER = [{"n_deepstack_layers": None}]
_QWEN3VL: dict[str, Any] = {**_QWEN3, "head_dim": 64, "rope__dimension_sections": [12, 10, 10, 0], "n_deepstack_layers": 2}

QWEN3VL = Row(
    models="Qwen 3-VL 2B to 32B",
    attends="everything before",
    write=partial(write_prenorm, **{**_QWEN3VL, "architecture": "qwen3vl"}),
    variants={
        "f32": {},
        "f16": {"dtype": "f16"},
        "q8_0": {"dtype": "q8_0"},
        "tied": {"tied": True, "rope__freq_base": 1e6},
        "wide-heads": {"head_dim": 96, "rope__dimension_sections": [16, 16, 16, 0]},
        "no-deepstack": {"n_deepstack_layers": None},
    },
    worst=WIDE_HEADS,
    shifted_alone={name: _ONE_LAYER for name in ("f32", "f16", "q8_0", "tied", "wide-heads", "no-deepstack")},
    note=AXES_NOTE,
)


def write_qwen3vl_dialect(path: Path, **options: Any) -> Path:
    """Sections of three numbers under another name, and the layers of the encoder that rows of images bring something from."""
    file = Translation(QWEN3VL.write(path.with_suffix(".norm"), **options))
    sections, _ = file.values.pop("rope.dimension_sections")
    file.values["mrope_sections"] = (sections[:3], ValueType.INT32)
    n_deepstack, _ = file.values.pop("n_deepstack_layers", (0, None))
    file.values["vision.deepstack_visual_indexes"] = ([3, 7][:n_deepstack], ValueType.INT32)
    return file.save(path, "qwen3vl")


QWEN3VL_DIALECT = Row(
    models="files of other programs",
    attends="everything before",
    write=write_qwen3vl_dialect,
    norm=QWEN3VL.write,
    variants={"f32": {}},
    shifted_alone={"f32": _ONE_LAYER},
    note=AXES_NOTE,
)

QWEN3VLMOE = Row(
    models="Qwen 3-VL 30B-A3B, 235B-A22B",
    attends="everything before",
    write=partial(write_prenorm, **{**_QWEN3VL, **_EXPERTS, "architecture": "qwen3vlmoe"}),
    variants={
        "f32": {},
        "f16": {"dtype": "f16"},
        "q4_K": {"dtype": "q4_K"},
        "many-experts": {"n_experts": 32, "n_used": 8, "n_ff_expert": 64},
    },
    worst=WIDE_HEADS,
    shifted_alone={name: _ONE_LAYER for name in ("f32", "f16", "q4_K", "many-experts")},
    note=AXES_NOTE,
)
