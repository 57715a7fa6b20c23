"""A real encoder in parts: what lies between two of them is all that the next needs, and its memory is known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from puna.gguf.reader import GGUFFile
from puna.ml.ggml.backend import GGMLBackend
from puna.runner.images.course import Course
from puna.runner.images.graphs import GraphEncoder
from puna.tokenizer.tokenizer import Tokenizer
from puna.vision.model import Piece, VisionModel
from puna.vision.registry import open_vision
from tests.models.mllama import write_mllama
from tests.thorough import first
from tests.vision import internvl, llava, qwen
from tests.vision.encoding import Floats, difference, picture
from tests.vision.files import Encoder
from tests.vision.table import FAMILIES

# Products of few rows sum in another order.
WORST = 1e-4

# Attention of fewer rows than this sums in half precision, layer after layer: a last bit that differs before it turns roundings.
FEW = 64
WORST_OF_FEW = 2e-3  # few roundings of 2**-11

Files = tuple[Path, Path]  # of the text model, and of what sees


def _written(folder: Path, text: Callable[[Path], Path], encoder: Callable[[], Encoder]) -> Files:
    return text(folder / "text.gguf"), encoder().save(folder / "projector.gguf")


def _mllama(folder: Path) -> Files:
    one = write_mllama(folder / "one.gguf")
    return one, one


KINDS: dict[str, Callable[[Path], Files]] = {
    **{name: partial(_written, text=one.write_text, encoder=one.encoder) for name, one in FAMILIES.items()},
    "internvl": partial(_written, text=internvl.write_text, encoder=internvl.encoder),
    "llava": partial(_written, text=llava.write_text, encoder=partial(llava.encoder, has_class=False, features=[0, 2, 3])),
    "llava with row ends": partial(
        _written, text=llava.write_text, encoder=partial(llava.encoder, pinpoints=[84, 168, 168, 84], unpad=True)
    ),
    "mllama": _mllama,
    # Windows of several sizes, and layers without any.
    "qwen2.5-vl in windows": partial(
        _written, text=partial(qwen.write_text, architecture="qwen2vl"), encoder=partial(qwen.encoder25, n_layers=4)
    ),
}


class Opened:
    def __init__(self, text: Path, projector: Path) -> None:
        self.tokenizer = Tokenizer(text)
        self.reads, self.sees = GGUFFile.open(text), GGUFFile.open(projector)
        self.backend = GGMLBackend(self.sees, n_threads=1)
        self.vision: VisionModel = open_vision(self.sees, self.backend, self.reads, self.tokenizer)
        width, height = self.vision.largest()
        self.largest = self.vision.prepare(np.zeros((height, width, 3), np.uint8))
        self.encoder = GraphEncoder(self.backend, self.vision, self.largest)
        self.backend.allocate()
        self.backend.load(lambda _share: None)

    def close(self) -> None:
        self.backend.close()
        self.reads.close()
        self.sees.close()
        self.tokenizer.close()


@pytest.fixture(scope="module", params=KINDS)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    found = Opened(*KINDS[request.param](tmp_path_factory.mktemp("parts")))
    yield found
    found.close()


def whole(opened: Opened, piece: Piece) -> Floats:
    found = opened.encoder.run(piece, None, 0, opened.encoder.n_layers)
    assert found is not None
    return np.array(found[0])


def pieces(opened: Opened) -> list[Piece]:
    """Of one image, one of each shape."""
    return list({piece.key: piece for piece in opened.vision.prepare(picture(185, 130)).pieces}.values())


def test_parts_give_what_the_whole_gives(opened: Opened) -> None:
    encoder = opened.encoder
    for piece in pieces(opened):
        for cut in range(1, encoder.n_layers):
            found = encoder.run(piece, encoder.run(piece, None, 0, cut), cut, encoder.n_layers)
            assert found is not None
            assert (found[0] == whole(opened, piece)).all()
        states = None
        for index in range(encoder.n_layers):
            states = encoder.run(piece, states, index, index + 1)
        assert states is not None
        assert (states[0] == whole(opened, piece)).all()


def is_same(found: Floats, expected: Floats, piece: Piece) -> bool:
    assert piece.divided is not None
    return difference(found, expected) <= (WORST_OF_FEW if piece.divided.n < FEW else WORST)


def advance(course: Course, most: int) -> int:
    """So many rows, or as few as stay together; how many."""
    stage = course.stage
    assert stage is not None
    n = stage.rows(max(most, stage.n_each))
    assert course.run_rows(n)
    return n


@pytest.mark.parametrize("most", [1, 150, 1 << 20])
def test_rows_of_a_layer_give_what_the_whole_gives(most: int, opened: Opened) -> None:
    for piece in pieces(opened):
        course = Course(opened.encoder, piece)
        while course.rows is None:
            advance(course, most)
        assert is_same(course.rows, whole(opened, piece), piece)


def test_images_of_other_sizes_one_after_another(opened: Opened) -> None:
    """Parts of as many rows have as much to compute, but who sees whom is told by arrays that are as large as the image."""
    for width, height in ((64, 64), (300, 90), (640, 512), (90, 330), (672, 672)):
        (piece, *_) = opened.vision.prepare(picture(width, height)).pieces
        course = Course(opened.encoder, piece)
        while course.layer < 2:
            advance(course, 1)


def test_a_layer_in_parts_between_whole_ones(opened: Opened) -> None:
    for piece in pieces(opened):
        course, n = Course(opened.encoder, piece), 0
        while course.rows is None:
            if course.is_between and course.is_begun and course.n_layers_left and n % 2:
                assert course.run_layers(1)
                n += 1
            else:
                before = course.layer
                advance(course, 48)
                n += course.layer > before
        assert is_same(course.rows, whole(opened, piece), piece)


def test_a_part_may_be_aborted(opened: Opened) -> None:
    (piece, *_) = pieces(opened)
    course = Course(opened.encoder, piece)
    opened.backend.abort()
    assert opened.encoder.run(piece, None, 0, opened.encoder.n_layers) is None
    assert not course.run_rows(8)
    opened.backend.clear_abort()
    assert opened.encoder.run(piece, None, 0, opened.encoder.n_layers) is not None


@pytest.mark.parametrize("opened", first(3, KINDS), indirect=True, scope="module")
def test_the_largest_image_takes_what_was_measured(opened: Opened) -> None:
    backend, encoder = opened.backend, opened.encoder
    largest = {piece.key: piece for piece in opened.largest.pieces}.values()
    measured = sum(encoder.reserve_sizes())
    encoder.reserve()
    taken = sum(device.graph for device in backend.memory().devices)
    assert taken <= measured * 1.05
    for piece in largest:
        course = Course(encoder, piece)
        while not (course.is_begun and course.layer):
            advance(course, 1 << 20)
        assert course.run_layers(1)
        assert course.run_layers(encoder.n_layers)
    assert sum(device.graph for device in backend.memory().devices) == taken
