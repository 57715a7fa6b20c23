"""Files of families with windows, latents, experts or streams whose numbers, shapes or tensors do not fit."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from puna.errors import FileFormatError, MissingTensors, UnsupportedModel
from puna.gguf.types import TensorType
from tests.models.dialect import Translation
from tests.models.table import ROWS
from tests.puna_engine import PunaEngine

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("row", "changed", "message"),
    [
        ("gpt-oss", {"expert_count": None}, "gpt-oss.expert_count"),
        ("gpt-oss", {"expert_used_count": 9}, "9 of 8 experts"),
        ("gpt-oss", {"attention__sliding_window": -1}, "attention.sliding_window -1"),
        ("gpt-oss", {"attention__sliding_window_pattern": -1}, "gpt-oss.attention.sliding_window_pattern -1"),
        ("gpt-oss", {"attention__sliding_window_pattern": [True, False]}, "has 2 items for 4 layers"),
        ("gpt-oss", {"rope__freq_base_swa": NAN}, "rope.freq_base_swa nan"),
        ("command-r", {"n_layers": 3, "logit_scale": INF}, "command-r.logit_scale inf"),
        ("cohere2", {"n_layers": 5, "attention__sliding_window": 0}, "cohere2.attention.sliding_window is missing or 0"),
        ("glm4moe", {"nextn_predict_layers": 4}, "0 of 4 layers"),
        ("glm4moe", {"nextn_predict_layers": -1}, "5 of 4 layers"),
        ("glm4moe", {"expert_gating_func": 9}, "expert_gating_func 9"),
        ("glm4moe", {"expert_weights_scale": NAN}, "expert_weights_scale nan"),
        ("deepseek2", {"expert_group_count": 3, "expert_group_used_count": 1}, "3 of 8 experts from 1 of 3 groups"),
        ("deepseek2", {"expert_group_count": 8, "expert_group_used_count": 2}, "3 of 8 experts from 2 of 8 groups"),
        ("deepseek2", {"attention__kv_lora_rank": 0}, "latents of 96 and 0 values"),
        ("deepseek2", {"attention__key_length_mla": 32}, "heads of 32 and 96, 32 rotated"),
        ("deepseek2", {"attention__key_length_mla": 96}, r"attn_q_b.weight has the shape \[96, 256\].*\[96, 384\]"),
        ("deepseek2", {"attention__value_length_mla": 0}, "have no keys of their own"),
        ("deepseek2", {"rope__scaling__yarn_log_multiplier": NAN}, "yarn_log_multiplier nan"),
        ("deepseek2", {"attention__temperature_scale": 0.1, "attention__temperature_length": 0}, "for a length of 0"),
        ("deepseek2", {"cut": False, "attention__head_count_kv": 2}, "have no keys of their own"),
        ("llama4", {"attention__chunk_size": 0}, "llama4.attention.chunk_size 0"),
        ("gemma3n", {"attention__shared_kv_layers": 21}, "shared_kv_layers 21 leaves"),
        ("gemma3n", {"attention__shared_kv_layers": -1}, "shared_kv_layers -1 leaves"),
        ("gemma3n", {"altup__active_idx": 1}, "gemma3n.altup.active_idx 1"),
        ("gemma3n", {"altup__num_inputs": 5}, r"has the shape \[128, 4\]"),
        ("gemma3n", {"activation_sparsity_scale": [1.0, 2.0]}, "activation_sparsity_scale does not fit 22 layers"),
        ("gemma3n", {"final_logit_softcapping": -1.0}, "final_logit_softcapping: a cap of -1"),
        ("gemma4", {"attention__value_length_swa": 32}, "heads of 128 and 64 values cannot mix"),
        ("gemma4", {"rope__dimension_count_swa": 128}, "cannot rotate 128 of 64"),
        ("gemma4", {"attention__head_count_kv": [2, 2, 0, 2, 2, 1]}, "heads cannot share"),
        ("gemma4", {"embedding_length_per_layer_input": -1}, "embedding_length_per_layer_input -1"),
        ("gemma4", {"attention__shared_kv_layers": 6}, "shared_kv_layers 6 leaves"),
    ],
)
def test_numbers_that_make_no_model(tmp_path: Path, row: str, changed: dict[str, Any], message: str) -> None:
    path = ROWS[row].write(tmp_path / "m.gguf", **changed)
    with pytest.raises(FileFormatError, match=message):
        PunaEngine(path)


def test_a_llama4_without_chunks_is_not_supported(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="a llama4 without chunks"):
        PunaEngine(ROWS["llama4"].write(tmp_path / "m.gguf", attention__sliding_window=0))


SHAPES: dict[str, dict[str, Any]] = {
    "gpt-oss": {"n_layers": 1},
    "gptoss": {"n_layers": 1},
    "olmo2": {"n_layers": 1},
    "command-r": {"n_layers": 64, "n_embd": 64},
    "cohere2": {"n_layers": 1},
    "glm4": {"n_layers": 1},
    "glm4moe": {"n_layers": 1, "n_dense": 0, "norms": True},
    "deepseek2": {"n_layers": 1, "n_dense": 0},
    "deepseek2 whole": {"n_layers": 1, "cut": False, "q_rank": 0, "packed": True},
    "llama4": {"n_layers": 1, "rope_freqs": True},
    "gemma3n": {"n_layers": 1},
    "gemma4": {"n_layers": 3, "n_shared": 0, "experts": "packed"},
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_tensor_of_another_shape_or_type_is_refused(tmp_path: Path, name: str) -> None:
    """In the first layer and the third, which differs in Gemma 4; the others are alike."""
    row = name.partition(" ")[0]
    whole = Translation(ROWS[row].write(tmp_path / "whole.gguf", **SHAPES[name]))
    for tensor, (shape, kind, data) in list(whole.tensors.items()):
        if tensor in ("token_embd.weight", "output.weight", "per_layer_token_embd.weight"):
            continue  # a table may have any number of rows, if all have as many
        if re.match(r"blk\.(1|\d\d+|[3-9])\.", tensor):
            continue
        other = (*shape[:-1], shape[-1] + 32)
        whole.tensors[tensor] = other, TensorType.F32, bytes(TensorType.F32.n_bytes(math.prod(other)))
        with pytest.raises(FileFormatError, match=r"has the shape"):
            PunaEngine(whole.save(tmp_path / "changed.gguf", row), n_ctx=64)
        if len(shape) == 1:
            whole.tensors[tensor] = shape, TensorType.F16, bytes(TensorType.F16.n_bytes(math.prod(shape)))
            with pytest.raises(FileFormatError, match=r"F16"):
                PunaEngine(whole.save(tmp_path / "changed.gguf", row), n_ctx=64)
        whole.tensors[tensor] = shape, kind, data


@pytest.mark.parametrize(
    ("row", "gone"),
    [
        ("gpt-oss", "blk.1.attn_sinks.weight"),
        ("glm4moe", "blk.2.ffn_down_exps.weight"),
        ("deepseek2", "blk.3.attn_kv_a_norm.weight"),
        ("gemma3n", "blk.5.altup_router.weight"),
        ("gemma4", "blk.1.attn_k.weight"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, row: str, gone: str) -> None:
    file = Translation(ROWS[row].write(tmp_path / "whole.gguf"))
    del file.tensors[gone]
    with pytest.raises(MissingTensors, match=gone):
        PunaEngine(file.save(tmp_path / "m.gguf", row))


def test_the_other_form_of_latents_is_refused_in_a_single_layer(tmp_path: Path) -> None:
    whole = Translation(ROWS["deepseek2"].write(tmp_path / "whole.gguf", cut=False))
    file = Translation(ROWS["deepseek2"].write(tmp_path / "cut.gguf"))
    for part in ("k_b", "v_b"):
        del file.tensors[f"blk.2.attn_{part}.weight"]
    file.tensors["blk.2.attn_kv_b.weight"] = whole.tensors["blk.2.attn_kv_b.weight"]
    with pytest.raises(FileFormatError, match=r"blk\.2\.attn_kv_b\.weight has the shape"):
        PunaEngine(file.save(tmp_path / "m.gguf", "deepseek2"))
