"""Llama 4's eyes: the tiles of an image, the tokens between them, and files that are not what they should be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from puna.errors import FileFormatError, MissingTensors, UnsupportedModel
from puna.vision.arch.llama4 import Grid, best_grid, on_grid
from puna.vision.pixels import Filter, resized
from tests.models.llama4 import write_llama4
from tests.mtmd_oracle import MtmdOracle
from tests.vision import llama4
from tests.vision.encoding import difference, opened_eyes, picture
from tests.vision.files import Encoder

SIDE = 336

# Images, the grid of tiles, and how large the image is on it; worked out by hand from the published rule.
SIZES = [
    ((336, 336), (1, 1), (336, 336)),
    ((100, 100), (1, 1), (336, 336)),
    ((337, 100), (2, 1), (337, 100)),  # one tile would be too narrow, and it is not enlarged
    ((672, 336), (2, 1), (672, 336)),
    ((300, 500), (1, 2), (300, 500)),  # 1.12 times on 1 x 2, as on 1 x 3 and more
    ((1000, 600), (3, 2), (1000, 600)),
    ((2560, 1440), (5, 3), (1680, 945)),  # too large for all: 0.65625 on 5 x 3
    ((1344, 1344), (4, 4), (1344, 1344)),
    ((6000, 6000), (4, 4), (1344, 1344)),
    ((1, 10000), (1, 16), (1, 5376)),
    ((20, 1), (1, 1), (336, 16)),
    ((1, 1), (1, 1), (336, 336)),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama4.write_text(tmp_path_factory.mktemp("text") / "text.gguf")


@pytest.fixture(scope="module")
def projector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama4.encoder().save(tmp_path_factory.mktemp("projector") / "projector.gguf")


@pytest.mark.parametrize(("size", "grid", "inner"), SIZES)
def test_an_image_goes_onto_tiles(size: tuple[int, int], grid: tuple[int, int], inner: tuple[int, int]) -> None:
    """At the upper left; the rest is black."""
    assert best_grid(*size, SIDE) == grid
    white = np.full((size[1], size[0], 3), 255, np.uint8)
    canvas = on_grid(white, Grid(*grid), SIDE)
    assert canvas.shape == (SIDE * grid[1], SIDE * grid[0], 3)
    assert canvas[: inner[1], : inner[0]].min() == 255
    assert not canvas[inner[1] :].any()
    assert not canvas[:, inner[0] :].any()


def test_tiles_line_by_line_and_then_the_whole(text: Path, projector: Path) -> None:
    pixels = picture(300, 200)
    with opened_eyes(projector, text) as eyes:
        prepared = eyes.model.prepare(pixels)
        shown = [eyes.tokenizer.piece(token, special=True).decode() for token in prepared.placed.tokens]
        assert eyes.model.size(300, 200) == (prepared.n_rows, len(shown)) == (7 * 16, 7 * 16 + 9)
    canvas = np.zeros((256, 384, 3), np.uint8)
    canvas[:200, :300] = pixels
    tiles = [canvas[y : y + 128, x : x + 128] for y in (0, 128) for x in (0, 128, 256)]
    for piece, tile in zip(prepared.pieces, [*tiles, resized(pixels, (128, 128), Filter.BILINEAR)], strict=True):
        cut = piece.arrays["patches"].reshape(4, 4, 2, 2, 3, 16, 16)  # cells, patches in a cell, values of a patch
        whole = cut.transpose(0, 2, 5, 1, 3, 6, 4).reshape(128, 128, 3)
        assert np.abs(whole - (tile / 127.5 - 1)).max() < 1e-5
    marks = [name for name in shown if name != "<|patch|>"]
    line = ["<|tile_x_separator|>", "<|tile_x_separator|>", "<|tile_y_separator|>"]
    assert marks == ["<|image_start|>", *line, *line, "<|image|>", "<|image_end|>"]
    assert [row for row in prepared.placed.rows if row >= 0] == list(range(7 * 16))
    assert [name == "<|patch|>" for name in shown] == [row >= 0 for row in prepared.placed.rows]


def test_one_tile_is_the_whole(text: Path, projector: Path) -> None:
    with opened_eyes(projector, text) as eyes:
        placed = eyes.model.prepare(picture(100, 90)).placed
        shown = [eyes.tokenizer.piece(token, special=True).decode() for token in placed.tokens]
    assert shown == ["<|image_start|>", "<|image|>", *["<|patch|>"] * 16, "<|image_end|>"]


def test_no_image_takes_more_than_the_largest(text: Path, projector: Path) -> None:
    with opened_eyes(projector, text) as eyes:
        most = eyes.model.size(*eyes.model.largest())
        assert most == (17 * 16, 17 * 16 + 19)
        assert max(eyes.model.size(*size) for size in ((5000, 5000), (1, 10000), (9000, 10), (4000, 3000))) <= most


def test_tiles_and_whole_against_libmtmd(text: Path, projector: Path) -> None:
    """Wide and tall. It resizes the whole by another filter, and has a tile's rows column by column."""
    with opened_eyes(projector, text) as eyes, MtmdOracle(text, projector, n_ctx=64) as oracle:
        for size in ((256, 128), (128, 384), (384, 256)):
            pixels = picture(*size)
            ours, theirs = eyes.rows(pixels), llama4.row_by_row(oracle.encoded(pixels))
            assert difference(ours[:-16], theirs[:-16]) <= 1e-3
            whole = eyes.rows(resized(pixels, (128, 128), Filter.BICUBIC))
            assert difference(whole, theirs[-16:]) <= 1e-3


def _without(name: str) -> Callable[[Encoder], object]:
    return lambda e: e.tensors.pop(name)


def _reshaped(name: str, shape: tuple[int, ...]) -> Callable[[Encoder], object]:
    return lambda e: e.values(name, shape)


def _with(key: str, value: Any) -> Callable[[Encoder], object]:
    return lambda e: e.keys.update({key: value})


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (_without("v.class_embd"), MissingTensors),
        (_without("v.pre_ln.weight"), MissingTensors),
        (_without("v.blk.2.attn_k.weight"), MissingTensors),
        (_without("mm.model.fc.weight"), MissingTensors),
        (_reshaped("v.position_embd.weight", (64, 96)), FileFormatError),
        (_reshaped("v.class_embd", (95,)), FileFormatError),
        (_reshaped("v.patch_embd.weight", (96, 700)), FileFormatError),
        (_reshaped("mm.model.mlp.1.weight", (192, 96)), FileFormatError),
        (_reshaped("mm.model.fc.weight", (128, 160)), FileFormatError),  # of another text model
        (_with("vision.projector.scale_factor", 3), FileFormatError),
        (_with("vision.image_size", 130), FileFormatError),
        (_with("vision.attention.head_count", 16), FileFormatError),
    ],
)
def test_files_that_are_not_what_they_should_be(
    change: Callable[[Encoder], object], error: type[Exception], text: Path, tmp_path: Path
) -> None:
    encoder = llama4.encoder()
    change(encoder)
    with pytest.raises(error), opened_eyes(encoder.save(tmp_path / "p.gguf"), text):
        pass


def test_a_vocabulary_without_images(projector: Path, tmp_path: Path) -> None:
    text = write_llama4(tmp_path / "t.gguf")
    with pytest.raises(UnsupportedModel, match="image_start"), opened_eyes(projector, text):
        pass
