"""A real encoder in parts: what lies between two of them is all that the next needs, and its memory is known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from puna.gguf.reader import GGUFFile
from puna.ml.ggml.backend import GGMLBackend
from puna.runner.images.graphs import GraphEncoder
from puna.tokenizer.tokenizer import Tokenizer
from puna.vision.model import VisionModel
from puna.vision.registry import open_vision
from tests.thorough import first
from tests.vision import gemma3, pixtral, qwen
from tests.vision.encoding import picture
from tests.vision.files import Encoder

N_LAYERS = 3
KINDS: dict[str, tuple[Callable[[Path], Path], Callable[[], Encoder]]] = {
    "gemma3": (gemma3.write_text, gemma3.encoder),
    "pixtral": (pixtral.write_text, pixtral.encoder),
    "qwen2.5-vl": (lambda path: qwen.write_text(path, architecture="qwen2vl"), qwen.encoder25),
    "qwen3-vl": (lambda path: qwen.write_text(path, architecture="qwen3vl"), qwen.encoder3),
}


@pytest.fixture(scope="module", params=KINDS)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[GGMLBackend, VisionModel]]:
    write_text, encoder = KINDS[request.param]
    folder = tmp_path_factory.mktemp("parts")
    text, projector = write_text(folder / "text.gguf"), encoder().save(folder / "projector.gguf")
    tokenizer = Tokenizer(text)
    with GGUFFile.open(text) as reads, GGUFFile.open(projector) as sees:
        backend = GGMLBackend(sees, n_threads=1)
        vision = open_vision(sees, backend, reads, tokenizer)
        backend.allocate()
        backend.load(lambda _share: None)
        yield backend, vision
        backend.close()
    tokenizer.close()


def test_parts_give_what_the_whole_gives(opened: tuple[GGMLBackend, VisionModel]) -> None:
    backend, vision = opened
    encoder = GraphEncoder(backend, vision)
    for piece in vision.prepare(picture(168, 168)).pieces:
        whole = encoder.run(piece, None, 0, encoder.n_layers)
        assert whole is not None
        for cut in range(1, encoder.n_layers):
            between = encoder.run(piece, None, 0, cut)
            found = encoder.run(piece, between, cut, encoder.n_layers)
            assert found is not None
            assert (found[0] == whole[0]).all()
        states = None
        for index in range(encoder.n_layers):
            states = encoder.run(piece, states, index, index + 1)
        assert states is not None
        assert (states[0] == whole[0]).all()


def test_a_part_may_be_aborted(opened: tuple[GGMLBackend, VisionModel]) -> None:
    backend, vision = opened
    encoder = GraphEncoder(backend, vision)
    (piece, *_) = vision.prepare(picture(168, 168)).pieces
    backend.abort()
    assert encoder.run(piece, None, 0, encoder.n_layers) is None
    backend.clear_abort()
    assert encoder.run(piece, None, 0, encoder.n_layers) is not None


@pytest.mark.parametrize("opened", first(3, KINDS), indirect=True, scope="module")
def test_the_largest_image_takes_what_was_measured(opened: tuple[GGMLBackend, VisionModel]) -> None:
    backend, vision = opened
    encoder = GraphEncoder(backend, vision)
    width, height = vision.largest()
    largest = vision.prepare(np.zeros((height, width, 3), np.uint8))
    measured = sum(encoder.reserve_sizes(largest))
    encoder.reserve(largest)
    taken = sum(device.graph for device in backend.memory().devices)
    assert taken <= measured * 1.05
    for piece in largest.pieces:
        states = None
        for index in range(encoder.n_layers):
            states = encoder.run(piece, states, index, index + 1)
        encoder.run(piece, None, 0, encoder.n_layers)
    assert sum(device.graph for device in backend.memory().devices) == taken
