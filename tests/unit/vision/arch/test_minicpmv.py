"""MiniCPM-V's eyes: how images are resized and cut as published, tokens, and files that are not what they should be."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from puna.errors import BadRequest, FileFormatError, MissingTensors, UnsupportedModel
from puna.vision.arch.minicpmv import MOST_SLICES, sines
from puna.vision.pixels import Filter, resized
from tests.tiny import write_llama
from tests.vision import minicpmv
from tests.vision.encoding import difference, opened_eyes, picture
from tests.vision.files import Encoder

ROWS = 10  # of a piece


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return minicpmv.write_text(tmp_path_factory.mktemp("text") / "text.gguf")


@pytest.mark.parametrize(
    ("size", "whole", "grid", "slices"),
    [
        # Worked out by hand from the published processor, which was trained with squares of 84 here.
        ((84, 84), (84, 84), (0, 0), (0, 0)),
        ((30, 20), (98, 70), (0, 0), (0, 0)),  # grows to sides of 102 and 68
        ((400, 10), (518, 14), (0, 0), (0, 0)),  # 4000 pixels are no more than 84 x 84, however wide
        ((160, 90), (112, 56), (2, 1), (84, 84)),  # of 2, 3 or 4 slices
        ((1000, 1000), (84, 84), (3, 3), (84, 84)),
        ((100, 900), (28, 252), (1, 9), (84, 84)),
    ],
)
def test_an_image_is_cut_as_published(
    size: tuple[int, int], whole: tuple[int, int], grid: tuple[int, int], slices: tuple[int, int], text: Path, tmp_path: Path
) -> None:
    pixels = picture(*size)
    with opened_eyes(minicpmv.encoder().save(tmp_path / "p.gguf"), text) as eyes:
        prepared, n_slices = eyes.model.prepare(pixels), grid[0] * grid[1]
        assert len(prepared.pieces) == 1 + n_slices
        assert eyes.model.size(*size) == (prepared.n_rows, len(prepared.placed.tokens)) == ((1 + n_slices) * ROWS, _tokens(grid))
    shapes = [whole, *[slices] * n_slices]
    parts = [resized(pixels, whole, Filter.BICUBIC)]
    if n_slices:
        (width, height), filled = slices, resized(pixels, (grid[0] * slices[0], grid[1] * slices[1]), Filter.BICUBIC)
        parts += [
            filled[y * height : (y + 1) * height, x * width : (x + 1) * width] for y in range(grid[1]) for x in range(grid[0])
        ]
    for (width, height), part, piece in zip(shapes, parts, prepared.pieces, strict=True):
        columns, rows = width // 14, height // 14
        cut = piece.arrays["patches"].reshape(rows, columns, 3, 14, 14).transpose(0, 3, 1, 4, 2).reshape(height, width, 3)
        assert np.abs(cut - (part / 127.5 - 1)).max() < 1e-5
        places = [math.floor(70 * y / rows) * 70 + math.floor(70 * x / columns) for y in range(rows) for x in range(columns)]
        assert piece.arrays["places"].tolist() == places


def _tokens(grid: tuple[int, int]) -> int:
    return (1 + grid[0] * grid[1]) * (ROWS + 2) + max(grid[1] - 1, 0)


def test_slices_stand_between_their_tokens(text: Path, tmp_path: Path) -> None:
    shown = []
    for version in (2, 3):
        with opened_eyes(minicpmv.encoder(version=version).save(tmp_path / "p.gguf"), text) as eyes:
            placed = eyes.model.prepare(picture(168, 168)).placed
            names = [
                eyes.tokenizer.piece(token, special=True).decode() if row < 0 else "."
                for token, row in zip(placed.tokens, placed.rows, strict=True)
            ]
            assert [row for row in placed.rows if row >= 0] == list(range(5 * ROWS))
            shown.append("".join(names).replace("." * ROWS, "R"))
    part, piece = "<image>R</image>", "<slice>R</slice>"
    assert shown == [f"{part}<slice>{part * 2}\n{part * 2}</slice>", f"{part}{piece * 2}\n{piece * 2}"]


def test_places_are_sines_of_columns_then_rows() -> None:
    found = sines(2, 3, 8).reshape(2, 3, 8)
    for row in range(2):
        for column in range(3):
            expected = [f(place / 10000 ** (i / 2)) for place in (column, row) for f in (math.sin, math.cos) for i in (0, 1)]
            assert np.abs(found[row, column] - expected).max() < 1e-6


def test_no_image_has_more_patches_or_rows_than_the_largest(text: Path, tmp_path: Path) -> None:
    with opened_eyes(minicpmv.encoder().save(tmp_path / "p.gguf"), text) as eyes:

        def most(size: tuple[int, int]) -> int:
            return max(len(piece.arrays["places"]) for piece in eyes.model.prepare(picture(*size)).pieces)

        largest = eyes.model.largest()
        assert eyes.model.size(*largest)[0] == (1 + MOST_SLICES) * ROWS
        sizes = [(w, h) for w in (20, 90, 300, 1500) for h in (20, 47, 121, 400, 1500)]
        assert all(most(size) <= most(largest) for size in sizes)
        with pytest.raises(BadRequest, match="2010 x 10"):
            eyes.model.size(2010, 10)


def test_queries_and_places_take_part(text: Path, tmp_path: Path) -> None:
    pixels, encoder = picture(84, 84), minicpmv.encoder()
    with opened_eyes(encoder.save(tmp_path / "p.gguf"), text) as eyes:
        rows = eyes.rows(pixels)
    for name in ("resampler.query", "resampler.ln_post.bias", "v.position_embd.weight"):
        changed = minicpmv.encoder()
        changed.tensors[name] = np.roll(changed.tensors[name], 1, 0)
        with opened_eyes(changed.save(tmp_path / "q.gguf"), text) as eyes:
            assert difference(eyes.rows(pixels), rows) > 1e-2, name


def _without(name: str) -> Callable[[Encoder], Any]:
    return lambda e: e.tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (_without("resampler.query"), MissingTensors),
        (_without("resampler.kv.weight"), MissingTensors),
        (lambda e: e.values("resampler.query", (10, 128)), FileFormatError),
        (lambda e: e.values("v.position_embd.weight", (36, 96)), FileFormatError),
        (lambda e: e.values("resampler.more.weight", (96,)), UnsupportedModel),
    ],
)
def test_files_that_are_not_what_they_should_be(
    change: Callable[[Encoder], Any], error: type[Exception], text: Path, tmp_path: Path
) -> None:
    encoder = minicpmv.encoder()
    change(encoder)
    with pytest.raises(error), opened_eyes(encoder.save(tmp_path / "p.gguf"), text):
        pass


def test_a_vocabulary_without_the_tokens_is_refused(tmp_path: Path) -> None:
    text = write_llama(tmp_path / "text.gguf")
    with pytest.raises(UnsupportedModel, match="image"), opened_eyes(minicpmv.encoder().save(tmp_path / "p.gguf"), text):
        pass
