"""Numbers that checkpoints keep in fewer than 16 bits, and what of them is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from puna.errors import FileFormatError, UnsupportedModel
from puna.gguf.convert.checkpoint import Checkpoint
from puna.gguf.convert.encodings import Quantisation
from puna.gguf.convert.registry import convert
from puna.gguf.reader import GGUFFile
from puna.gguf.types import TensorType
from puna.native.products import decode
from tests.checkpoints.cases import CASES
from tests.checkpoints.folder import tensors, write_case
from tests.checkpoints.weights import e4m3_codes
from tests.hf import write_safetensors

QUERY = "model.layers.0.self_attn.q_proj.weight"


def converted(folder: Path) -> Path:
    convert(Checkpoint.of_folder(folder), folder / "out.gguf")
    return folder / "out.gguf"


def changed(folder: Path, name: str, changes: dict[str, npt.NDArray[Any] | None]) -> Path:
    """A case with other tensors; one that is None is left out."""
    write_case(folder, name)
    found = {key: values for key, values in (tensors(name) | changes).items() if values is not None}
    write_safetensors(folder / "model.safetensors", found)
    return folder


def test_numbers_of_eight_bits_are_what_the_format_says(tmp_path: Path) -> None:
    """All codes but the two that are no numbers, beside a scale that is a power of two."""
    codes = np.array([code for code in range(256) if code & 127 != 127], np.uint8).view(np.int8)
    query = np.resize(codes, (128, 64))
    scales: dict[str, npt.NDArray[Any] | None] = {QUERY: query, QUERY + "_scale_inv": np.full((3, 2), 0.5, np.float32)}
    with GGUFFile.open(converted(changed(tmp_path, "qwen3-fp8", scales))) as file:
        info = file.tensors["blk.0.attn_q.weight"]
        assert info.type is TensorType.F16
        found = np.frombuffer(file.tensor_data("blk.0.attn_q.weight"), np.float16).reshape(128, 64)
    assert (e4m3_codes(2 * found.astype(np.float32)) == np.where(query == -128, 0, query)).all()  # a zero has no sign there
    by_hand = {0x38: 1.0, 0x01: 2.0**-9, 0x07: 7 * 2.0**-9, 0x08: 2.0**-6, 0x7E: 448.0, 0xBC: -1.5}
    for code, value in by_hand.items():
        assert (found[query == np.uint8(code).view(np.int8)] == value / 2).all(), hex(code)


def test_blocks_of_four_bits_keep_every_number(tmp_path: Path) -> None:
    name = "gpt-oss-mxfp4"
    steps = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    source = tensors(name)

    def numbers(part: str) -> npt.NDArray[np.float32]:
        blocks, scales = (source[f"model.layers.1.mlp.experts.{part}_{kind}"] for kind in ("blocks", "scales"))
        pairs = np.stack([steps[blocks & 15], steps[blocks >> 4]], -1).reshape(*blocks.shape[:-1], 32)
        spread = pairs * (2.0 ** (scales.astype(np.float32) - 127))[..., None]
        return np.asarray(spread.reshape(*blocks.shape[:2], -1))

    both, down = numbers("gate_up_proj"), numbers("down_proj")
    with GGUFFile.open(converted(write_case(tmp_path, name))) as file:
        for part, wanted in (("gate", both[:, 0::2]), ("up", both[:, 1::2]), ("down", down)):
            info = file.tensors[f"blk.1.ffn_{part}_exps.weight"]
            assert (info.type, info.shape[::-1]) == (TensorType.MXFP4, wanted.shape)
            raw = np.frombuffer(file.tensor_data(info.name), np.uint8)
            np.testing.assert_array_equal(decode(int(info.type), raw, wanted.size).reshape(wanted.shape), wanted)
        assert file.metadata.number("general.file_type") == 38


@pytest.mark.parametrize(
    ("stated", "says"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantized already, by 'gptq'"),
        ({"quant_method": "awq"}, "quantized already, by 'awq'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "by 'bitsandbytes'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "by 'fp8' in a form"),
        ({"load_in_8bit": True}, "by 'none stated'"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int"}}}},
            "in a form",
        ),
        ({"quant_method": "compressed-tensors"}, "in a form"),
    ],
)
def test_another_quantisation_is_refused_by_its_name(stated: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=says):
        converted(write_case(tmp_path, "llama", quantization_config=stated))


@pytest.mark.parametrize("block", [[0, 128], [128], "x", [128, -1], [1.5, 2], [128, 1 << 40]])
def test_a_block_that_is_none(block: Any) -> None:
    with pytest.raises(FileFormatError, match="weight_block_size"):
        Quantisation.read({"quantization_config": {"quant_method": "fp8", "weight_block_size": block}})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({QUERY + "_scale_inv": None}, f"tensor {QUERY} is of type F8_E4M3, but there is no {QUERY}_scale_inv"),
        ({QUERY + "_scale_inv": np.ones((2, 2), np.float32)}, r"q_proj.weight_scale_inv has the shape \[2, 2\], which fits no"),
        ({QUERY + "_scale_inv": np.ones((3, 2), np.uint8)}, "q_proj.weight_scale_inv is of type U8"),
        ({QUERY: np.full((128, 64), 127, np.int8)}, f"tensor {QUERY} has values that are no numbers"),
        ({"model.layers.0.self_attn.k_scale": np.ones((), np.float32)}, "self_attn.k_scale has no place in a qwen3"),
        ({"model.norm.weight": np.ones(64, np.int8)}, "there is no model.norm.weight_scale_inv"),
        ({"model.norm.weight": np.ones(64, np.int8), "model.norm.weight_scale": np.ones(1, np.float32)}, "which fits no tensor"),
    ],
)
def test_scales_that_do_not_fit(changes: dict[str, npt.NDArray[Any] | None], says: str, tmp_path: Path) -> None:
    with pytest.raises((FileFormatError, UnsupportedModel), match=says):
        converted(changed(tmp_path, "qwen3-fp8", changes))


def test_eight_bits_without_a_word_in_the_configuration_are_refused(tmp_path: Path) -> None:
    write_case(tmp_path, "qwen3-fp8")
    config = {key: value for key, value in CASES["qwen3-fp8"].config.items() if key != "quantization_config"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FileFormatError, match="is of type F8_E4M3, not of floating point numbers"):
        converted(tmp_path)


GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({f"{GATE_UP}_scales": None}, f"no tensor {GATE_UP}_scales"),
        ({f"{GATE_UP}_blocks": np.zeros((8, 128, 2, 8), np.uint8)}, r"_blocks has the type U8 and the shape \[8, 128, 2, 8\]"),
        ({f"{GATE_UP}_blocks": np.zeros((8, 128, 2, 16), np.int8)}, "has the type F8_E4M3"),
        ({f"{GATE_UP}_scales": np.zeros((8, 128, 3), np.uint8)}, r"MXFP4 calls for U8 and \[8, 128, 2\]"),
        ({f"{GATE_UP}_blocks": None, f"{GATE_UP}_scales": None}, f"no tensor {GATE_UP}_blocks"),
    ],
)
def test_blocks_that_do_not_fit(changes: dict[str, npt.NDArray[Any] | None], says: str, tmp_path: Path) -> None:
    with pytest.raises((FileFormatError, UnsupportedModel), match=says):
        converted(changed(tmp_path, "gpt-oss-mxfp4", changes))
