"""Files of the families on Llama's stack, and of Gemma's, whose numbers, shapes or types do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from puna.errors import FileFormatError, MissingTensors, UnsupportedModel
from puna.gguf.types import TensorType
from tests.models.dialect import Translation
from tests.models.table import ENCODERS, ROWS
from tests.puna_engine import PunaEngine

NAN, INF = float("nan"), float("inf")
YARN = {"rope__scaling__type": "yarn", "rope__scaling__factor": 16.0}


@pytest.mark.parametrize(
    ("row", "changed", "message"),
    [
        ("qwen3moe", {"expert_count": 4}, r"ffn_gate_exps.weight has the shape \[256, 256, 8\].*\[256, 256, 4\]"),
        ("qwen3moe", {"expert_count": 16}, r"ffn_gate_exps.weight has the shape \[256, 256, 8\].*\[256, 256, 16\]"),
        ("qwen3moe", {"expert_used_count": 9}, "9 of 8 experts"),
        ("qwen2moe", {"expert_count": 0, "expert_used_count": 0}, "qwen2moe.expert_count does not say how many"),
        ("granite", {"logit_scale": NAN}, "granite.logit_scale nan"),
        ("granite", {"residual_scale": INF}, "granite.residual_scale inf"),
        ("granite", {"attention__scale": NAN}, "granite.attention.scale nan"),
        ("mistral3", {"attention__temperature_scale": INF}, "attention.temperature_scale inf"),
        ("mistral3", {"attention__temperature_scale": 0.1, "rope__scaling__original_context_length": 0}, "for contexts of 0"),
        ("mistral3", {**YARN, "rope__scaling__yarn_log_multiplier": -100.0}, "yarn_log_multiplier -100"),
        ("phi3", {"rope__dimension_count": 66}, "rope.dimension_count 66 does not fit"),
        ("qwen2", {"attention__head_count_kv": 3}, "4 heads cannot share 3"),
        ("qwen2", {"attention__head_count": [4, 4, 0]}, r"attn_q.weight has the shape"),
        ("qwen3", {"attention__key_length": 64}, r"attn_q.weight has the shape \[256, 384\].*\[256, 256\]"),
        ("starcoder2", {"attention__layer_norm_epsilon": -1.0}, "epsilon -1"),
    ],
)
def test_numbers_that_make_no_model(tmp_path: Path, row: str, changed: dict[str, Any], message: str) -> None:
    path = ROWS[row].write(tmp_path / "m.gguf", **changed)
    with pytest.raises(FileFormatError, match=message):
        PunaEngine(path)


@pytest.mark.parametrize(
    "row", ["gemma2", "gemma3", "granitemoe", "phi3", "qwen2moe", "qwen3", "starcoder2", "gemma-embedding", "bert"]
)
def test_every_tensor_of_another_shape_is_refused(tmp_path: Path, row: str) -> None:
    whole = (ROWS | ENCODERS)[row].write(tmp_path / "whole.gguf", n_layers=1)
    architecture = row
    for name, (shape, _, _) in Translation(whole).tensors.items():
        if name.startswith(("token_embd.weight", "output.weight", "position_embd", "token_types")):
            continue  # any number of rows will do
        file = Translation(whole)
        other = (*shape[:-1], shape[-1] + 32)
        file.tensors[name] = other, TensorType.F32, bytes(TensorType.F32.n_bytes(_count(other)))
        with pytest.raises(FileFormatError, match=r"has the shape"):
            PunaEngine(file.save(tmp_path / "changed.gguf", architecture), n_ctx=64)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


@pytest.mark.parametrize("row", ["gemma", "mistral3", "qwen2"])
def test_missing_tensors_are_named_together(tmp_path: Path, row: str) -> None:
    file = Translation(ROWS[row].write(tmp_path / "whole.gguf"))
    gone = ["blk.0.attn_k.weight", "blk.2.ffn_norm.weight", "output_norm.weight"]
    for name in gone:
        del file.tensors[name]
    with pytest.raises(MissingTensors) as caught:
        PunaEngine(file.save(tmp_path / "m.gguf", row))
    assert all(name in str(caught.value) for name in gone)


def test_segments_of_another_type_are_refused(tmp_path: Path) -> None:
    file = Translation(ENCODERS["bert"].write(tmp_path / "whole.gguf"))
    shape, _, data = file.tensors["token_types.weight"]
    file.tensors["token_types.weight"] = shape, TensorType.F16, data[: len(data) // 2]
    with pytest.raises(UnsupportedModel, match=r"token_types\.weight must be of type F32"):
        PunaEngine(file.save(tmp_path / "m.gguf", "bert"))
