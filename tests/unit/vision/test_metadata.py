"""What a file says of its encoder: the same from both kinds of file, and nothing believed that no encoder has."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from puna.errors import FileFormatError
from puna.gguf.layers import n_stored_layers
from puna.gguf.reader import GGUFFile
from puna.gguf.writer import GGUFWriter
from puna.ml.ggml.backend import GGMLBackend
from puna.ml.tensor import DType
from puna.vision.metadata import CLIP_MEAN, CLIP_STD, HALF, Activation, VisionMetadata, VisionOptions

VALUES = {
    "vision.block_count": 3,
    "vision.embedding_length": 96,
    "vision.feed_forward_length": 200,
    "vision.attention.head_count": 4,
    "vision.attention.layer_norm_epsilon": 1e-6,
    "vision.patch_size": 14,
    "vision.image_size": 56,
    "vision.image_mean": list(CLIP_MEAN),
    "vision.image_std": list(CLIP_STD),
}


def written(folder: Path, architecture: str = "clip", changes: dict[str, Any] | None = None) -> GGUFFile:
    """A change to None leaves the key out."""
    writer = GGUFWriter(architecture)
    for key, value in (VALUES | (changes or {})).items():
        if value is not None:
            writer.add(f"{architecture}.{key}", value)
    writer.add_tensor("v.post_ln.weight", np.ones(4, np.float32))
    writer.write(folder / "m.gguf")
    return GGUFFile.open(folder / "m.gguf")


@pytest.mark.parametrize("architecture", ["clip", "gemma3"])
def test_both_kinds_of_file_say_the_same(architecture: str, tmp_path: Path) -> None:
    with written(tmp_path, architecture) as file:
        meta = VisionMetadata(file)
        o = VisionOptions.read(meta)
    assert (o.n_layers, o.n_embd, o.n_ff, o.n_heads, o.head_dim) == (3, 96, 200, 4, 24)
    assert (o.patch_size, o.image_size) == (14, 56)
    assert o.eps == pytest.approx(1e-6)
    assert o.mean == pytest.approx(CLIP_MEAN)
    assert o.std == pytest.approx(CLIP_STD)
    assert meta.is_projector is (architecture == "clip")


def test_what_a_file_leaves_out_is_its_familys_to_say(tmp_path: Path) -> None:
    left_out: dict[str, Any] = {"vision.image_mean": None, "vision.image_std": None, "vision.attention.layer_norm_epsilon": None}
    with written(tmp_path, "gemma3", left_out) as file:
        o = VisionOptions.read(VisionMetadata(file), mean=HALF, std=HALF, eps=1e-5)
        assert (o.mean, o.std, o.eps) == (HALF, HALF, 1e-5)
        with pytest.raises(FileFormatError, match=r"gemma3\.vision\.attention\.layer_norm_epsilon"):
            VisionOptions.read(VisionMetadata(file), mean=HALF, std=HALF)


def test_heads_may_be_wider_than_their_share(tmp_path: Path) -> None:
    with written(tmp_path, "mistral3", {"vision.attention.key_length": 64}) as file:
        assert VisionOptions.read(VisionMetadata(file)).head_dim == 64


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vision.block_count", 0),
        ("vision.block_count", 2**31),
        ("vision.embedding_length", 2**40),
        ("vision.embedding_length", "wide"),
        ("vision.embedding_length", None),
        ("vision.feed_forward_length", 0),
        ("vision.attention.head_count", 0),
        ("vision.attention.head_count", 5),  # 96 cannot be split
        ("vision.patch_size", 0),
        ("vision.patch_size", 1 << 20),
        ("vision.image_size", 13),  # less than a patch
        ("vision.image_size", 1 << 30),
        ("vision.attention.layer_norm_epsilon", float("nan")),
        ("vision.attention.layer_norm_epsilon", -1.0),
        ("vision.image_mean", [0.5, 0.5]),
        ("vision.image_mean", [0.5, float("inf"), 0.5]),
        ("vision.image_std", [0.5, 0.0, 0.5]),
        ("vision.image_std", [float("nan"), 0.5, 0.5]),
        ("vision.image_std", "white"),
    ],
)
def test_what_no_encoder_has_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    with written(tmp_path, changes={key: value}) as file, pytest.raises(FileFormatError):
        VisionOptions.read(VisionMetadata(file))


def test_of_several_keys_the_first_that_is_there(tmp_path: Path) -> None:
    with written(tmp_path, "mistral3", {"spatial_merge_size": 3}) as file:
        meta = VisionMetadata(file)
        assert meta.integer("vision.spatial_merge_size", "spatial_merge_size") == 3
        assert meta.integer("vision.merge", default=2) == 2
        with pytest.raises(FileFormatError, match=r"mistral3\.spatial_merge_size.* is 3, not from 1 to 2"):
            meta.integer("vision.spatial_merge_size", "spatial_merge_size", high=2)


def test_lists_are_bounded(tmp_path: Path) -> None:
    with written(tmp_path, changes={"vision.feature_layer": [1, 2], "vision.wa_layer_indexes": [0] * 5000}) as file:
        meta = VisionMetadata(file)
        assert meta.integers("vision.feature_layer", high=3) == [1, 2]
        assert meta.integers("vision.none", default=[7]) == [7]
        with pytest.raises(FileFormatError, match="5000 items"):
            meta.integers("vision.wa_layer_indexes")
        with pytest.raises(FileFormatError, match="has 2, not from 0 to 1"):
            meta.integers("vision.feature_layer", high=1)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"use_gelu": True}, Activation.GELU),
        ({"use_silu": True}, Activation.SILU),
        ({"use_gelu": False, "use_silu": False}, Activation.GELU_QUICK),
        ({}, Activation.GELU_QUICK),
    ],
)
def test_the_activation_is_what_the_projectors_file_says(said: dict[str, bool], expected: Activation, tmp_path: Path) -> None:
    with written(tmp_path, changes=said) as file:
        assert VisionMetadata(file).activation(Activation.GELU_ERF) is expected


def test_the_activation_of_a_models_file_is_its_familys(tmp_path: Path) -> None:
    with written(tmp_path, "gemma3", {"use_silu": True}) as file:
        assert VisionMetadata(file).activation(Activation.GELU) is Activation.GELU


def test_two_activations_are_one_too_many(tmp_path: Path) -> None:
    with (
        written(tmp_path, changes={"use_gelu": True, "use_silu": True}) as file,
        pytest.raises(FileFormatError, match="use_silu"),
    ):
        VisionMetadata(file).activation(Activation.GELU)


@pytest.mark.parametrize(
    ("said", "expected"),
    [({}, "mlp"), ({"projector_type": "gemma3"}, "gemma3"), ({"vision.projector_type": "a", "projector_type": "b"}, "a")],
)
def test_the_kind_of_projector(said: dict[str, str], expected: str, tmp_path: Path) -> None:
    with written(tmp_path, changes=said) as file:
        assert VisionMetadata(file).projector_type == expected


def test_a_projectors_file_opens_as_any_other(tmp_path: Path) -> None:
    with written(tmp_path) as file:
        assert n_stored_layers(file.metadata) == 3
        backend = GGMLBackend(file, n_threads=1)
        assert backend.n_layers == 3
        backend.close()


def test_activations_are_what_their_names_say(tmp_path: Path) -> None:
    x = np.linspace(-4, 4, 33, dtype=np.float32)[None]
    cubic = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    erf = np.array([[math.erf(v / np.sqrt(2)) for v in x[0]]])
    expected = {
        Activation.GELU: x / 2 * (1 + np.tanh(cubic)),
        Activation.GELU_ERF: x / 2 * (1 + erf),
        Activation.GELU_QUICK: x / (1 + np.exp(-1.702 * x)),
        Activation.SILU: x / (1 + np.exp(-x)),
    }
    with written(tmp_path) as file:
        backend = GGMLBackend(file, n_threads=1)
        backend.allocate()
        context = backend.context(16)
        values = context.input(DType.F32, 33, 1)
        bent = {kind: kind(values) for kind in Activation}
        for result in bent.values():
            context.output(result)
        context.set(values, x)
        assert context.compute()
        for kind, result in bent.items():
            assert context.values(result) == pytest.approx(expected[kind], abs=5e-3), kind  # ggml looks some up in F16
        context.close()
        backend.close()
