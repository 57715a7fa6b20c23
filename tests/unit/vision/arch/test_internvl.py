"""InternVL's eyes: tiles, tokens, and files that are not what they should be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from puna.errors import FileFormatError, MissingTensors, UnsupportedModel
from puna.vision.metadata import CLIP_MEAN, CLIP_STD
from puna.vision.pixels import Filter, resized
from tests.tiny import write_llama
from tests.vision import internvl
from tests.vision.encoding import Floats, difference, opened_eyes, picture
from tests.vision.files import Encoder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return internvl.write_text(tmp_path_factory.mktemp("text") / "text.gguf")


@pytest.mark.parametrize(
    ("width", "height", "grid"), [(50, 50, (1, 1)), (300, 160, (2, 1)), (40, 500, (1, 4)), (900, 30, (4, 1))]
)
def test_an_image_fills_its_tiles(width: int, height: int, grid: tuple[int, int], text: Path, tmp_path: Path) -> None:
    columns, rows = grid
    pixels = picture(width, height)
    with opened_eyes(internvl.encoder().save(tmp_path / "p.gguf"), text) as eyes:
        prepared = eyes.model.prepare(pixels)
        placed = prepared.placed
        n_tiles = columns * rows
        assert len(prepared.pieces) == n_tiles + (n_tiles > 1)
        assert eyes.model.size(width, height) == (prepared.n_rows, len(placed.tokens))
        shown = [eyes.tokenizer.piece(placed.tokens[i], special=True) for i in (0, -1)]
        assert shown == [b"<img>", b"</img>"]
        assert list(placed.rows) == [-1, *range(len(prepared.pieces) * 9), -1]
    filled = resized(pixels, (columns * 84, rows * 84), Filter.BICUBIC)
    tiles = [filled[y * 84 : (y + 1) * 84, x * 84 : (x + 1) * 84] for y in range(rows) for x in range(columns)]
    tiles += [resized(pixels, (84, 84), Filter.BICUBIC)] if n_tiles > 1 else []
    for tile, piece in zip(tiles, prepared.pieces, strict=True):
        cut = piece.arrays["patches"].reshape(3, 3, 2, 2, 3, 14, 14).transpose(0, 2, 5, 1, 3, 6, 4).reshape(84, 84, 3)
        assert np.abs(cut - (tile / 255.0 - CLIP_MEAN) / CLIP_STD).max() < 1e-5
        assert piece.arrays["places"][0] == 0
        assert sorted(piece.arrays["places"]) == list(range(37))


def in_numpy(e: Encoder, patches: Floats, places: npt.NDArray[np.int32], *, is_large: bool) -> Floats:
    """One tile through the encoder, from its published description."""
    w = {name: values.astype(np.float64) for name, values in e.tensors.items()}
    n_embd, n_heads = e.keys["vision.embedding_length"], e.keys["vision.attention.head_count"]

    def norm(x: Any, name: str, eps: float = 1e-6, *, by_root: bool = False) -> Any:
        x = x if by_root else x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w[f"{name}.weight"] + w.get(f"{name}.bias", 0)

    def linear(x: Any, name: str) -> Any:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    def gelu(x: Any) -> Any:
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    x = patches @ w["v.patch_embd.weight"].reshape(n_embd, -1).T + w["v.patch_embd.bias"]
    x = np.concatenate([w["v.class_embd"][None], x]) + w["v.position_embd.weight"][places]
    for i in range(e.keys["vision.block_count"]):
        blk = f"v.blk.{i}"
        y = norm(x, f"{blk}.ln1", by_root=is_large)
        q, k, v = (linear(y, f"{blk}.attn_{part}") for part in "qkv")
        if is_large:
            q, k = norm(q, f"{blk}.attn_q_norm", by_root=True), norm(k, f"{blk}.attn_k_norm", by_root=True)
        q, k, v = (part.reshape(len(x), n_heads, -1).swapaxes(0, 1) for part in (q, k, v))
        scores = np.exp(q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]))
        mixed = (scores / scores.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(len(x), -1)
        x = x + linear(mixed, f"{blk}.attn_out") * w[f"{blk}.ls1.weight"]
        bent = gelu(linear(norm(x, f"{blk}.ln2", by_root=is_large), f"{blk}.ffn_up"))
        x = x + linear(bent, f"{blk}.ffn_down") * w[f"{blk}.ls2.weight"]
    cells = norm(x[1:].reshape(-1, 4 * n_embd), "mm.model.mlp.0", 1e-5)
    found: Floats = linear(gelu(linear(cells, "mm.model.mlp.1")), "mm.model.mlp.3")
    return found


@pytest.mark.parametrize("is_large", [False, True])
def test_rows_are_those_of_the_published_description(is_large: bool, text: Path, tmp_path: Path) -> None:
    """Also with the norms of the large encoder, which libmtmd tells by sizes that no test can have."""
    encoder, pixels = internvl.encoder(is_large=is_large), picture(84, 84)
    with opened_eyes(encoder.save(tmp_path / "p.gguf"), text) as eyes:
        (piece,) = eyes.model.prepare(pixels).pieces
        expected = in_numpy(encoder, piece.arrays["patches"], piece.arrays["places"], is_large=is_large)
        assert difference(eyes.rows(pixels), expected) < 1e-3


def test_the_class_and_the_scales_take_part(text: Path, tmp_path: Path) -> None:
    pixels, encoder = picture(84, 84), internvl.encoder()
    with opened_eyes(encoder.save(tmp_path / "p.gguf"), text) as eyes:
        rows = eyes.rows(pixels)
    for name in ("v.class_embd", "v.blk.1.ls1.weight", "v.blk.2.ls2.weight"):
        changed = internvl.encoder()
        changed.tensors[name] = 2 * changed.tensors[name]
        with opened_eyes(changed.save(tmp_path / "q.gguf"), text) as eyes:
            assert difference(eyes.rows(pixels), rows) > 1e-2, name


def _with(key: str, value: Any) -> Callable[[Encoder], object]:
    return lambda e: e.keys.update({f"vision.{key}": value})


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda e: e.tensors.pop("v.class_embd"), MissingTensors),
        (lambda e: e.tensors.pop("mm.model.mlp.3.weight"), MissingTensors),
        (lambda e: e.values("v.position_embd.weight", (36, 96)), FileFormatError),
        (lambda e: e.values("mm.model.mlp.0.weight", (96,)), FileFormatError),
        (_with("projector.scale_factor", 4), FileFormatError),
        (_with("preproc_max_tiles", 65), FileFormatError),
        (_with("preproc_min_tiles", 5), FileFormatError),
        (lambda e: e.values("v.blk.0.attn_q_norm.weight", (96,)), UnsupportedModel),  # of the largest encoder
    ],
)
def test_files_that_are_not_what_they_should_be(
    change: Callable[[Encoder], object], error: type[Exception], text: Path, tmp_path: Path
) -> None:
    encoder = internvl.encoder()
    change(encoder)
    with pytest.raises(error), opened_eyes(encoder.save(tmp_path / "p.gguf"), text):
        pass


def test_a_vocabulary_without_images(tmp_path: Path) -> None:
    text, projector = write_llama(tmp_path / "t.gguf"), internvl.encoder().save(tmp_path / "p.gguf")
    with pytest.raises(UnsupportedModel, match="img"), opened_eyes(projector, text):
        pass
