"""Pixtral's eyes: sizes and rows of images, tokens, rotation, and files that are not what they should be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from puna.errors import FileFormatError, MissingTensors, UnsupportedModel
from puna.vision.metadata import CLIP_MEAN, CLIP_STD
from puna.vision.pixels import Filter, resized
from tests.models.mistral3 import MISTRAL3
from tests.vision import pixtral
from tests.vision.encoding import opened_eyes, picture
from tests.vision.files import Encoder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pixtral.write_text(tmp_path_factory.mktemp("text") / "text.gguf")


@pytest.mark.parametrize(
    ("width", "height", "grid"),
    # Of cells of 28 pixels, where a side may have 280: as it is, rounded up, shrunk with its proportions and rounded up.
    [
        (280, 280, (10, 10)),
        (28, 56, (1, 2)),
        (29, 28, (2, 1)),
        (1, 1, (1, 1)),
        (281, 140, (10, 5)),  # 280 x 139.5, of which 139 are left
        (560, 280, (10, 5)),
        (2560, 1440, (10, 6)),  # 280 x 157
        (100, 1000, (1, 10)),
        (1, 5000, (1, 10)),
    ],
)
def test_an_image_keeps_its_proportions(width: int, height: int, grid: tuple[int, int], text: Path, tmp_path: Path) -> None:
    columns, rows = grid
    pixels = picture(width, height)
    with opened_eyes(pixtral.encoder().save(tmp_path / "p.gguf"), text) as eyes:
        prepared = eyes.model.prepare(pixels)
        assert eyes.model.size(width, height) == (columns * rows, columns * rows + rows)
        image, row_end, end = (eyes.tokenizer.encode(name, add_special=False)[0] for name in pixtral.TOKENS)
    assert prepared.n_rows == columns * rows
    lines = [[*[image] * columns, row_end]] * rows
    assert list(prepared.placed.tokens) == [*[token for line in lines for token in line][:-1], end]
    assert [row for row in prepared.placed.rows if row >= 0] == list(range(columns * rows))
    assert [token for token, row in zip(prepared.placed.tokens, prepared.placed.rows, strict=True) if row < 0] == (
        [row_end] * (rows - 1) + [end]
    )
    assert not prepared.placed.bidirectional
    (piece,) = prepared.pieces
    cut = piece.arrays["patches"].reshape(rows, columns, 2, 2, 3, 14, 14)
    whole = cut.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * 28, columns * 28, 3)
    expected = resized(pixels, (columns * 28, rows * 28), Filter.BICUBIC) / 255.0
    assert np.abs(whole - (expected - CLIP_MEAN) / CLIP_STD).max() < 1e-5
    y, x = (piece.arrays[name].reshape(rows, columns, 2, 2).swapaxes(1, 2).reshape(rows * 2, -1) for name in ("row", "column"))
    assert np.array_equal(np.stack([y, x]), np.indices((rows * 2, columns * 2)))


def test_the_first_pixtral_stands_beside_a_llama(tmp_path: Path) -> None:
    text = pixtral.write_first_text(tmp_path / "t.gguf")
    with opened_eyes(pixtral.encoder(cell=1, biases=True).save(tmp_path / "p.gguf"), text) as eyes:
        assert eyes.model.size(280, 14) == (20, 21)
        assert eyes.rows(picture(280, 14)).shape == (20, pixtral.N_EMBD_TEXT)


def test_patches_are_told_apart_by_their_place(text: Path, tmp_path: Path) -> None:
    """Each is the same but for where it is; without positions all rows would be equal."""
    encoder = pixtral.encoder()
    one = pixtral.save_as_one(encoder, text, tmp_path / "one.gguf")
    for projector, beside in ((encoder.save(tmp_path / "p.gguf"), text), (one, one)):
        with opened_eyes(projector, beside) as eyes:
            grey = eyes.rows(np.full((84, 84, 3), 90, np.uint8))
            half = np.full((84, 84, 3), 90, np.uint8)
            half[:28] = 200
            apart = eyes.rows(half)
        assert np.abs(grey - grey[0]).max() < 1e-2  # all values are equal, however they are mixed
        for i, j in ((0, 1), (3, 4), (3, 6), (4, 7)):  # of equal cells, beside and below each other
            assert np.abs(apart[i] - apart[j]).max() > 3e-2


def _without(name: str) -> Callable[[Encoder], object]:
    return lambda e: e.tensors.pop(name)


def _reshaped(name: str, shape: tuple[int, ...]) -> Callable[[Encoder], object]:
    return lambda e: e.values(name, shape)


def _with(key: str, value: Any) -> Callable[[Encoder], object]:
    return lambda e: e.keys.update({key: value})


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (_without("v.pre_ln.weight"), MissingTensors),
        (_without("v.blk.2.ffn_gate.weight"), MissingTensors),
        (_without("mm.patch_merger.weight"), FileFormatError),
        (_without("mm.input_norm.weight"), FileFormatError),
        (lambda e: (e.tensors.pop("mm.input_norm.weight"), e.tensors.pop("mm.patch_merger.weight")), FileFormatError),
        (_reshaped("mm.patch_merger.weight", (48, 96)), FileFormatError),
        (_reshaped("mm.2.weight", (128, 256)), FileFormatError),  # of another text model
        (_with("vision.spatial_merge_size", 3), FileFormatError),
        (_with("vision.spatial_merge_size", 0), FileFormatError),
        (_with("vision.spatial_merge_size", 10**6), FileFormatError),
        (_with("vision.attention.head_count", 8), FileFormatError),  # heads of 6
        (_with("vision.rope.freq_base", 0.0), FileFormatError),
        (_with("use_silu", False), UnsupportedModel),
    ],
)
def test_files_that_are_not_what_they_should_be(
    change: Callable[[Encoder], object], error: type[Exception], text: Path, tmp_path: Path
) -> None:
    encoder = pixtral.encoder()
    change(encoder)
    with pytest.raises(error), opened_eyes(encoder.save(tmp_path / "p.gguf"), text):
        pass


def test_a_vocabulary_without_images(tmp_path: Path) -> None:
    text, projector = MISTRAL3.write(tmp_path / "t.gguf"), pixtral.encoder().save(tmp_path / "p.gguf")
    with pytest.raises(UnsupportedModel, match="IMG"), opened_eyes(projector, text):
        pass
