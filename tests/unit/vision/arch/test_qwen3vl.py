"""Qwen 3-VL's eyes: how images are cut, and files that are not what they should be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from puna.errors import BadRequest, FileFormatError, MissingTensors
from puna.vision.pixels import Filter, resized
from tests.vision import qwen
from tests.vision.encoding import opened_eyes, picture
from tests.vision.files import Encoder

# Images, and the cells of 32 pixels that they become: columns and rows.
SIZES = [((300, 200), (9, 6)), ((50, 400), (2, 12)), ((1, 1), (3, 3)), ((900, 30), (28, 1)), ((30, 20), (4, 3))]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen.write_text(tmp_path_factory.mktemp("text") / "text.gguf", "qwen3vl")


@pytest.mark.parametrize(("size", "cells"), SIZES)
def test_an_image_keeps_its_proportions(size: tuple[int, int], cells: tuple[int, int], text: Path, tmp_path: Path) -> None:
    pixels, (columns, rows) = picture(*size), cells
    with opened_eyes(qwen.encoder3().save(tmp_path / "p.gguf"), text) as eyes:
        prepared = eyes.model.prepare(pixels)
        assert eyes.model.size(*size) == (columns * rows, columns * rows + 2) == (prepared.n_rows, len(prepared.placed.tokens))
        (piece,) = prepared.pieces
    cut = piece.arrays["patches"].reshape(rows, columns, 2, 2, 3, 16, 16)
    whole = cut.transpose(0, 2, 5, 1, 3, 6, 4).reshape(32 * rows, 32 * columns, 3)
    expected = resized(pixels, (32 * columns, 32 * rows), Filter.BICUBIC) / 127.5 - 1
    assert np.abs(whole - expected).max() < 1e-5


def test_an_image_too_thin_is_refused(text: Path, tmp_path: Path) -> None:
    with opened_eyes(qwen.encoder3().save(tmp_path / "p.gguf"), text) as eyes, pytest.raises(BadRequest, match="10 x 3000"):
        eyes.model.prepare(picture(10, 3000))


def test_no_image_takes_more_than_the_largest(text: Path, tmp_path: Path) -> None:
    with opened_eyes(qwen.encoder3().save(tmp_path / "p.gguf"), text) as eyes:
        assert eyes.model.size(*eyes.model.largest())[0] == 4096
        assert eyes.model.size(9000, 8000)[0] <= 4096


def test_a_row_has_what_each_layer_gives(text: Path, tmp_path: Path) -> None:
    """The language part's width for the last layer, and again for each that gives something before."""
    with opened_eyes(qwen.encoder3().save(tmp_path / "p.gguf"), text) as eyes:
        assert eyes.model.n_out == 3 * 256
        assert eyes.rows(picture(96, 96)).shape == (9, 3 * 256)


def _without(name: str) -> Callable[[Encoder], object]:
    return lambda e: e.tensors.pop(name)


def _reshaped(name: str, shape: tuple[int, ...]) -> Callable[[Encoder], object]:
    return lambda e: e.values(name, shape)


def _with(key: str, value: Any) -> Callable[[Encoder], object]:
    return lambda e: e.keys.update({key: value})


def _gives_less(e: Encoder) -> None:
    for name in [name for name in e.tensors if name.startswith("v.deepstack.2")]:
        del e.tensors[name]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (_without("v.patch_embd.weight.1"), MissingTensors),
        (_without("v.patch_embd.bias"), MissingTensors),
        (_without("v.position_embd.weight"), MissingTensors),
        (_without("v.blk.2.attn_qkv.weight"), MissingTensors),
        (_without("v.deepstack.1.fc2.weight"), MissingTensors),
        (_reshaped("v.position_embd.weight", (80, 96)), FileFormatError),
        (_reshaped("v.blk.1.attn_qkv.weight", (96, 96)), FileFormatError),
        (_reshaped("v.deepstack.1.norm.weight", (96,)), FileFormatError),
        (_reshaped("v.deepstack.1.fc2.weight", (128, 384)), FileFormatError),
        (_reshaped("mm.2.weight", (128, 384)), FileFormatError),  # of another text model
        (_with("vision.attention.head_count", 16), FileFormatError),  # heads of 6
        (_gives_less, FileFormatError),
    ],
)
def test_files_that_are_not_what_they_should_be(
    change: Callable[[Encoder], object], error: type[Exception], text: Path, tmp_path: Path
) -> None:
    encoder = qwen.encoder3()
    change(encoder)
    with pytest.raises(error), opened_eyes(encoder.save(tmp_path / "p.gguf"), text):
        pass


@pytest.mark.parametrize("layers", [[2, 1], [1, 1], [1, 9]])
def test_layers_that_give_something_must_be_layers_in_order(layers: list[int], text: Path, tmp_path: Path) -> None:
    one = qwen.save3_as_one(qwen.encoder3(), text, tmp_path / "one.gguf", stated=layers)
    with pytest.raises(FileFormatError, match="deepstack_visual_indexes"), opened_eyes(one, one):
        pass
