"""Qwen 2.5-VL's eyes: how images are cut, what stands around them, and files that are not what they should be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from puna.errors import BadRequest, FileFormatError, MissingTensors, UnsupportedModel
from puna.vision.pixels import Filter, resized
from tests.models.table import ROWS
from tests.vision import qwen
from tests.vision.encoding import opened_eyes, picture
from tests.vision.files import Encoder

# Images, and the cells of 28 pixels that they become: columns and rows.
SIZES = [((300, 200), (11, 7)), ((50, 400), (2, 14)), ((1, 1), (3, 3)), ((900, 30), (32, 1)), ((30, 20), (4, 3))]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen.write_text(tmp_path_factory.mktemp("text") / "text.gguf", "qwen2vl")


@pytest.fixture(scope="module")
def projector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen.encoder25().save(tmp_path_factory.mktemp("projector") / "projector.gguf")


@pytest.mark.parametrize(("size", "cells"), SIZES)
def test_an_image_keeps_its_proportions(size: tuple[int, int], cells: tuple[int, int], text: Path, projector: Path) -> None:
    pixels, (columns, rows) = picture(*size), cells
    with opened_eyes(projector, text) as eyes:
        prepared = eyes.model.prepare(pixels)
        assert eyes.model.size(*size) == (columns * rows, columns * rows + 2) == (prepared.n_rows, len(prepared.placed.tokens))
        (piece,) = prepared.pieces
    in_order = np.array([row for row in prepared.placed.rows if row >= 0])  # they come window by window
    patches = piece.arrays["patches"].reshape(rows * columns, -1)[in_order]
    cut = patches.reshape(rows, columns, 2, 2, 3, 14, 14)  # cells, patches in a cell, values of a patch
    whole = cut.transpose(0, 2, 5, 1, 3, 6, 4).reshape(28 * rows, 28 * columns, 3)
    mean, std = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])
    expected = (resized(pixels, (28 * columns, 28 * rows), Filter.BICUBIC) / 255.0 - mean) / std
    assert np.abs(whole - expected).max() < 1e-5


def test_patches_turn_by_their_row_and_column_in_the_order_of_windows(text: Path, projector: Path) -> None:
    with opened_eyes(projector, text) as eyes:
        (piece,) = eyes.model.prepare(picture(28 * 5, 28 * 3)).pieces
    rows, columns, *_ = piece.arrays["places"].reshape(4, 5 * 3, 4).tolist()
    # A window of 4 x 3 cells, then one of 1 x 3; a cell's patches row by row.
    cells = [(y, x) for y in range(3) for x in range(4)] + [(y, 4) for y in range(3)]
    assert rows == [[2 * y, 2 * y, 2 * y + 1, 2 * y + 1] for y, _ in cells]
    assert columns == [[2 * x, 2 * x + 1, 2 * x, 2 * x + 1] for _, x in cells]


def test_an_image_too_thin_is_refused_before_anything_is_computed(text: Path, projector: Path) -> None:
    with opened_eyes(projector, text) as eyes:
        for refuse in (lambda: eyes.model.size(3000, 10), lambda: eyes.model.prepare(picture(3000, 10))):
            with pytest.raises(BadRequest, match="3000 x 10"):
                refuse()


def test_no_image_takes_more_than_the_largest(text: Path, projector: Path) -> None:
    with opened_eyes(projector, text) as eyes:
        width, height = eyes.model.largest()
        most, _ = eyes.model.size(width, height)
        assert most == 4096
        assert max(eyes.model.size(*size)[0] for size in ((9000, 9000), (20000, 100), (1, 200), (4096, 3000))) <= most


def test_bounds_that_a_file_states_hold(text: Path, tmp_path: Path) -> None:
    encoder = qwen.encoder25()
    encoder.keys |= {"vision.image_min_pixels": 20 * 784, "vision.image_max_pixels": 30 * 784}
    with opened_eyes(encoder.save(tmp_path / "p.gguf"), text) as eyes:
        assert eyes.model.size(5000, 5000)[0] == 25
        assert eyes.model.size(10, 10)[0] == 25


def _without(name: str) -> Callable[[Encoder], object]:
    return lambda e: e.tensors.pop(name)


def _reshaped(name: str, shape: tuple[int, ...]) -> Callable[[Encoder], object]:
    return lambda e: e.values(name, shape)


def _with(key: str, value: Any) -> Callable[[Encoder], object]:
    return lambda e: e.keys.update({key: value})


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (_without("v.patch_embd.weight.1"), MissingTensors),
        (_without("v.blk.2.attn_k.weight"), MissingTensors),
        (_without("mm.2.weight"), MissingTensors),
        (_reshaped("v.patch_embd.weight.1", (96, 1, 14, 14)), FileFormatError),
        (_reshaped("v.blk.1.attn_q.weight", (144, 96)), FileFormatError),
        (_reshaped("v.blk.1.ffn_gate.bias", (71,)), FileFormatError),
        (_reshaped("mm.2.weight", (128, 384)), FileFormatError),  # of another text model
        (_with("vision.attention.head_count", 16), FileFormatError),  # heads of 6
        (_with("vision.block_count", 5), MissingTensors),
        (_with("vision.spatial_merge_size", 3), FileFormatError),
        (_with("vision.image_min_pixels", 1 << 30), FileFormatError),
        (_with("vision.image_max_pixels", 10), FileFormatError),
    ],
)
def test_files_that_are_not_what_they_should_be(
    change: Callable[[Encoder], object], error: type[Exception], text: Path, tmp_path: Path
) -> None:
    encoder = qwen.encoder25()
    change(encoder)
    with pytest.raises(error), opened_eyes(encoder.save(tmp_path / "p.gguf"), text):
        pass


def test_a_vocabulary_without_images(projector: Path, tmp_path: Path) -> None:
    text = ROWS["qwen2vl"].write(tmp_path / "t.gguf")
    with pytest.raises(UnsupportedModel, match="vision_start"), opened_eyes(projector, text):
        pass
