"""LLaVA's eyes, against a forward pass in double precision written from what was published; libmtmd differs from that."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from puna.errors import FileFormatError, MissingTensors
from puna.vision.metadata import CLIP_MEAN, CLIP_STD
from puna.vision.pixels import Filter, on_canvas, resized, squared
from tests.vision import llava
from tests.vision.encoding import difference, opened_eyes, picture
from tests.vision.files import Encoder

Doubles = Any


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llava.write_text(tmp_path_factory.mktemp("text") / "text.gguf")


class Reference:
    """Of an encoder's tensors: CLIP's layers (Radford et al. 2021) and LLaVA's network (Liu et al. 2023)."""

    def __init__(self, e: Encoder) -> None:
        self.t = {name: values.astype(np.float64) for name, values in e.tensors.items()}
        self.keys = e.keys
        self.is_swapped = self.t["v.blk.0.ffn_down.weight"].shape[1] == e.keys["vision.embedding_length"]

    def linear(self, name: str, x: Doubles) -> Doubles:
        return x @ self.t[f"{name}.weight"].T + self.t[f"{name}.bias"]

    def norm(self, name: str, x: Doubles) -> Doubles:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + self.keys["vision.attention.layer_norm_epsilon"])
        return scaled * self.t[f"{name}.weight"] + self.t[f"{name}.bias"]

    def layer(self, prefix: str, x: Doubles) -> Doubles:
        n_heads = self.keys["vision.attention.head_count"]
        y = self.norm(f"{prefix}.ln1", x)
        q, k, v = (self.linear(f"{prefix}.attn_{c}", y).reshape(len(x), n_heads, -1).swapaxes(0, 1) for c in "qkv")
        scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (shares / shares.sum(-1, keepdims=True)) @ v
        x = x + self.linear(f"{prefix}.attn_out", mixed.swapaxes(0, 1).reshape(x.shape))
        up, down = ("ffn_down", "ffn_up") if self.is_swapped else ("ffn_up", "ffn_down")
        y = self.linear(f"{prefix}.{up}", self.norm(f"{prefix}.ln2", x))
        return x + self.linear(f"{prefix}.{down}", y / (1 + np.exp(-1.702 * y)))

    def rows(self, square: Doubles) -> Doubles:
        """Of an image of the encoder's size."""
        values = (square / 255.0 - CLIP_MEAN) / CLIP_STD
        kernel = self.t["v.patch_embd.weight"]
        patch, side = kernel.shape[-1], len(values) // kernel.shape[-1]
        cut = values.reshape(side, patch, side, patch, 3)
        x = np.einsum("iyjxc,ocyx->ijo", cut, kernel).reshape(side**2, -1)
        x = np.concatenate([self.t["v.class_embd"][None], x]) + self.t["v.position_embd.weight"]
        x = self.norm("v.pre_ln", x)
        for i in range(self.keys["vision.block_count"]):
            x = self.layer(f"v.blk.{i}", x)
        y = self.linear("mm.0", x[1:])
        y = y / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
        return self.linear("mm.2", y) if "mm.2.weight" in self.t else y


@pytest.mark.parametrize("swapped", [True, False])
@pytest.mark.parametrize("one_matrix", [True, False])
def test_rows_are_those_that_were_published(swapped: bool, one_matrix: bool, text: Path, tmp_path: Path) -> None:
    encoder = llava.encoder(swapped=swapped, one_matrix=one_matrix)
    with opened_eyes(encoder.save(tmp_path / "p.gguf"), text) as eyes:
        for width, height in ((84, 84), (300, 100), (20, 50), (1, 1)):
            pixels = picture(width, height)
            square = squared(pixels, 84, Filter.BICUBIC, (122, 116, 104))
            assert difference(eyes.rows(pixels), Reference(encoder).rows(square)) < 1e-3
            placed = eyes.model.prepare(pixels).placed
            assert list(placed.rows) == list(range(36))
            assert not placed.bidirectional
            assert eyes.model.size(width, height) == (36, 36)


@pytest.mark.parametrize(("width", "height"), [(168, 168), (400, 100), (60, 300), (20, 20)])
def test_rows_of_tiles_end_with_a_learned_one(width: int, height: int, text: Path, tmp_path: Path) -> None:
    """As LLaVA 1.6 was published: the whole image, then rows of the canvas without its margins."""
    pinpoints = [84, 168, 168, 84, 168, 168, 252, 84]
    canvases = {(168, 168): (168, 168), (400, 100): (252, 84), (60, 300): (84, 168), (20, 20): (84, 168)}
    canvas = canvases[width, height]
    encoder = llava.encoder(pinpoints=pinpoints, unpad=True)
    pixels, reference = picture(width, height), Reference(encoder)
    with opened_eyes(encoder.save(tmp_path / "p.gguf"), text) as eyes:
        prepared = eyes.model.prepare(pixels)
        found = eyes.rows(pixels)[list(prepared.placed.rows)]
        assert eyes.model.size(width, height) == (prepared.n_rows, len(prepared.placed.tokens))
        assert eyes.model.largest() == (168, 168)
    across, down = canvas[0] // 84, canvas[1] // 84
    whole = on_canvas(pixels, canvas, Filter.BICUBIC, (0, 0, 0)).reshape(down, 84, across, 84, 3)
    grid = np.stack([[reference.rows(whole[y, :, x]).reshape(6, 6, -1) for x in range(across)] for y in range(down)])
    grid = grid.swapaxes(1, 2).reshape(down * 6, across * 6, -1)
    if width / height > across / down:
        margin = (down * 6 - int(height * across * 6 / width)) // 2
        grid = grid[margin : down * 6 - margin]
    else:
        margin = (across * 6 - int(width * down * 6 / height)) // 2
        grid = grid[:, margin : across * 6 - margin]
    newline = reference.t["model.image_newline"][None]
    lines = itertools.chain.from_iterable((row, newline) for row in grid)
    expected = np.concatenate([reference.rows(resized(pixels, (84, 84), Filter.BICUBIC)), *lines])
    assert found.shape == expected.shape
    assert difference(found, expected) < 1e-3


def test_tiles_follow_one_another_where_the_file_says_nothing_else(text: Path, tmp_path: Path) -> None:
    encoder = llava.encoder(pinpoints=[168, 84, 84, 168])
    with opened_eyes(encoder.save(tmp_path / "p.gguf"), text) as eyes:
        assert eyes.model.size(84, 84) == (36, 36)  # not larger than a tile
        assert eyes.model.size(200, 84) == (108, 108)
        assert list(eyes.model.prepare(picture(200, 84)).placed.rows) == list(range(108))


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
        (_without("mm.0.weight"), MissingTensors),
        (_without("v.class_embd"), FileFormatError),  # there is a position for it
        (_without("mm.2.weight"), FileFormatError),  # a bias alone
        (_reshaped("mm.0.weight", (256, 96)), FileFormatError),
        (_reshaped("mm.2.weight", (64, 256)), FileFormatError),  # of another text model
        (_reshaped("v.pre_ln.weight", (47,)), FileFormatError),
        (_with(feature_layer=[4]), FileFormatError),
        (_with(feature_layer=[1, 3]), FileFormatError),  # the network takes values of one
        (_with(image_grid_pinpoints=[84, 168, 84]), FileFormatError),
        (_with(image_grid_pinpoints=[84, 100]), FileFormatError),
        (_with(image_grid_pinpoints=[84 * 65, 84]), FileFormatError),
        (_with(image_mean=[0.5]), FileFormatError),
    ],
)
def test_files_that_are_not_what_they_should_be(
    change: Callable[[Encoder], object], error: type[Exception], text: Path, tmp_path: Path
) -> None:
    encoder = llava.encoder()
    change(encoder)
    with pytest.raises(error), opened_eyes(encoder.save(tmp_path / "p.gguf"), text):
        pass
