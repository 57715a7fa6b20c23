"""Adapters as the PEFT library stores them that cannot be converted, each named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from puna.errors import FileFormatError, UnsupportedModel
from puna.gguf.convert.adapter import convert
from puna.gguf.convert.checkpoint import Checkpoint
from puna.gguf.lora import read_lora
from puna.gguf.reader import GGUFFile
from tests.hf import write_safetensors
from tests.models.table import ROWS
from tests.tiny import write_llama

CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none"}
QUERY = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


def pair(n_in: int = 32, n_out: int = 32, rank: int = 2) -> dict[str, npt.NDArray[Any]]:
    return {f"{QUERY}A.weight": np.ones((rank, n_in), np.float32), f"{QUERY}B.weight": np.ones((n_out, rank), np.float32)}


def converted(folder: Path, tensors: dict[str, npt.NDArray[Any]], config: Any = CONFIG, model: Path | None = None) -> None:
    folder.mkdir(exist_ok=True)
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    (folder / "adapter_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    model = model or write_llama(folder / "m.gguf", n_layers=1, n_embd=32, n_heads=2, n_kv_heads=1, n_ff=64)
    with GGUFFile.open(model) as base:
        convert(Checkpoint.of_folder(folder), base, folder / "out.gguf")
        with GGUFFile.open(folder / "out.gguf") as adapter:
            assert len(read_lora(adapter, base)) == len(tensors) // 2


@pytest.mark.parametrize(
    ("config", "error", "says"),
    [
        ("{", FileFormatError, "adapter_config.json: "),
        ({"r": 2}, FileFormatError, "adapter_config.json: .*lora_alpha"),
        (CONFIG | {"r": 0}, FileFormatError, "r is 0"),
        (CONFIG | {"lora_alpha": 1e200}, FileFormatError, "lora_alpha 1e"),
        (CONFIG | {"peft_type": "IA3"}, UnsupportedModel, "only plain LoRA"),
        (CONFIG | {"use_dora": True}, UnsupportedModel, "only plain LoRA"),
        (CONFIG | {"alpha_pattern": {"q_proj": 3.0}}, UnsupportedModel, "one alpha"),
        (CONFIG | {"use_rslora": True, "rank_pattern": {"q_proj": 3}}, UnsupportedModel, "several ranks"),
    ],
)
def test_a_configuration_that_cannot_be_converted(config: Any, error: type[Exception], says: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=says):
        converted(tmp_path, pair(), config)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (
            {"base_model.model.model.layers.0.self_attn.rotary.lora_A.weight": np.ones((2, 32), np.float32)},
            "rotary.lora_A.weight is no",
        ),
        ({"base_model.model.lm_head.weight": np.ones((2, 32), np.float32)}, "lm_head.weight is no part of an adapter"),
        ({f"{QUERY}A.weight": np.ones(32, np.float32)}, r"lora_A.weight has the shape \[32\]"),
        ({f"{QUERY}A.weight": np.ones((0, 32), np.float32)}, r"has the shape \[0, 32\]"),
        ({f"{QUERY}A.weight": np.ones((2, 32), np.int64)}, "type I64, not of floating point"),
        (pair(n_out=31), "31 rows, which are no 2 heads"),
        (pair(n_in=16), r"'blk.0.attn_q.weight.lora_a' has the shape \[16, 2\]"),
        ({f"{QUERY}A.weight": np.ones((2, 32), np.float32)}, "lora_b' is missing from its pair"),
        ({**pair(), f"{QUERY}A.default.weight": np.ones((2, 32), np.float32)}, "two tensors for the same part"),
        ({}, "no tensors in safetensors files"),
    ],
)
def test_tensors_that_do_not_fit(tensors: dict[str, npt.NDArray[Any]], says: str, tmp_path: Path) -> None:
    with pytest.raises((FileFormatError, UnsupportedModel), match=says):
        converted(tmp_path, tensors)


def test_models_whose_names_are_not_known(tmp_path: Path) -> None:
    model = ROWS["starcoder2"].write(tmp_path / "s.gguf")
    with pytest.raises(UnsupportedModel, match=r"for llama, .*, not for 'starcoder2'"):
        converted(tmp_path / "a", pair(), model=model)


def test_names_with_and_without_the_library_s_own_parts(tmp_path: Path) -> None:
    names = (QUERY, QUERY.removeprefix("base_model.model."))
    for i, name in enumerate(names):
        for suffix in (".weight", ".default.weight"):
            tensors = {f"{name}{part}{suffix}": values for part, values in zip("AB", pair().values(), strict=True)}
            converted(tmp_path / f"{i}{suffix}", tensors)
