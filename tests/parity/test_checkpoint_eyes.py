"""Models that see, from folders: the text's file and a projector's, whose rows are those of their authors' program.

The pictures need no resizing, so that the encoders are compared and not the ways to resize; how those are is for the tests of
each family's eyes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from puna.errors import FileFormatError, UnsupportedModel
from puna.gguf.convert.checkpoint import Checkpoint
from puna.gguf.convert.registry import convert
from puna.gguf.reader import GGUFFile
from puna.store.recipe import Recipe
from puna.store.store import Store
from tests.checkpoints.cases import EYES
from tests.checkpoints.folder import expected, seen, tensors, write_case
from tests.checkpoints.weights import picture
from tests.hf import write_safetensors
from tests.mtmd_oracle import MtmdOracle
from tests.parity.test_checkpoints import error, logits
from tests.puna_engine import PunaEngine
from tests.vision.encoding import opened_eyes

TOLERANCE = 2e-3


def converted(folder: Path) -> tuple[Path, Path]:
    text, eyes = folder / "text.gguf", folder / "eyes.gguf"
    assert convert(Checkpoint.of_folder(folder), text, eyes=eyes).sees
    return text, eyes


@pytest.mark.parametrize("name", EYES)
def test_rows_are_those_of_the_authors_program(name: str, tmp_path: Path) -> None:
    text, eyes = converted(write_case(tmp_path, name))
    pixels = picture(*EYES[name].pixels)
    with opened_eyes(eyes, text) as opened:
        found = opened.rows(pixels)
    with MtmdOracle(text, eyes, n_ctx=512) as oracle:
        theirs = oracle.encoded(pixels)
    wanted = seen(name)
    # libmtmd has a row of its own for the ends of Pixtral's rows.
    assert found.shape == wanted.shape
    assert error(found.astype(np.float64), wanted) <= TOLERANCE
    if name == "mistral3-eyes":
        columns = EYES[name].pixels[0] // 28
        theirs = np.concatenate([theirs[i : i + columns] for i in range(0, len(theirs), columns + 1)])
    assert error(theirs.astype(np.float64), wanted) <= TOLERANCE


@pytest.mark.parametrize("name", EYES)
def test_a_folder_becomes_a_model_that_sees(name: str, tmp_path: Path) -> None:
    store = Store(tmp_path / "models")
    folder = write_case(tmp_path / "hf", name)
    files = {path.name: store.blobs.import_file(path).digest for path in folder.iterdir()}
    model = store.create("sees", Recipe(files=files, quantize="q8_0"))
    assert model.manifest is not None
    kinds = [layer.kind for layer in model.manifest.layers]
    assert sorted(kind for kind in kinds if kind in ("model", "projector")) == ["model", "projector"]
    assert model.quantization_level == "Q8_0"
    (eyes,) = (store.blobs.path(layer.digest) for layer in model.manifest.layers if layer.kind == "projector")
    with opened_eyes(eyes, model.model_path) as opened:
        assert (
            error(opened.rows(picture(*EYES[name].pixels)).astype(np.float64), seen(name)) <= TOLERANCE
        )  # the projector is as it was
    assert error(logits(PunaEngine, model.model_path), expected(name)) < 0.05


def test_how_pixels_are_shifted_is_read(tmp_path: Path) -> None:
    folder = write_case(tmp_path, "gemma3-eyes")
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}))
    with GGUFFile.open(converted(folder)[1]) as file:
        found = [file.metadata.numbers(f"vision.image_{name}") for name in ("mean", "std")]
    np.testing.assert_allclose(found, [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]], rtol=1e-6)


def test_how_large_a_picture_may_be_is_read_and_bounded(tmp_path: Path) -> None:
    folder = write_case(tmp_path, "qwen25vl")
    (folder / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 3136, "max_pixels": 12845056}))
    with GGUFFile.open(converted(folder)[1]) as file:
        assert file.metadata.integer("vision.image_min_pixels") == 3136
        assert file.metadata.integer("vision.image_max_pixels") == 4096 * 28 * 28


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("gemma3-eyes", {"hidden_act": "relu"}, "hidden_act is relu; a clip can only be converted with gelu_pytorch_tanh"),
        ("gemma3-eyes", {"image_size": 70}, "mm_tokens_per_image is 4, which 5 patches along a side do not divide into"),
        ("gemma3-eyes", {"num_hidden_layers": 3}, "encoder.layers.2.layer_norm1.weight"),
        ("gemma3-eyes", {"num_hidden_layers": 1}, r"encoder.layers.1.\S+ has no place in a clip of 1 layers"),
        ("qwen25vl", {"fullatt_block_indexes": [0, 3]}, "fullatt_block_indexes is"),
        ("qwen25vl", {"window_size": 56}, "window_size is 56"),
        ("qwen25vl", {"spatial_merge_size": 3}, "spatial_merge_size is 3"),
        ("qwen3vl", {"deepstack_visual_indexes": [2, 0]}, "deepstack_visual_indexes is"),
        ("qwen3vl", {"num_position_embeddings": 35}, "num_position_embeddings is 35, no square"),
        ("mistral3-eyes", {"rope_theta": 500.0}, "rope_theta is 500"),
        ("mistral3-eyes", {"head_dim": 32}, "head_dim is 32"),
    ],
)
def test_other_eyes_are_refused(name: str, changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    folder = write_case(tmp_path, name, vision_config=EYES[name].config["vision_config"] | changes)
    with pytest.raises((FileFormatError, UnsupportedModel), match=says):
        converted(folder)


def test_a_processor_that_does_not_resize_is_refused(tmp_path: Path) -> None:
    folder = write_case(tmp_path, "mistral3-eyes")
    (folder / "preprocessor_config.json").write_text(json.dumps({"do_resize": False}))
    with pytest.raises(UnsupportedModel, match=r"preprocessor_config.json: do_resize is false"):
        converted(folder)


def test_a_token_among_rows_must_be_there(tmp_path: Path) -> None:
    folder = write_case(tmp_path, "mistral3-eyes")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "[IMG_BREAK]"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(FileFormatError, match=r"the tokenizer has no token \[IMG_BREAK\]"):
        converted(folder)


def test_a_checkpoint_whose_eyes_were_left_out_only_reads(tmp_path: Path) -> None:
    folder = write_case(tmp_path, "gemma3-eyes")
    text = {key: values for key, values in tensors("gemma3-eyes").items() if key.startswith("language_model.")}
    write_safetensors(folder / "model.safetensors", text)
    assert not convert(Checkpoint.of_folder(folder), folder / "text.gguf", eyes=folder / "eyes.gguf").sees
    assert not (folder / "eyes.gguf").exists()
