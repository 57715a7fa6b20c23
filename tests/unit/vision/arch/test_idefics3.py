"""Idefics 3's and SmolVLM's eyes: tiles and what stands before them, and files that are not what they should be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from puna.errors import FileFormatError, MissingTensors, UnsupportedModel
from puna.vision.pixels import Filter, resized
from tests.tiny import write_llama
from tests.vision import idefics3
from tests.vision.encoding import opened_eyes, picture
from tests.vision.files import Encoder, add_tokens

AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return idefics3.write_text(tmp_path_factory.mktemp("text") / "text.gguf")


@pytest.mark.parametrize(
    ("width", "height", "grid"),
    # Of tiles of 84 pixels, the longer side 336.
    [(336, 336, (4, 4)), (2560, 1440, (4, 3)), (1440, 2560, (3, 4)), (10, 10, (4, 4)), (4000, 10, (4, 1)), (1, 900, (1, 4))],
)
def test_an_image_is_as_long_as_the_file_says(width: int, height: int, grid: tuple[int, int], text: Path, tmp_path: Path) -> None:
    columns, rows = grid
    pixels = picture(width, height)
    with opened_eyes(idefics3.encoder().save(tmp_path / "p.gguf"), text) as eyes:
        prepared = eyes.model.prepare(pixels)
        placed = prepared.placed
        assert (
            eyes.model.size(width, height)
            == (prepared.n_rows, len(placed.tokens))
            == ((columns * rows + 1) * 4, len(placed.rows))
        )
        names = [
            eyes.tokenizer.piece(token, special=True).decode()
            for token, row in zip(placed.tokens, placed.rows, strict=True)
            if row < 0
        ]
    lines = [[part for c in range(columns) for part in (AROUND, f"<row_{r + 1}_col_{c + 1}>")] for r in range(rows)]
    ends = ["\n"] * (rows - 1) + ["\n\n"]
    expected = [part for line, end in zip(lines, ends, strict=True) for part in [*line, end]]
    assert names == [*expected, AROUND, WHOLE, AROUND]
    assert [row for row in placed.rows if row >= 0] == list(range(prepared.n_rows))
    assert len(prepared.pieces) == columns * rows + 1
    last = prepared.pieces[-1].arrays["patches"].reshape(2, 2, 3, 3, 3, 14, 14).transpose(0, 2, 5, 1, 3, 6, 4).reshape(84, 84, 3)
    long = 336
    short = int(long / (max(width, height) / min(width, height)))
    short += short % 2
    size = (long, max(1, short)) if width >= height else (max(1, short), long)
    filled = resized(resized(pixels, size, Filter.LANCZOS), (columns * 84, rows * 84), Filter.LANCZOS)
    assert np.abs(last - (resized(filled, (84, 84), Filter.LANCZOS) / 127.5 - 1)).max() < 1e-5


def test_an_image_of_one_tile_is_the_whole_alone(text: Path, tmp_path: Path) -> None:
    with opened_eyes(idefics3.encoder(longest=84).save(tmp_path / "p.gguf"), text) as eyes:
        placed = eyes.model.prepare(picture(200, 150)).placed
        shown = [eyes.tokenizer.piece(token, special=True).decode() for token in placed.tokens]
        assert (shown[:2], shown[-1:], len(shown)) == ([AROUND, WHOLE], [AROUND], 7)
        assert eyes.model.size(200, 150) == (4, 7)
        assert eyes.model.largest() == (84, 84)


def _with(key: str, value: Any) -> Callable[[Encoder], object]:
    return lambda e: e.keys.update({f"vision.{key}": value})


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda e: e.tensors.pop("mm.model.fc.weight"), MissingTensors),
        (lambda e: e.tensors.pop("v.post_ln.weight"), MissingTensors),
        (lambda e: e.values("mm.model.fc.weight", (256, 96)), FileFormatError),
        (lambda e: e.values("v.position_embd.weight", (35, 96)), FileFormatError),
        (_with("projector.scale_factor", 4), FileFormatError),
        (_with("projector.scale_factor", 7), FileFormatError),
        (_with("preproc_image_size", 84 * 9), FileFormatError),
        (_with("preproc_image_size", 0), FileFormatError),
        (_with("preproc_image_size", 84 * 5), UnsupportedModel),  # the vocabulary has no names for so many tiles
    ],
)
def test_files_that_are_not_what_they_should_be(
    change: Callable[[Encoder], object], error: type[Exception], text: Path, tmp_path: Path
) -> None:
    encoder = idefics3.encoder()
    change(encoder)
    with pytest.raises(error), opened_eyes(encoder.save(tmp_path / "p.gguf"), text):
        pass


@pytest.mark.parametrize("missing", [AROUND, WHOLE, "<row_4_col_4>"])
def test_a_vocabulary_without_a_token(missing: str, tmp_path: Path) -> None:
    text = add_tokens(write_llama(tmp_path / "t.gguf"), [token for token in idefics3.TOKENS if token != missing])
    projector = idefics3.encoder().save(tmp_path / "p.gguf")
    with pytest.raises(UnsupportedModel, match=missing), opened_eyes(projector, text):
        pass
