"""LFM2-VL's eyes: how images are cut, what stands before each piece, and files that are not what they should be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from puna.errors import BadRequest, FileFormatError, MissingTensors, UnsupportedModel
from puna.vision.pixels import Filter, resized
from tests.models.lfm2 import write_lfm2
from tests.vision import lfm2
from tests.vision.encoding import Eyes, opened_eyes, picture
from tests.vision.files import Encoder, add_tokens


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lfm2.write_text(tmp_path_factory.mktemp("text") / "text.gguf")


def shown(eyes: Eyes, width: int, height: int) -> list[str | int]:
    """Tokens by name, and how many rows stand between them."""
    prepared = eyes.model.prepare(picture(width, height))
    placed = prepared.placed
    assert eyes.model.size(width, height) == (prepared.n_rows, len(placed.tokens))
    assert [row for row in placed.rows if row >= 0] == list(range(prepared.n_rows))
    assert not placed.bidirectional
    found: list[str | int] = []
    for token, row in zip(placed.tokens, placed.rows, strict=True):
        if row < 0:
            found.append(eyes.tokenizer.piece(token, special=True).decode())
        elif found and isinstance(found[-1], int):
            found[-1] += 1
        else:
            found.append(1)
    rows_of = [len(piece.arrays["patches"]) // 4 for piece in prepared.pieces]
    assert rows_of == [part for part in found if isinstance(part, int)]
    return found


@pytest.mark.parametrize(
    ("width", "height", "fitted"),
    [
        (256, 256, (8, 8)),
        (400, 496, (12, 16)),  # halves to even numbers: 12.5 and 15.5
        (512, 512, (16, 16)),
        (720, 720, (16, 16)),  # an area of at most 256 cells
        (1000, 300, (29, 8)),  # 31.25 x 9.375 cells, shrunk by 1.07 and rounded down
        (10, 10, (8, 8)),  # of at least 64, rounded up
        (1, 1, (8, 8)),
        (30, 120, (4, 16)),
        (30, 5990, (1, 187)),
    ],
)
def test_a_small_image_is_one_piece_of_whole_cells(
    width: int, height: int, fitted: tuple[int, int], text: Path, tmp_path: Path
) -> None:
    columns, rows = fitted
    pixels = picture(width, height)
    with opened_eyes(lfm2.encoder().save(tmp_path / "p.gguf"), text) as eyes:
        assert shown(eyes, width, height) == ["<|image_start|>", columns * rows, "<|image_end|>"]
        (piece,) = eyes.model.prepare(pixels).pieces
    cut = piece.arrays["patches"].reshape(rows, columns, 2, 2, 3, 16, 16)
    whole = cut.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * 32, columns * 32, 3)
    expected = resized(pixels, (columns * 32, rows * 32), Filter.BILINEAR) / 127.5 - 1
    assert np.abs(whole - expected).max() < 1e-5


@pytest.mark.parametrize(
    ("width", "height", "grid", "thumbnail"),
    [
        (800, 800, (2, 2), 256),  # as near are 3 x 3, but the image has less than half of their area
        (1200, 1200, (3, 3), 256),
        (2560, 1440, (4, 2), 21 * 12),
        (1080, 2340, (2, 4), 10 * 23),
        (4000, 400, (10, 1), 50 * 5),
        (400, 9000, (1, 10), 3 * 75),
    ],
)
def test_a_large_image_is_cut_into_tiles(
    width: int, height: int, grid: tuple[int, int], thumbnail: int, text: Path, tmp_path: Path
) -> None:
    columns, rows = grid
    tiles = [(row, column) for row in range(rows) for column in range(columns)]
    pixels = picture(width, height)
    with opened_eyes(lfm2.encoder().save(tmp_path / "p.gguf"), text) as eyes:
        expected = [part for row, column in tiles for part in (f"<|img_row_{row + 1}_col_{column + 1}|>", 256)]
        last = ["<|img_thumbnail|>", thumbnail, "<|image_end|>"]
        assert shown(eyes, width, height) == ["<|image_start|>", *expected, *last]
        pieces = eyes.model.prepare(pixels).pieces
    filled = resized(pixels, (columns * 512, rows * 512), Filter.BILINEAR) / 127.5 - 1
    for (row, column), piece in zip(tiles, pieces, strict=False):
        cut = piece.arrays["patches"].reshape(16, 16, 2, 2, 3, 16, 16)
        whole = cut.transpose(0, 2, 5, 1, 3, 6, 4).reshape(512, 512, 3)
        assert np.abs(whole - filled[row * 512 :, column * 512 :][:512, :512]).max() < 1e-5


def test_what_the_ancestors_files_may_say(text: Path, tmp_path: Path) -> None:
    def eyes_with(**keys: Any) -> Any:
        path = lfm2.save_as_one(lfm2.encoder(), text, tmp_path / f"{len(keys)}{next(iter(keys))}.gguf", **keys)
        return opened_eyes(path, path)

    with eyes_with(use_thumbnail=False) as eyes:
        assert "<|img_thumbnail|>" not in shown(eyes, 1024, 1024)
    with eyes_with(do_image_splitting=False) as eyes:
        assert shown(eyes, 2048, 2048) == ["<|image_start|>", 256, "<|image_end|>"]
        assert eyes.model.size(*eyes.model.largest())[0] == 256
    with eyes_with(tile_size=64, max_image_tokens=16, min_image_tokens=4) as eyes:
        assert shown(eyes, 200, 200)[:5] == ["<|image_start|>", "<|img_row_1_col_1|>", 4, "<|img_row_1_col_2|>", 4]
        assert eyes.model.size(*eyes.model.largest())[0] == 10 * 4 + 16
    with eyes_with(max_pixels_tolerance=9.0) as eyes:
        assert shown(eyes, 1024, 1024) == ["<|image_start|>", 256, "<|image_end|>"]
    with eyes_with(max_tiles=1, min_tiles=1) as eyes:
        assert shown(eyes, 2048, 2048) == ["<|image_start|>", 256, "<|image_end|>"]


def test_the_largest_image_is_the_one_with_the_most_rows(text: Path, tmp_path: Path) -> None:
    with opened_eyes(lfm2.encoder().save(tmp_path / "p.gguf"), text) as eyes:
        most, _ = eyes.model.size(*eyes.model.largest())
        random = np.random.default_rng(1)
        for width, height in np.exp(random.uniform(0, np.log(20000), (500, 2))).astype(int):
            if max(width, height) <= 200 * min(width, height):
                assert eyes.model.size(int(width), int(height))[0] <= most


def test_a_line_is_no_image(text: Path, tmp_path: Path) -> None:
    with opened_eyes(lfm2.encoder().save(tmp_path / "p.gguf"), text) as eyes:
        for call in (lambda: eyes.model.size(1, 201), lambda: eyes.model.prepare(picture(201, 1))):
            with pytest.raises(BadRequest, match="200 times"):
                call()


def test_a_norm_that_is_not_to_be_used(text: Path, tmp_path: Path) -> None:
    pixels, encoder = picture(64, 64), lfm2.encoder()
    used = lfm2.save_as_one(encoder, text, tmp_path / "used.gguf")
    unused = lfm2.save_as_one(encoder, text, tmp_path / "unused.gguf", **{"projector.use_layernorm": False})
    without = lfm2.encoder()
    without.tensors = {name: values for name, values in encoder.tensors.items() if "input_norm" not in name}
    with (
        opened_eyes(used, used) as a,
        opened_eyes(unused, unused) as b,
        opened_eyes(without.save(tmp_path / "p.gguf"), text) as c,
    ):
        assert np.array_equal(b.rows(pixels), c.rows(pixels))
        assert not np.allclose(a.rows(pixels), b.rows(pixels), atol=0.1)


def _without(name: str) -> Callable[[Encoder], object]:
    return lambda e: e.tensors.pop(name)


def _reshaped(name: str, shape: tuple[int, ...]) -> Callable[[Encoder], object]:
    return lambda e: e.values(name, shape)


def _with(**changes: Any) -> Callable[[Encoder], object]:
    return lambda e: e.keys.update({f"vision.{key}": value for key, value in changes.items()})


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (_without("v.position_embd.weight"), MissingTensors),
        (_without("mm.1.weight"), MissingTensors),
        (_reshaped("v.position_embd.weight", (255, 48)), FileFormatError),
        (_reshaped("v.position_embd.weight", (129**2, 48)), FileFormatError),
        (_reshaped("mm.1.weight", (320, 48)), FileFormatError),
        (_reshaped("mm.input_norm.weight", (48,)), FileFormatError),
        (_with(**{"projector.scale_factor": 3}), FileFormatError),
        (_with(**{"projector.scale_factor": 0}), FileFormatError),
        (_with(tile_size=500), FileFormatError),
        (_with(tile_size=1 << 20), FileFormatError),
        (_with(max_tiles=65), FileFormatError),
        (_with(min_tiles=11), FileFormatError),
        (_with(min_image_tokens=300), FileFormatError),
        (_with(max_pixels_tolerance=float("nan")), FileFormatError),
        (_with(max_tiles=11), UnsupportedModel),  # for which the vocabulary has no tokens
    ],
)
def test_files_that_are_not_what_they_should_be(
    change: Callable[[Encoder], object], error: type[Exception], text: Path, tmp_path: Path
) -> None:
    encoder = lfm2.encoder()
    change(encoder)
    with pytest.raises(error), opened_eyes(encoder.save(tmp_path / "p.gguf"), text):
        pass


@pytest.mark.parametrize("missing", ["<|image_start|>", "<|img_thumbnail|>", "<|img_row_2_col_5|>"])
def test_a_vocabulary_without_a_token(missing: str, tmp_path: Path) -> None:
    text = add_tokens(write_lfm2(tmp_path / "t.gguf"), [token for token in lfm2.TOKENS if token != missing])
    projector = lfm2.encoder().save(tmp_path / "p.gguf")
    with pytest.raises(UnsupportedModel, match=missing.strip("<|>")), opened_eyes(projector, text):
        pass
