"""Gemma 3's eyes: what they make of images, what stands around it, and files that are not what they should be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from puna.errors import FileFormatError, MissingTensors, UnsupportedModel
from puna.vision.pixels import Filter, resized
from tests.tiny import write_gemma3
from tests.vision import gemma3
from tests.vision.encoding import difference, opened_eyes, picture
from tests.vision.files import Encoder

SIZES = [(168, 168), (300, 200), (50, 400), (1, 1), (900, 30)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gemma3.write_text(tmp_path_factory.mktemp("text") / "text.gguf")


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_every_image_becomes_a_square_whatever_its_proportions(width: int, height: int, text: Path, tmp_path: Path) -> None:
    pixels = picture(width, height)
    with opened_eyes(gemma3.encoder().save(tmp_path / "p.gguf"), text) as eyes:
        prepared = eyes.model.prepare(pixels)
        assert eyes.model.size(width, height) == (9, len(prepared.placed.tokens)) == (prepared.n_rows, 13)
        (piece,) = prepared.pieces
    cut = piece.arrays["patches"].reshape(3, 3, 4, 4, 3, 14, 14)  # cells, patches in a cell, values of a patch
    whole = cut.transpose(0, 2, 5, 1, 3, 6, 4).reshape(168, 168, 3)
    expected = resized(pixels, (168, 168), Filter.BILINEAR).astype(np.float64) / 127.5 - 1
    assert np.abs(whole - expected).max() < 1e-6
    places = piece.arrays["places"].reshape(3, 3, 4, 4).transpose(0, 2, 1, 3)
    assert np.array_equal(places.reshape(-1), np.arange(144))


def test_rows_stand_between_the_tokens_that_say_where_an_image_is(text: Path, tmp_path: Path) -> None:
    with opened_eyes(gemma3.encoder().save(tmp_path / "p.gguf"), text) as eyes:
        placed = eyes.model.prepare(picture(20, 20)).placed
        shown = [eyes.tokenizer.piece(token, special=True) for token in placed.tokens]
    assert shown[:2] == [b"\n\n", b"<start_of_image>"]
    assert shown[-2:] == [b"<end_of_image>", b"\n\n"]
    assert list(placed.rows) == [-1, -1, *range(9), -1, -1]
    assert list(placed.bidirectional) == [(2, 11)]
    assert list(placed.together) == [(0, 13)]
    assert placed.axes is None


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_both_kinds_of_file_see_the_same(dtype: str, text: Path, tmp_path: Path) -> None:
    encoder = gemma3.encoder(dtype=dtype)
    projector, one = encoder.save(tmp_path / "p.gguf"), gemma3.save_as_one(encoder, text, tmp_path / "one.gguf")
    with opened_eyes(projector, text) as apart, opened_eyes(one, one) as together:
        for width, height in SIZES:
            pixels = picture(width, height)
            assert np.array_equal(apart.rows(pixels), together.rows(pixels))
            assert apart.model.prepare(pixels).placed == together.model.prepare(pixels).placed


def test_names_of_older_files(text: Path, tmp_path: Path) -> None:
    paths = [gemma3.encoder(swapped=swapped).save(tmp_path / f"{swapped}.gguf") for swapped in (False, True)]
    with opened_eyes(paths[0], text) as new, opened_eyes(paths[1], text) as old:
        assert np.array_equal(new.rows(picture(40, 30)), old.rows(picture(40, 30)))


def test_layers_may_be_computed_one_by_one(text: Path, tmp_path: Path) -> None:
    with opened_eyes(gemma3.encoder().save(tmp_path / "p.gguf"), text) as eyes:
        pixels = picture(100, 60)
        assert difference(eyes.rows(pixels, at_once=False), eyes.rows(pixels)) < 1e-6


def test_a_patch_for_each_row_and_one_row_in_all(text: Path, tmp_path: Path) -> None:
    for cell, n_rows in ((1, 36), (6, 1)):
        with opened_eyes(gemma3.encoder(side=6, cell=cell).save(tmp_path / f"{cell}.gguf"), text) as eyes:
            assert eyes.rows(picture(40, 30)).shape == (n_rows, gemma3.N_EMBD_TEXT)


def _without(name: str) -> Callable[[Encoder], object]:
    return lambda e: e.tensors.pop(name)


def _reshaped(name: str, shape: tuple[int, ...]) -> Callable[[Encoder], object]:
    return lambda e: e.values(name, shape)


def _with(key: str, value: Any) -> Callable[[Encoder], object]:
    return lambda e: e.keys.update({key: value})


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (_without("v.position_embd.weight"), MissingTensors),
        (_without("v.blk.2.attn_k.weight"), MissingTensors),
        (_without("mm.input_projection.weight"), MissingTensors),
        (_reshaped("v.position_embd.weight", (143, 72)), FileFormatError),
        (_reshaped("v.patch_embd.weight", (72, 1, 14, 14)), FileFormatError),
        (_reshaped("v.blk.1.attn_q.weight", (144, 72)), FileFormatError),
        (_reshaped("v.blk.1.attn_out.bias", (71,)), FileFormatError),
        (_reshaped("mm.input_projection.weight", (72, 64)), FileFormatError),  # of another text model
        (_with("vision.projector.scale_factor", 5), FileFormatError),
        (_with("vision.projector.scale_factor", 13), FileFormatError),
        (_with("vision.image_size", 182), FileFormatError),
        (_with("vision.block_count", 4), MissingTensors),
        (_with("projector_type", "unheard_of"), UnsupportedModel),
    ],
)
def test_files_that_are_not_what_they_should_be(
    change: Callable[[Encoder], object], error: type[Exception], text: Path, tmp_path: Path
) -> None:
    encoder = gemma3.encoder()
    change(encoder)
    with pytest.raises(error), opened_eyes(encoder.save(tmp_path / "p.gguf"), text):
        pass


def test_a_vocabulary_without_images(tmp_path: Path) -> None:
    text, projector = write_gemma3(tmp_path / "t.gguf"), gemma3.encoder().save(tmp_path / "p.gguf")
    with pytest.raises(UnsupportedModel, match="start_of_image"), opened_eyes(projector, text):
        pass
