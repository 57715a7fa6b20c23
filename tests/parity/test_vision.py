"""What an image is encoded to and how it stands among tokens, against libmtmd on the same files and pixels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from puna.vision.images.decoders import Decoders
from puna.vision.model import Pixels
from tests.mtmd_oracle import MARKER, MtmdOracle
from tests.vision.encoding import Eyes, difference, opened_eyes, picture
from tests.vision.scenes import SCENES
from tests.vision.table import CASES, CASES_IN_ONE, FAMILIES, Family

# libmtmd rounds pixels to half precision before the first product, whatever the weights are.
MOST = 1e-3


class Beside:
    def __init__(self, family: Family, variant: str, folder: Path) -> None:
        self.family, self.encoder = family, family.encoder(**family.variants[variant])
        self.sizes = [*family.alone, *family.others]
        self.text = family.write_text(folder / "text.gguf")
        self.eyes = Eyes(self.encoder.save(folder / "projector.gguf"), self.text)
        self.oracle = MtmdOracle(self.text, family.file(self.encoder).save(folder / "theirs.gguf"))

    def close(self) -> None:
        self.oracle.close()
        self.eyes.close()


@pytest.fixture(scope="module", params=CASES, ids=["-".join(case) for case in CASES])
def beside(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Beside]:
    name, variant = request.param
    found = Beside(FAMILIES[name], variant, tmp_path_factory.mktemp(name))
    yield found
    found.close()


def check_rows(beside: Beside, pixels: Pixels) -> None:
    expected = beside.oracle.encoded(beside.family.given(pixels, beside.encoder))
    ours, theirs = beside.family.compared(beside.eyes, beside.encoder, pixels, expected)
    assert ours.shape == theirs.shape, pixels.shape
    assert difference(ours, theirs) < MOST, pixels.shape


def check_tokens(beside: Beside, pixels: Pixels) -> None:
    family, tokenizer = beside.family, beside.eyes.tokenizer
    prepared = beside.eyes.model.prepare(pixels)
    chunks = beside.oracle.chunks(f"the fox{family.around.format(MARKER)}the dog", [family.given(pixels, beside.encoder)])
    expected: list[int | None] = []
    for chunk in chunks:
        expected += chunk.tokens or [None] * chunk.n_tokens
    placed = prepared.placed
    ours = family.seen(beside.eyes, placed)
    before, after = tokenizer.encode("the fox"), tokenizer.encode("the dog", add_special=False)
    assert [*before, *ours, *after] == expected, pixels.shape
    height, width, _ = pixels.shape
    assert beside.eyes.model.size(width, height) == (prepared.n_rows, len(placed.tokens))
    both_ways = {chunk.kind: beside.oracle.sees_both_ways(chunk) for chunk in chunks}
    assert both_ways["image"] is family.sees_both_ways is bool(placed.bidirectional)


def test_rows_are_libmtmds(beside: Beside) -> None:
    for size in beside.sizes:
        check_rows(beside, picture(*size))


def test_tokens_around_an_image_are_libmtmds(beside: Beside) -> None:
    for size in beside.sizes:
        check_tokens(beside, picture(*size))


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("name", ["idefics3", "gemma3", "pixtral"])
def test_a_screenshot_and_a_photo_are_to_libmtmd_what_they_are_here(name: str, scene: str, tmp_path: Path) -> None:
    """Files as people send them. Idefics' are resized by libmtmd itself, as was published; of the others it gets what was."""
    decoders, beside = Decoders(), Beside(FAMILIES[name], "f32", tmp_path)
    pixels = decoders.pixels(SCENES[scene]())
    check_rows(beside, pixels)
    check_tokens(beside, pixels)
    beside.close()
    decoders.close()


@pytest.mark.parametrize(("name", "variant"), CASES_IN_ONE)
def test_both_kinds_of_file_see_the_same(name: str, variant: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    assert family.save_as_one is not None
    encoder, text = family.encoder(**family.variants[variant]), family.write_text(tmp_path / "text.gguf")
    one = family.save_as_one(encoder, text, tmp_path / "one.gguf")
    with opened_eyes(one, one) as together, opened_eyes(encoder.save(tmp_path / "projector.gguf"), text) as apart:
        for width, height in [*family.alone, *family.others]:
            pixels = picture(width, height)
            assert difference(together.rows(pixels), apart.rows(pixels)) < MOST
            ours, theirs = (eyes.model.prepare(pixels).placed for eyes in (together, apart))
            assert (ours.tokens, ours.rows, ours.n_positions) == (theirs.tokens, theirs.rows, theirs.n_positions)
            assert np.array_equal(ours.axes, theirs.axes)  # type: ignore[arg-type]  # of what has none, both are None


def test_layers_may_be_computed_one_by_one(beside: Beside) -> None:
    pixels = picture(*beside.sizes[-1])
    assert difference(beside.eyes.rows(pixels, at_once=False), beside.eyes.rows(pixels)) < 1e-6


def test_an_image_that_differs_in_a_corner_is_another(beside: Beside) -> None:
    """So that a test above which compares what depends on nothing would be seen."""
    width, height = beside.sizes[0]
    pixels = picture(width, height)
    changed = pixels.copy()
    changed[-height // 4 :, -width // 4 :] ^= 255
    assert difference(beside.eyes.rows(changed), beside.eyes.rows(pixels)) > 10 * MOST
    assert np.isfinite(beside.eyes.rows(changed)).all()
