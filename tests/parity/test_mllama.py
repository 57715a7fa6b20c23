"""Llama 3.2 Vision with images, against plain numpy: libllama does not have it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from puna.errors import BadRequest, FileFormatError
from puna.kvcache.batch import Encoded, batch
from puna.kvcache.cache import resume_point
from tests.models.dialect import Translation
from tests.models.mllama import write_eyes, write_mllama
from tests.puna_engine import PunaEngine
from tests.scenarios import tokens
from tests.vision import mllama
from tests.vision.encoding import opened_eyes, picture

Floats = npt.NDArray[np.float32]
Images = Sequence[tuple[int, Any]]  # position and rows

# Fused attention sums values in F16.
ENERGY, WORST = 1e-3, 4e-3
N_MOST = 40  # rows of an image: four tiles of ten
N_EMBD = 256

VARIANTS: dict[str, dict[str, Any]] = {
    "f32": {},
    "the first layer and the last look": {"looks": [0, 4]},
    "tied": {"tied": True, "n_silent": 0, "n_padding": 0},
    "gates nearly shut": {"gates": 0.1},
    "f16": {"dtype": "f16"},
}


@pytest.fixture(scope="module", params=VARIANTS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = {"n_silent": 1, "n_padding": 7, **VARIANTS[request.param]}
    return write_mllama(tmp_path_factory.mktemp("mllama") / "m.gguf", seed=3, eyes=False, **options)


@pytest.fixture(scope="module")
def judge(path: Path) -> mllama.Text:
    return mllama.Text(path)


@pytest.fixture(scope="module")
def opened(path: Path) -> Iterator[PunaEngine]:
    with PunaEngine(path, n_ctx=256, n_sequences=3, n_batch=128, n_encoded=N_MOST) as engine:
        yield engine


@pytest.fixture
def engine(opened: PunaEngine) -> PunaEngine:
    opened.forget()
    return opened


def image(n_rows: int, seed: int) -> Floats:
    return np.random.default_rng([n_rows, seed]).standard_normal((n_rows, N_EMBD), dtype=np.float32)


def compare(ours: Floats, theirs: npt.NDArray[np.float64]) -> None:
    n = theirs.shape[-1]
    assert np.isneginf(ours[:, n:]).all()  # tokens without a row of the head
    error = ours[:, :n] - theirs
    worst = np.abs(error).max()
    assert (error**2).sum() / (theirs**2).sum() <= ENERGY
    assert worst / np.abs(theirs).max() <= WORST
    # The same greedy choice, unless both are equally likely within that error.
    chosen = np.take_along_axis(theirs, ours.argmax(-1, keepdims=True), -1)[:, 0]
    assert (chosen >= theirs.max(-1) - 2 * worst).all()


def run(engine: PunaEngine, ids: Sequence[int], images: Images, cuts: Sequence[int], sequence: int = 0) -> Floats:
    """All logits of a text whose steps end at the cuts; an image comes with the step that has its token."""
    found = []
    ends = [*cuts, len(ids)]
    for begin, end in zip([0, *cuts], ends, strict=True):
        new = [(sequence, at, mllama.together(images, i, N_MOST)) for i, (at, _) in enumerate(images) if begin <= at < end]
        n = end - begin
        found.append(engine.decode(ids[begin:end], range(begin, end), [sequence] * n, range(n), images=new).copy())
        engine.cache.check_integrity()
    return np.concatenate(found)


CASES: dict[str, tuple[list[tuple[int, int]], list[int]]] = {  # (position, rows) of images, and where steps end
    "text alone": ([], []),
    "text alone in steps": ([], [7, 8, 20]),
    "an image first": ([(0, 10)], []),
    "an image in the middle": ([(9, 40)], []),
    "an image, then steps": ([(3, 20)], [12, 13, 14, 27]),
    "an image at the end": ([(29, 30)], []),
    "an image that comes with a later step": ([(12, 20)], [12, 20]),
    "a second takes the first's place": ([(2, 40), (15, 10)], [15, 22]),
    "three of them": ([(2, 10), (11, 30), (20, 20)], [11, 20, 21, 25]),
    "one after another": ([(2, 10), (3, 30)], [3, 9]),
}


@pytest.mark.parametrize("case", CASES)
def test_prompts_with_images(case: str, engine: PunaEngine, judge: mllama.Text) -> None:
    places, cuts = CASES[case]
    ids = tokens(30, 1, engine.n_vocab - 8)
    images = [(at, image(n, at)) for at, n in places]
    compare(run(engine, ids, images, cuts), judge(ids, images))


def test_sequences_look_at_images_of_their_own(engine: PunaEngine, judge: mllama.Text) -> None:
    """Three at once, one of them blind; then a step of each, a second image for one."""
    texts = [tokens(n, n, engine.n_vocab - 8) for n in (14, 10, 12)]
    images: list[list[tuple[int, Floats]]] = [[(4, image(20, 1))], [], [(0, image(40, 2))]]
    n_first = [9, 5, 7]
    first = [(s, i) for s, n in enumerate(n_first) for i in range(n)]
    new = [(s, at, rows) for s, found in enumerate(images) for at, rows in found]
    sequences, positions = [s for s, _ in first], [i for _, i in first]
    ours = engine.decode([texts[s][i] for s, i in first], positions, sequences, range(len(first)), images=new).copy()
    expected = [judge(text, found) for text, found in zip(texts, images, strict=True)]
    compare(ours, np.concatenate([rows[:n] for rows, n in zip(expected, n_first, strict=True)]))
    images[0].append((9, image(30, 3)))
    expected[0] = judge(texts[0], images[0])
    second = [(s, n_first[s] + i) for s in range(3) for i in range(4)]
    sequences, positions = [s for s, _ in second], [i for _, i in second]
    new = [(0, 9, images[0][1][1])]
    ours = engine.decode([texts[s][i] for s, i in second], positions, sequences, range(len(second)), images=new).copy()
    compare(ours, np.concatenate([rows[n : n + 4] for rows, n in zip(expected, n_first, strict=True)]))
    engine.cache.check_integrity()


def test_outputs_may_be_some_of_the_rows(engine: PunaEngine, judge: mllama.Text) -> None:
    ids, rows = tokens(20, 5, engine.n_vocab - 8), image(20, 4)
    wanted = [1, 6, 19]
    ours = engine.decode(ids, range(20), [0] * 20, wanted, images=[(0, 5, rows)]).copy()
    compare(ours, judge(ids, [(5, rows)])[wanted])


def test_a_sequence_goes_on_after_its_image(engine: PunaEngine, judge: mllama.Text) -> None:
    """Forgetting what follows the image, a copied prefix, and forgetting the image as well."""
    ids, rows = tokens(24, 6, engine.n_vocab - 8), image(40, 5)
    run(engine, ids[:16], [(4, rows)], [])
    assert resume_point(engine.cache, 0, 10) == 10
    engine.forget(0, 10)
    other = [*ids[:10], *tokens(8, 7, engine.n_vocab - 8)]
    ours = engine.decode(other[10:], range(10, 18), [0] * 8, range(8)).copy()
    compare(ours, judge(other, [(4, rows)])[10:])
    engine.cache.copy_prefix(0, 1, 10)
    ours = engine.decode(ids[10:], range(10, 24), [1] * 14, range(14)).copy()
    compare(ours, judge(ids, [(4, rows)])[10:])
    engine.forget(1, 4)
    ours = engine.decode(ids[4:], range(4, 24), [1] * 20, range(20)).copy()
    compare(ours, judge(ids)[4:])


def test_behind_a_second_image_there_is_no_way_back_to_the_first(engine: PunaEngine) -> None:
    ids = tokens(20, 8, engine.n_vocab - 8)
    run(engine, ids, [(2, image(10, 1)), (10, image(10, 2))], [10])
    assert [resume_point(engine.cache, 0, p) for p in (2, 6, 10, 11)] == [2, 2, 2, 11]


def test_a_removed_middle_takes_its_image_along(engine: PunaEngine) -> None:
    """Later rows look at it no more, or go on looking at it where its token stays."""
    ids, rows = tokens(20, 9, engine.n_vocab - 8), image(10, 3)
    layers = {}
    for begin, end in ((2, 8), (6, 12)):
        engine.forget()
        run(engine, ids, [(3, rows)], [])
        engine.cache.remove(0, begin, end)
        engine.cache.check_integrity()
        assert engine.cache.length(0) == 14
        engine.decode([5], [14], [0], [0])
        cache: Any = engine.cache
        layers[begin] = cache.visible()
    assert layers[2] is None
    assert layers[6] is not None


def test_a_step_that_sees_no_image_computes_none_of_those_layers(engine: PunaEngine) -> None:
    ids = tokens(8, 2, engine.n_vocab - 8)
    engine.decode(ids, range(8), [0] * 8, [7])
    blind = engine.forward._built
    assert blind is not None
    n_blind = blind.ctx.n_nodes  # type: ignore[attr-defined]  # of ggml's
    engine.decode(ids, range(8, 16), [0] * 8, [7], images=[(0, 8, image(10, 1))])
    sighted = engine.forward._built
    assert sighted is not None
    assert sighted.ctx.n_nodes > n_blind + 2 * 15  # type: ignore[attr-defined]


def test_graphs_are_built_ahead_behind_an_image(path: Path, judge: mllama.Text) -> None:
    """The next step's, while one is computed: prompts in pieces, then steps of one, with an image and before one."""
    ids, rows = tokens(40, 11, 300), image(20, 6)
    with PunaEngine(path, n_ctx=256, n_sequences=2, n_encoded=N_MOST, builds_ahead=True) as engine:
        found, cuts = [], [0, 4, 10, 22, *range(23, 41)]
        for (begin, end), after in zip(pairwise(cuts), [*cuts[2:], 41], strict=True):
            n, n_next = end - begin, after - end
            coming = [(0, 10, 20)] if end == 10 else []
            encoded = [Encoded(*image) for image in coming]
            engine.forward.expect(batch([0] * n_next, range(end, after), [0] * n_next, range(n_next), encoded=encoded))
            new = [(0, 10, rows)] if begin == 10 else []
            if begin == 4:
                engine.store(0, rows[:7])  # between two steps, and the rest before the next
            found.append(engine.decode(ids[begin:end], range(begin, end), [0] * n, range(n), images=new).copy())
            engine.cache.check_integrity()
        assert engine.forward.n_used_ahead >= 2
        compare(np.concatenate(found), judge(ids, [(10, rows)]))


def test_without_eyes_nothing_is_kept_for_images(path: Path) -> None:
    with PunaEngine(path, n_ctx=64) as engine:
        assert not hasattr(engine.cache, "parts")
        ids = tokens(8, 2, engine.n_vocab - 8)
        compare(engine.decode(ids, range(8), [0] * 8, range(8)), mllama.Text(path)(ids))


@pytest.mark.parametrize("most", [1, 7, 16])
def test_an_image_may_be_stored_in_parts_while_others_compute(most: int, engine: PunaEngine, judge: mllama.Text) -> None:
    """Two users whose images are stored by turns, one of them a second time, and one who has an image already."""
    texts = [tokens(16, n, engine.n_vocab - 8) for n in range(3)]
    images = [[(0, image(20, 1)), (9, image(40, 2))], [(9, image(30, 3))], [(0, image(10, 4))]]
    found: list[list[Any]] = [[], [], []]

    def go_on(sequence: int, begin: int, end: int, new: Any = ()) -> None:
        n = end - begin
        rows = engine.decode(texts[sequence][begin:end], range(begin, end), [sequence] * n, range(n), images=new)
        found[sequence].append(rows.copy())
        engine.cache.check_integrity()

    go_on(0, 0, 9, [(0, *images[0][0])])
    go_on(1, 0, 9)
    go_on(2, 0, 2, [(2, *images[2][0])])
    for at in range(2, 8):
        for sequence in (0, 1):
            _, rows = images[sequence][-1]
            begin = engine.homes.n_stored(sequence)
            if begin < len(rows):
                engine.store(sequence, rows[: begin + most], most)
        go_on(2, at, at + 1)
    for sequence in (0, 1):
        engine.store(sequence, images[sequence][-1][1], most)
    go_on(2, 8, 16)
    for sequence in (0, 1):
        go_on(sequence, 9, 16, [(sequence, *images[sequence][-1])])
    for text, shown, ours in zip(texts, images, found, strict=True):
        compare(np.concatenate(ours), judge(text, shown))


def test_parts_give_what_the_whole_gives(engine: PunaEngine) -> None:
    ids, rows = tokens(12, 4, engine.n_vocab - 8), image(40, 9)
    for sequence, most in ((0, 40), (1, 7)):
        engine.store(sequence, rows, most)
    whole, parts = (
        engine.decode(ids, range(12), [sequence] * 12, range(12), images=[(sequence, 0, rows)]).copy() for sequence in (0, 1)
    )
    n_predicted = engine.n_vocab - 8
    np.testing.assert_allclose(whole[:, :n_predicted], parts[:, :n_predicted], atol=ENERGY * np.abs(whole[:, :n_predicted]).max())


def test_an_image_that_was_given_up_leaves_no_trace(engine: PunaEngine, judge: mllama.Text) -> None:
    ids = tokens(20, 12, engine.n_vocab - 8)
    run(engine, ids[:8], [(2, image(20, 1))], [])
    engine.store(0, image(40, 2)[:11], 5)
    assert resume_point(engine.cache, 0, 8) == 2
    engine.forget(0, 2)
    compare(run_on(engine, ids, 2, [(6, image(30, 3))]), judge(ids, [(6, image(30, 3))])[2:])


def run_on(engine: PunaEngine, ids: Sequence[int], begin: int, images: Images) -> Floats:
    n = len(ids) - begin
    new = [(0, at, rows) for at, rows in images]
    return engine.decode(ids[begin:], range(begin, len(ids)), [0] * n, range(n), images=new).copy()


def test_no_more_rows_at_once_than_a_step_has_and_their_memory_is_known(path: Path) -> None:
    with PunaEngine(path, n_ctx=256, n_batch=16, n_encoded=N_MOST) as engine:
        assert engine.homes.most_rows == 16
        before = sum(device.graph for device in engine.backend.memory().devices)
        assert before >= sum(engine.homes.reserve_sizes()) > 0
        engine.store(0, image(N_MOST, 1))
        engine.decode([1], [0], [0], [0], images=[(0, 0, image(N_MOST, 1))])
        assert sum(device.graph for device in engine.backend.memory().devices) == before


def test_rows_that_do_not_fit_are_refused_and_change_nothing(engine: PunaEngine, judge: mllama.Text) -> None:
    ids = tokens(6, 4, engine.n_vocab - 8)
    with pytest.raises(BadRequest, match="41 encoder rows"):
        engine.decode(ids, range(6), [0] * 6, [5], images=[(0, 2, image(N_MOST + 1, 1))])
    engine.forget()
    compare(engine.decode(ids, range(6), [0] * 6, range(6)), judge(ids))


def test_from_pictures_to_logits(tmp_path: Path) -> None:
    """Both parts together, in one file and in two: wide, tall, small and large pictures."""
    one = write_mllama(tmp_path / "one.gguf", seed=3, n_silent=1)
    text = write_mllama(tmp_path / "text.gguf", seed=3, n_silent=1, eyes=False)
    apart = write_eyes(tmp_path / "eyes.gguf", seed=3)
    sizes = [(90, 30), (30, 100), (20, 20), (200, 180)]
    see, read = mllama.Eyes(one), mllama.Text(one)
    for path, eyes_path in ((one, one), (text, apart)):
        with opened_eyes(eyes_path, path) as eyes, PunaEngine(path, n_ctx=64, n_encoded=N_MOST) as engine:
            ids = tokens(20, 1, engine.n_vocab - 1)
            for size in sizes:
                engine.forget()
                ours = run(engine, ids, [(5, eyes.rows(picture(*size)))], [11])
                compare(ours, read(ids, [(5, see(picture(*size)))]))


@pytest.mark.parametrize("layers", [[1], [1, 2], [1, 3, 9], []])
def test_layers_that_are_not_what_the_file_says(layers: list[int], tmp_path: Path) -> None:
    file = Translation(write_mllama(tmp_path / "m.gguf", eyes=False))
    _, element = file.values["attention.cross_attention_layers"]
    file.values["attention.cross_attention_layers"] = layers, element
    with pytest.raises(FileFormatError, match="cross_attention_layers"), PunaEngine(file.save(tmp_path / "w.gguf", "mllama")):
        pass
