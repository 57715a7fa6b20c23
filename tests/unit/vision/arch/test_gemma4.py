"""Gemma 4's eyes: how images fill their budget, who sees whom, and files that are not what they should be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from puna.errors import FileFormatError, MissingTensors
from puna.vision.pixels import Filter, resized
from tests.mtmd_oracle import MtmdOracle
from tests.puna_engine import PunaEngine
from tests.vision import gemma4
from tests.vision.conversation import computed, decoded_backwards, prompt_of
from tests.vision.encoding import difference, opened_eyes, picture
from tests.vision.files import Encoder

# Images, and the cells of 48 pixels that they become: columns and rows. Worked out by hand from the published rule: a square
# of the budget of 280 cells has sides of 803.19 pixels.
SIZES = [
    ((960, 672), (20, 14)),
    ((1000, 1000), (16, 16)),
    ((2560, 1440), (22, 12)),
    ((1440, 2560), (12, 22)),
    ((1, 1), (16, 16)),
    ((3, 3000), (1, 280)),
    ((400, 1), (280, 1)),
    ((281, 1), (280, 1)),
    ((100, 1), (167, 1)),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gemma4.write_text(tmp_path_factory.mktemp("text") / "text.gguf")


@pytest.fixture(scope="module")
def projector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gemma4.encoder(cell=3, n_places=900).save(tmp_path_factory.mktemp("projector") / "projector.gguf")


@pytest.mark.parametrize(("size", "cells"), SIZES)
def test_an_image_fills_the_budget(size: tuple[int, int], cells: tuple[int, int], text: Path, projector: Path) -> None:
    with opened_eyes(projector, text) as eyes:
        assert eyes.model.size(*size) == (cells[0] * cells[1], cells[0] * cells[1] + 2)


def test_patches_are_cut_from_the_image_at_that_size(text: Path, projector: Path) -> None:
    pixels, (columns, rows) = picture(300, 200), (20, 13)
    with opened_eyes(projector, text) as eyes:
        prepared = eyes.model.prepare(pixels)
        (piece,) = prepared.pieces
    cut = piece.arrays["patches"].reshape(rows, columns, 3, 3, 3, 16, 16)  # cells, patches in a cell, values of a patch
    whole = cut.transpose(0, 2, 5, 1, 3, 6, 4).reshape(48 * rows, 48 * columns, 3)
    expected = resized(pixels, (48 * columns, 48 * rows), Filter.BICUBIC) / 127.5 - 1
    assert np.abs(whole - expected).max() < 1e-5
    assert piece.arrays["columns"][:10].tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 3]
    assert piece.arrays["rows"][:10].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 0]


def test_no_image_takes_more_than_the_largest(text: Path, projector: Path) -> None:
    with opened_eyes(projector, text) as eyes:
        assert eyes.model.size(*eyes.model.largest()) == (280, 282)


def test_rows_of_large_models_see_each_other(text: Path, projector: Path) -> None:
    with opened_eyes(projector, text) as eyes:
        placed = eyes.model.prepare(picture(960, 672)).placed
    assert list(placed.bidirectional) == list(placed.together) == [(1, 281)]


def test_rows_of_small_models_see_backwards(tmp_path: Path) -> None:
    """As libllama has it where nobody tells it otherwise."""
    text, projector = gemma4.write_text(tmp_path / "t.gguf", given=True), gemma4.encoder().save(tmp_path / "p.gguf")
    with (
        opened_eyes(projector, text) as eyes,
        MtmdOracle(text, projector, n_ctx=512) as oracle,
        PunaEngine(text, n_ctx=512, n_batch=512) as puna,
    ):
        prompt = prompt_of(eyes, ["What is it ", picture(640, 448), " and the dog"])
        assert prompt.bidirectional == []
        theirs = decoded_backwards(oracle, prompt)
        assert difference(computed(puna, [prompt])[0], theirs) ** 2 <= 1e-3


@pytest.mark.parametrize("left_out", ["clamped", "standardised"])
def test_bounds_and_standards_are_no_must(left_out: str, text: Path, tmp_path: Path) -> None:
    plain = gemma4.encoder(clamped=left_out != "clamped", standardised=left_out != "standardised").save(tmp_path / "p.gguf")
    whole = gemma4.encoder().save(tmp_path / "q.gguf")
    pixels = picture(640, 448)
    with (
        opened_eyes(plain, text) as eyes,
        opened_eyes(whole, text) as others,
        MtmdOracle(text, plain, n_ctx=64) as oracle,
    ):
        found = eyes.rows(pixels)
        assert difference(found, oracle.encoded(pixels)) <= 1e-3
        assert difference(found, others.rows(pixels)) > 1e-2


def _without(name: str) -> Callable[[Encoder], object]:
    return lambda e: e.tensors.pop(name)


def _reshaped(name: str, shape: tuple[int, ...]) -> Callable[[Encoder], object]:
    return lambda e: e.values(name, shape)


def _with(key: str, value: Any) -> Callable[[Encoder], object]:
    return lambda e: e.keys.update({key: value})


def _bounded(name: str, at: float) -> Callable[[Encoder], object]:
    return lambda e: e.tensors.update({name: np.array([at], np.float32)})


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (_without("v.position_embd.weight"), MissingTensors),
        (_without("v.blk.2.attn_k_norm.weight"), MissingTensors),
        (_without("v.blk.0.ffn_post_norm.weight"), MissingTensors),
        (_without("mm.input_projection.weight"), MissingTensors),
        (_without("v.std_scale"), FileFormatError),
        (_without("v.std_bias"), FileFormatError),
        (_reshaped("v.position_embd.weight", (600, 96)), FileFormatError),
        (_reshaped("v.position_embd.weight", (3, 600, 96)), FileFormatError),
        (_reshaped("v.position_embd.weight", (2, 500, 96)), FileFormatError),
        (_reshaped("v.blk.1.attn_q.weight", (144, 96)), FileFormatError),
        (_reshaped("v.blk.1.attn_q.input_min", (2,)), FileFormatError),
        (_bounded("v.blk.1.attn_q.input_min", 5.0), FileFormatError),
        (_bounded("v.blk.1.attn_q.output_max", float("nan")), FileFormatError),
        (_reshaped("mm.input_projection.weight", (64, 96)), FileFormatError),  # of another text model
        (_with("vision.attention.head_count", 16), FileFormatError),
        (_with("vision.image_std", [0.0, 1.0, 1.0]), FileFormatError),
    ],
)
def test_files_that_are_not_what_they_should_be(
    change: Callable[[Encoder], object], error: type[Exception], text: Path, tmp_path: Path
) -> None:
    encoder = gemma4.encoder()
    change(encoder)
    with pytest.raises(error), opened_eyes(encoder.save(tmp_path / "p.gguf"), text):
        pass
