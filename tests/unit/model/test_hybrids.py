"""Files of models with recurrent states that would end the process inside the tensor library: refused, and why is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from puna.errors import FileFormatError, MissingTensors
from puna.gguf.types import TensorType
from puna.kvcache.cache import Limits
from puna.kvcache.layered import LayeredCache
from puna.kvcache.recurrent import CHECKPOINT_BYTES
from puna.ml.ggml.backend import GGMLBackend
from puna.ml.tensor import DType
from puna.model.registry import open_model
from tests.models.dialect import Translation
from tests.models.lfm2 import write_lfm2
from tests.models.mamba import write_falcon_h1, write_granite_hybrid, write_mamba2, write_nemotron_h
from tests.models.qwen3next import QWEN35, write_qwen3next


def write_qwen35(path: Path, **metadata: Any) -> Path:
    return QWEN35.write(path, **metadata)


ARCHITECTURES: dict[Callable[..., Path], str] = {
    write_lfm2: "lfm2",
    write_qwen3next: "qwen3next",
    write_qwen35: "qwen35",
    write_mamba2: "mamba2",
    write_nemotron_h: "nemotron_h",
    write_granite_hybrid: "granitehybrid",
    write_falcon_h1: "falcon-h1",
}


def opens(path: Path) -> None:
    backend = GGMLBackend(path, n_threads=1)
    try:
        model = open_model(backend.file, backend, 512)
        model.make_cache(backend, Limits(2, 512, 64), DType.F16)
    finally:
        backend.close()


def refused(path: Path, *words: str) -> None:
    with pytest.raises(FileFormatError) as error:
        opens(path)
    assert all(word in str(error.value) for word in (str(path), *words)), error.value


@pytest.mark.parametrize(
    ("write", "key", "value"),
    [
        (write_lfm2, "shortconv.l_cache", 1),
        (write_lfm2, "shortconv.l_cache", 1 << 40),
        (write_lfm2, "shortconv.l_cache", 4),
        (write_lfm2, "attention.sliding_window", -1),
        (write_lfm2, "attention.head_count_kv", 2),
        (write_qwen3next, "ssm.conv_kernel", 1),
        (write_qwen3next, "ssm.conv_kernel", 5),
        (write_qwen3next, "ssm.group_count", 3),
        (write_qwen3next, "ssm.group_count", 0),
        (write_qwen3next, "ssm.state_size", 64),
        (write_qwen3next, "ssm.inner_size", 1 << 30),
        (write_qwen3next, "ssm.time_step_rank", 8),
        (write_qwen3next, "attention.value_length", 32),
        (write_qwen35, "rope.dimension_sections", [4, 4, 4]),
        (write_qwen35, "rope.dimension_sections", [6, 5]),
        (write_qwen35, "rope.dimension_sections", [6, 5, -5]),
        (write_mamba2, "ssm.group_count", 3),
        (write_mamba2, "ssm.group_count", 16),
        (write_mamba2, "ssm.time_step_rank", 7),
        (write_mamba2, "ssm.time_step_rank", 16),
        (write_mamba2, "ssm.state_size", 0),
        (write_mamba2, "ssm.conv_kernel", 3),
        (write_mamba2, "block_count", 0),
        (write_nemotron_h, "ssm.inner_size", 256),
        (write_granite_hybrid, "residual_scale", float("nan")),
        (write_falcon_h1, "ssm.state_size", 16),
    ],
    ids=lambda item: getattr(getattr(item, "func", item), "__name__", str(item)),  # a partial's text has an address in it
)
def test_numbers_that_make_no_layer(tmp_path: Path, write: Callable[..., Path], key: str, value: Any) -> None:
    file = Translation(write(tmp_path / "norm.gguf"))
    with_heads = key == "attention.head_count_kv"
    file.values[key] = (value, None)
    path = file.save(tmp_path / "m.gguf", ARCHITECTURES[write])
    if with_heads:
        opens(path)  # the tensors say which layers attend
    else:
        refused(path)


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (write_lfm2, "blk.0.shortconv.conv.weight"),
        (write_qwen3next, "blk.1.ssm_conv1d.weight"),
        (write_mamba2, "blk.2.ssm_a"),
        (write_mamba2, "blk.0.attn_norm.weight"),
    ],
)
def test_operands_that_are_not_f32(tmp_path: Path, write: Callable[..., Path], name: str) -> None:
    file = Translation(write(tmp_path / "norm.gguf"))
    shape, _, data = file.tensors[name]
    file.tensors[name] = shape, TensorType.F16, data[: len(data) // 2]
    refused(file.save(tmp_path / "m.gguf", ARCHITECTURES[write]), name, "F16")


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (write_lfm2, "blk.0.shortconv.in_proj.weight"),
        (write_qwen3next, "blk.0.ssm_out.weight"),
        (write_qwen3next, "blk.0.ssm_norm.weight"),
        (write_qwen3next, "blk.3.attn_q.weight"),
        (write_mamba2, "blk.0.ssm_d"),
        (write_falcon_h1, "blk.1.ffn_norm"),
    ],
)
def test_tensors_of_another_shape_or_none(tmp_path: Path, write: Callable[..., Path], name: str) -> None:
    file = Translation(write(tmp_path / "norm.gguf"))
    tensor = file.tensors.pop(name)
    with pytest.raises(MissingTensors, match=name):
        opens(file.save(tmp_path / "without.gguf", ARCHITECTURES[write]))
    (first, *rest), kind, data = tensor
    file.tensors[name] = (first, *rest, 2) if rest else (2 * first,), kind, 2 * data
    refused(file.save(tmp_path / "other.gguf", ARCHITECTURES[write]), name)


def test_latents_without_their_matrices(tmp_path: Path) -> None:
    file = Translation(write_nemotron_h(tmp_path / "norm.gguf", n_experts=8, latent=128))
    for name in [name for name in file.tensors if "latent" in name]:
        del file.tensors[name]
    refused(file.save(tmp_path / "m.gguf", "nemotron_h_moe"), "ffn_up_exps")


def test_a_state_of_each_sequence_is_stored_and_layers_without_one_store_nothing(tmp_path: Path) -> None:
    backend = GGMLBackend(write_qwen3next(tmp_path / "m.gguf"), n_threads=1)
    cache = open_model(backend.file, backend, 512).make_cache(backend, Limits(2, 512, 64), DType.F16)
    assert isinstance(cache, LayeredCache)
    backend.measure()
    (device,) = backend.memory([0]).devices
    n_values = 3 * 8 * 32 + 4 * 32 * 32  # of one sequence and layer: what the convolution sees, and four memories
    n_slots = 1 + 2 * (2 + 8)
    assert 100 * 4 * n_values < CHECKPOINT_BYTES
    assert device.cache[:5] == [4 * n_values * n_slots] * 3 + [2 * 2 * 128 * 1024, 0]
    backend.close()
