"""A screenshot and a photo, read and prepared: what the published processors of each family make of the same files.

tests/unit/vision/published.json has of each what was made by transformers' processors, with the sizes and colours of the
published checkpoints: how large each tile is, the mean of its channels, and some values. Qwen's were told to have no more
rows than Puna has of an image.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from puna.vision.images.decoders import Decoders
from puna.vision.model import Piece, Pixels, Prepared
from tests.models.mllama import write_mllama
from tests.vision import gemma3, gemma4, idefics3, internvl, lfm2, llama4, llava, pixtral, qwen
from tests.vision.encoding import Eyes, opened_eyes
from tests.vision.files import Encoder
from tests.vision.scenes import SCENES

Floats = npt.NDArray[np.float32]
Size = tuple[int, int]  # height, width

PUBLISHED = json.loads((Path(__file__).parent / "published.json").read_text())

# Of values between -2 and 3. What torch resizes, or rounds to 8 bits of mantissa, differs in the last of 256 steps.
WORST, WORST_OF_TORCH = 2e-3, 2.5e-2


class Family(NamedTuple):
    text: Callable[[Path], Path]
    encoder: Callable[[], Encoder]
    patch: int
    cell: int = 1
    n_beside: int = 0  # rows of the result that are no patches', of each tile
    worst: float = WORST


def _internvl() -> Encoder:
    found = internvl.encoder(patch=14, side=32, tiles=(1, 12))
    found.keys |= {"vision.image_mean": [0.485, 0.456, 0.406], "vision.image_std": [0.229, 0.224, 0.225]}
    return found


FAMILIES = {
    "gemma3": Family(gemma3.write_text, partial(gemma3.encoder, patch=14, side=64, cell=4), 14, 4),
    "gemma4": Family(gemma4.write_text, partial(gemma4.encoder, patch=16, cell=3, n_places=840), 16, 3),
    "idefics3": Family(idefics3.write_text, partial(idefics3.encoder, patch=14, side=26, cell=2), 14, 2),
    "smolvlm": Family(idefics3.write_text, partial(idefics3.encoder, patch=16, side=32, cell=4, longest=2048), 16, 4),
    "internvl": Family(internvl.write_text, _internvl, 14, 2),
    "lfm2-vl": Family(lfm2.write_text, lfm2.encoder, 16, 2, worst=WORST_OF_TORCH),
    "llama4": Family(llama4.write_text, partial(llama4.encoder, patch=14, cell=2, tile=336), 14, 2, worst=WORST_OF_TORCH),
    "llava": Family(llava.write_text, partial(llava.encoder, patch=14, side=24), 14),
    "llava-1.6": Family(
        llava.write_text,
        partial(llava.encoder, patch=14, side=24, unpad=True, pinpoints=[336, 672, 672, 336, 672, 672, 1008, 336, 336, 1008]),
        14,
        n_beside=1,
    ),
    "mistral3": Family(pixtral.write_text, partial(pixtral.encoder, patch=14, image_size=1540, cell=2), 14, 2),
    "pixtral": Family(pixtral.write_text, partial(pixtral.encoder, patch=16, image_size=1024, cell=1), 16),
    "qwen2-vl": Family(partial(qwen.write_text, architecture="qwen2vl"), qwen.encoder25, 14, 2),
    "qwen3-vl": Family(partial(qwen.write_text, architecture="qwen3vl"), qwen.encoder3, 16, 2),
}


@pytest.fixture(scope="module")
def decoders() -> Iterator[Decoders]:
    found = Decoders()
    yield found
    found.close()


@pytest.fixture(scope="module", params=[*FAMILIES, "mllama"])
def eyes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Eyes]]:
    folder = tmp_path_factory.mktemp("published")
    if request.param == "mllama":
        text = projector = write_mllama(folder / "one.gguf", image_size=560, patch_size=14)
    else:
        family = FAMILIES[request.param]
        text, projector = family.text(folder / "text.gguf"), family.encoder().save(folder / "projector.gguf")
    with opened_eyes(projector, text) as found:
        yield request.param, found


def in_order(patches: Floats, size: Size, patch: int, cell: int) -> Floats:
    """The image that was cut: [height, width, 3] of patches cell by cell."""
    rows, columns = (side // patch // cell for side in size)
    cut = patches.reshape(rows, columns, cell, cell, 3, patch, patch)
    return np.array(cut.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * cell * patch, columns * cell * patch, 3))


def tiles(name: str, prepared: Prepared, sizes: list[Size]) -> list[Floats]:
    if name == "mllama":
        (piece,) = prepared.pieces
        return [in_order(part, size, 14, 1) for part, size in zip(np.split(piece.arrays["patches"], 4), sizes, strict=True)]
    family = FAMILIES[name]

    def values(piece: Piece) -> Floats:
        cut: Floats = piece.arrays["patches"]
        if "window_0" not in piece.arrays:
            return cut
        numbers = np.array([row for row in prepared.placed.rows if row >= 0])
        return np.array(cut.reshape(len(numbers), -1)[numbers].reshape(cut.shape))

    return [in_order(values(p), size, family.patch, family.cell) for p, size in zip(prepared.pieces, sizes, strict=True)]


def read(decoders: Decoders, scene: str) -> Pixels:
    return decoders.pixels(SCENES[scene]())


@pytest.mark.parametrize("scene", SCENES)
def test_an_image_becomes_what_its_publishers_make_of_it(scene: str, eyes: tuple[str, Eyes], decoders: Decoders) -> None:
    name, opened = eyes
    expected: dict[str, Any] = PUBLISHED[name][scene]
    prepared = opened.model.prepare(read(decoders, scene))
    sizes = [(height, width) for height, width in expected["tiles"]]
    found = tiles(name, prepared, sizes)
    worst = FAMILIES[name].worst if name in FAMILIES else WORST
    assert np.abs(np.array([tile.mean((0, 1), np.float64) for tile in found]) - expected["means"]).max() < worst
    apart = [abs(float(found[tile][y, x, channel]) - value) for tile, y, x, channel, value in expected["samples"]]
    assert max(apart) < worst
    if name in FAMILIES:
        family = FAMILIES[name]
        n_rows = sum(h * w // (family.patch * family.cell) ** 2 + family.n_beside for h, w in sizes)
        assert prepared.n_rows == n_rows


def test_the_photo_is_upright(decoders: Decoders) -> None:
    pixels = read(decoders, "photo")
    assert pixels.shape == (4000, 3000, 3)
    assert (pixels[650, 2350] > (240, 220, 120)).all(), "the sun, above and to the right"
