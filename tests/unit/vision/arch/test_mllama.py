"""Llama 3.2's eyes: how an image becomes tiles, and what each layer makes of them, against plain numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from puna.errors import BadRequest, FileFormatError, MissingTensors, UnsupportedModel
from puna.vision.arch.mllama import MLlamaVision
from puna.vision.look import LookAtOnce
from tests.models.dialect import Translation
from tests.models.mllama import IMAGE, write_eyes, write_mllama
from tests.models.row import TinyFile
from tests.vision import mllama
from tests.vision.encoding import Eyes, Floats, Inputs, difference, opened_eyes, picture

# Width and height: of one tile, all arrangements of tiles, larger than all of them, and sizes that hardly fit.
SIZES = [
    (42, 42),
    (20, 10),
    (84, 42),
    (40, 90),
    (84, 84),
    (300, 300),
    (500, 60),
    (60, 500),
    (126, 40),
    (170, 42),
    (1, 1),
    (1, 900),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mllama(tmp_path_factory.mktemp("mllama") / "one.gguf", n_silent=1)


def states(eyes: Eyes, pixels: Any) -> list[Floats]:
    """The image's own rows before each layer and after the last."""
    (piece,) = eyes.model.prepare(pixels).pieces
    n_own = len(piece.arrays["patches"]) // 9 * 10
    found = []
    for n_layers in range(eyes.model.n_layers + 1):
        ctx = eyes.backend.context(eyes.model.max_nodes())
        inputs = Inputs(ctx, piece)
        state = eyes.model.begin(ctx, inputs)
        for index in range(n_layers):
            state = eyes.model.layer(LookAtOnce(ctx), state, inputs, index)
        ctx.output(state[0])
        inputs.set()
        assert ctx.compute()
        found.append(ctx.values(state[0])[:n_own].copy())
        ctx.close()
    return found


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_an_image_becomes_tiles(width: int, height: int, path: Path) -> None:
    pixels = picture(width, height)
    tiles, n_tiles, ratio = mllama.processed(pixels, 4, 42)
    with opened_eyes(path, path) as eyes:
        prepared = eyes.model.prepare(pixels)
        assert eyes.model.size(width, height) == (prepared.n_rows, 1) == (10 * n_tiles, 1)
    (piece,) = prepared.pieces
    whole = piece.arrays["patches"].reshape(n_tiles, 3, 3, 3, 14, 14).transpose(0, 3, 1, 4, 2, 5).reshape(n_tiles, 3, 42, 42)
    assert np.abs(whole - tiles[:n_tiles]).max() < 1e-5
    assert piece.arrays["tiles"].tolist() == [4 * ratio + i for i in range(4)]
    assert list(prepared.placed.rows) == [-1]


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_what_is_seen_is_what_the_published_model_sees(width: int, height: int, path: Path) -> None:
    pixels = picture(width, height)
    expected = mllama.Eyes(path)(pixels)
    with opened_eyes(path, path) as eyes:
        rows = eyes.rows(pixels)
        assert rows.shape == expected.shape
        assert difference(rows, expected.astype(np.float32)) < 1e-3


@pytest.mark.parametrize(("width", "height"), [(42, 42), (40, 90), (300, 300)])
def test_layer_by_layer(width: int, height: int, path: Path) -> None:
    pixels, judge = picture(width, height), mllama.Eyes(path)
    judge(pixels)
    with opened_eyes(path, path) as eyes:
        found = states(eyes, pixels)
    assert len(found) == len(judge.states) == 7
    for ours, theirs in zip(found, judge.states, strict=True):
        assert difference(ours, theirs.astype(np.float32)) < 1e-3


VARIETIES: dict[str, dict[str, Any]] = {
    "five rows a tile": {"image_size": 14, "patch_size": 7, "n_local": 2, "taken": [0]},
    "no gates": {"gated": False},
    "names changed about": {"swapped": True},
    "the last state too, nothing else": {"taken": [4]},
    "no state beside the last": {"taken": []},
    "two tiles": {"max_tiles": 2},
    "one tile": {"max_tiles": 1},
    "nothing beyond the tiles": {"n_global": 0},
}


@pytest.mark.parametrize("variety", VARIETIES)
def test_varieties(variety: str, tmp_path: Path) -> None:
    path = write_mllama(tmp_path / "one.gguf", **VARIETIES[variety])
    with opened_eyes(path, path) as eyes:
        for width, height in ((42, 42), (90, 50), (30, 80)):
            expected = mllama.Eyes(path)(picture(width, height)).astype(np.float32)
            assert difference(eyes.rows(picture(width, height)), expected) < 1e-3


def test_the_eyes_may_be_a_file_of_their_own(path: Path, tmp_path: Path) -> None:
    text = write_mllama(tmp_path / "text.gguf", eyes=False, n_silent=1)
    with opened_eyes(write_eyes(tmp_path / "eyes.gguf"), text) as apart, opened_eyes(path, path) as together:
        for width, height in SIZES[:5]:
            assert np.array_equal(apart.rows(picture(width, height)), together.rows(picture(width, height)))


def test_layers_may_be_computed_one_by_one(path: Path) -> None:
    with opened_eyes(path, path) as eyes:
        assert difference(eyes.rows(picture(100, 60), at_once=False), eyes.rows(picture(100, 60))) < 1e-6


def test_one_token_stands_for_an_image(path: Path) -> None:
    with opened_eyes(path, path) as eyes:
        assert eyes.model.is_cross_attended
        placed = eyes.model.prepare(picture(200, 20)).placed
        assert [eyes.tokenizer.piece(token, special=True) for token in placed.tokens] == [IMAGE.encode()]


def test_the_largest_image_takes_all_tiles(path: Path) -> None:
    with opened_eyes(path, path) as eyes:
        assert eyes.model.size(*eyes.model.largest()) == (40, 1)


def test_an_image_without_pixels(path: Path) -> None:
    with opened_eyes(path, path) as eyes, pytest.raises(BadRequest, match="0 x 5"):
        eyes.model.size(0, 5)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"max_tiles": 17}, FileFormatError, "max_num_tiles"),
        ({"taken": [3, 1]}, FileFormatError, "ascend"),
        ({"taken": [5]}, FileFormatError, "intermediate_layers_indices"),
    ],
)
def test_files_that_are_not_what_they_should_be(
    changes: dict[str, Any], error: type[Exception], says: str, tmp_path: Path
) -> None:
    path = write_mllama(tmp_path / "one.gguf", **changes)
    with pytest.raises(error, match=says), opened_eyes(path, path):
        pass


def test_a_part_that_is_missing_or_of_another_size(path: Path, tmp_path: Path) -> None:
    other = TinyFile("llama", marks=[IMAGE], n_embd=128).save(tmp_path / "text.gguf")
    with pytest.raises(FileFormatError, match=r"mm\.0"), opened_eyes(path, other):
        pass
    names = ("v.class_embd", "v.post_tile_position_embd.weight", "v.global.blk.1.attn_out.weight")
    for name in (*names, "v.global.blk.0.attn_gate", "v.global.blk.1.ffn_gate"):
        changed = Translation(path)
        del changed.tensors[name]
        without = changed.save(tmp_path / "without.gguf", "mllama")
        with pytest.raises(MissingTensors, match=name), opened_eyes(without, without):
            pass


def test_a_vocabulary_without_images(path: Path, tmp_path: Path) -> None:
    text = TinyFile("llama").save(tmp_path / "text.gguf")
    with pytest.raises(UnsupportedModel, match="image"), opened_eyes(path, text):
        pass


def test_the_class_is_found(path: Path) -> None:
    with opened_eyes(path, path) as eyes:
        assert isinstance(eyes.model, MLlamaVision)
