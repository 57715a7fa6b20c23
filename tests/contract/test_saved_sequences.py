"""A sequence that left the cache and came back, on real models: it goes on as one that never moved, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from puna.kvcache.cache import NotSupported, RememberingCache, SavingCache, resume_point
from puna.kvcache.cells import CacheFull
from puna.kvcache.recurrent import RecurrentCache
from puna.ml.tensor import DType
from tests.models.deepseek2 import write_deepseek2
from tests.models.gpt_oss import write_gpt_oss
from tests.models.lfm2 import write_lfm2
from tests.models.mamba import write_mamba2
from tests.models.qwen3next import write_qwen3next
from tests.puna_engine import PunaEngine
from tests.tiny import write_gemma3, write_llama

Floats = npt.NDArray[np.float32]

MOVES, OTHER, STAYS = 0, 1, 2
N_CTX = 768

MODELS: dict[str, tuple[Callable[..., Path], DType]] = {
    "llama": (write_llama, DType.F16),
    "llama-q8_0": (write_llama, DType.Q8_0),
    "llama-q4_0": (write_llama, DType.Q4_0),
    "gemma3": (write_gemma3, DType.F16),  # windows beside full attention
    "gemma3-q8_0": (write_gemma3, DType.Q8_0),
    "gpt-oss": (write_gpt_oss, DType.F16),
    "deepseek2": (write_deepseek2, DType.F16),  # values in the keys
    "lfm2": (write_lfm2, DType.F16),  # states beside full attention
    "qwen3next": (write_qwen3next, DType.F16),
    "mamba2": (write_mamba2, DType.F16),  # states alone
}


@pytest.fixture(scope="module", params=MODELS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PunaEngine]:
    write, cache_type = MODELS[request.param]
    path = write(tmp_path_factory.mktemp("tiny") / "model.gguf")
    with PunaEngine(path, n_ctx=N_CTX, n_batch=64, n_sequences=3, n_threads=1, cache_type=cache_type) as engine:
        yield engine


@pytest.fixture(autouse=True)
def empty(engine: PunaEngine) -> None:
    for sequence in range(3):
        engine.cache.remove(sequence, 0)


def text(count: int, seed: int = 1) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(3, 100, count).tolist()
    return tokens


def compute(engine: PunaEngine, sequence: int, tokens: list[int], begin: int = 0) -> None:
    for start in range(begin, len(tokens), 64):
        part = tokens[start : start + 64]
        engine.decode(part, range(start, start + len(part)), [sequence] * len(part), [len(part) - 1])


def written(engine: PunaEngine, sequence: int, tokens: list[int]) -> Floats:
    """Feed a sequence some tokens one by one; the logits after each."""
    begin = engine.cache.length(sequence)
    return np.array([engine.decode([t], [begin + i], [sequence], [0])[0].copy() for i, t in enumerate(tokens)])


def a_prompt_and_an_answer(engine: PunaEngine, sequence: int, n_prompt: int, n_answer: int = 12) -> None:
    """The last tokens of the prompt in a step of their own, as the engine computes them where states are cached."""
    prompt = text(n_prompt)
    compute(engine, sequence, prompt[:-8])
    compute(engine, sequence, prompt, n_prompt - 8)
    written(engine, sequence, text(n_answer, 2))


def saved_and_forgotten(engine: PunaEngine) -> Any:
    """What the moving sequence held, after its cells and states were used for something else."""
    cache = saving(engine)
    n_bytes = cache.saved_bytes(MOVES)
    saved = cache.save(MOVES)
    assert saved.n_bytes == n_bytes > 0
    cache.remove(MOVES, 0)
    for sequence in (MOVES, OTHER):
        compute(engine, sequence, text(300, 3 + sequence))
        cache.remove(sequence, 0)
    return saved


def one_moves_to_another_place(engine: PunaEngine) -> None:
    """Of two equal sequences, MOVES is held by OTHER then."""
    for sequence in (MOVES, STAYS):
        a_prompt_and_an_answer(engine, sequence, 170)
    saving(engine).restore(OTHER, saved_and_forgotten(engine), 182)


def saving(engine: PunaEngine) -> SavingCache:
    assert isinstance(engine.cache, SavingCache)
    return engine.cache


def both_go_on(engine: PunaEngine, moved: int) -> tuple[Floats, Floats]:
    """Logits of the sequence that moved and of the one that stayed, over the same further tokens; one by one and in a step."""
    found = []
    for sequence in (moved, STAYS):
        one_by_one = written(engine, sequence, text(10, 5))
        n, more = engine.cache.length(sequence), text(30, 6)
        at_once = engine.decode(more, range(n, n + 30), [sequence] * 30, range(30)).copy()
        found.append(np.concatenate([one_by_one, at_once]))
    engine.cache.check_integrity()
    return found[0], found[1]


@pytest.mark.parametrize("target", [MOVES, OTHER])
def test_it_goes_on_from_its_end_as_if_it_had_never_left(engine: PunaEngine, target: int) -> None:
    for sequence in (MOVES, STAYS):
        a_prompt_and_an_answer(engine, sequence, 170)
    saved = saved_and_forgotten(engine)
    saving(engine).restore(target, saved, 182)
    moved, stayed = both_go_on(engine, target)
    np.testing.assert_array_equal(moved, stayed)


def test_it_goes_on_from_further_back_wherever_the_one_that_stayed_can(engine: PunaEngine) -> None:
    for sequence in (MOVES, STAYS):
        a_prompt_and_an_answer(engine, sequence, 170)
    saved = saved_and_forgotten(engine)
    points = {resume_point(engine.cache, STAYS, n) for n in range(182)} - {181}  # one before the end is no checkpoint
    assert [saved.resume_point(n) for n in range(181)] == [resume_point(engine.cache, STAYS, n) for n in range(181)]
    assert points >= {0, 162}
    saving(engine).restore(OTHER, saved, 162)
    engine.cache.remove(STAYS, 162)
    moved, stayed = both_go_on(engine, OTHER)
    np.testing.assert_array_equal(moved, stayed)


def test_it_goes_back_after_it_has_come_back(engine: PunaEngine) -> None:
    one_moves_to_another_place(engine)
    for sequence in (OTHER, STAYS):
        assert resume_point(engine.cache, sequence, 165) in (162, 165)
        engine.cache.remove(sequence, resume_point(engine.cache, sequence, 165))
    moved, stayed = both_go_on(engine, OTHER)
    np.testing.assert_array_equal(moved, stayed)


def test_a_long_text_of_which_windows_have_forgotten_much(engine: PunaEngine) -> None:
    """What a window keeps went around its home; it comes back to the same places, so its sums are rounded as they were."""
    for sequence in (MOVES, STAYS):
        a_prompt_and_an_answer(engine, sequence, 600)
    saved = saved_and_forgotten(engine)
    assert [saved.resume_point(n) for n in range(0, 611, 5)] == [resume_point(engine.cache, STAYS, n) for n in range(0, 611, 5)]
    saving(engine).restore(OTHER, saved, 612)
    moved, stayed = both_go_on(engine, OTHER)
    np.testing.assert_array_equal(moved, stayed)


@pytest.mark.parametrize("engine", ["gemma3", "gemma3-q8_0", "gpt-oss"], indirect=True)
@pytest.mark.parametrize("point", [571, 400, 333, 100, 65, 12])
@pytest.mark.parametrize("way", ["goes back", "copied", "saved"])
def test_windows_go_on_from_any_point_of_a_prompt_as_those_that_came_no_further(engine: PunaEngine, way: str, point: int) -> None:
    """The other has computed just so much, in the same steps; logits of what follows are equal, bit for bit."""
    assert isinstance(engine.cache, RememberingCache)
    assert engine.cache.forgets
    engine.cache.remember(64 << 20, lambda: 64 << 20)
    compute(engine, STAYS, text(600)[:point])
    compute(engine, MOVES, text(600)[:point])
    compute(engine, MOVES, text(600), point)
    assert resume_point(engine.cache, MOVES, point) == point
    moved_to = MOVES if way == "goes back" else OTHER
    if way == "goes back":
        engine.cache.remove(MOVES, point)
    elif way == "copied":
        engine.cache.copy_prefix(MOVES, OTHER, point)
    else:
        saving(engine).restore(OTHER, saved_and_forgotten(engine), point)
    moved, stayed = both_go_on(engine, moved_to)
    np.testing.assert_array_equal(moved, stayed)


def test_it_comes_back_beside_one_that_holds_a_part_of_it_and_is_saved_once_more(engine: PunaEngine) -> None:
    for sequence in (MOVES, STAYS):
        a_prompt_and_an_answer(engine, sequence, 170)
    engine.cache.copy_prefix(MOVES, OTHER, 170)
    saved = saving(engine).save(MOVES)
    engine.cache.remove(MOVES, 0)
    saving(engine).restore(MOVES, saved, 182)
    again = saving(engine).save(MOVES)
    assert again.n_bytes == saved.n_bytes
    engine.cache.remove(MOVES, 0)
    engine.cache.remove(OTHER, 0)
    saving(engine).restore(OTHER, again, 182)
    moved, stayed = both_go_on(engine, OTHER)
    np.testing.assert_array_equal(moved, stayed)


def test_a_context_moves_after_it_has_come_back(engine: PunaEngine) -> None:
    one_moves_to_another_place(engine)
    for sequence in (OTHER, STAYS):
        with suppress(NotSupported):  # states cannot lose a middle
            engine.cache.remove(sequence, 20, 60)
    assert engine.cache.length(OTHER) == engine.cache.length(STAYS)
    moved, stayed = both_go_on(engine, OTHER)
    np.testing.assert_array_equal(moved, stayed)


def test_without_room_it_does_not_come_back_and_the_others_go_on(engine: PunaEngine) -> None:
    for sequence in (MOVES, STAYS):
        a_prompt_and_an_answer(engine, sequence, 170)
    saved = saving(engine).save(MOVES)
    engine.cache.remove(MOVES, 0)
    compute(engine, OTHER, text(3 * N_CTX - 182 - 100, 7))
    if not isinstance(engine.cache, RecurrentCache):  # states alone always find room
        with pytest.raises(CacheFull):
            saving(engine).restore(MOVES, saved, 182)
        engine.cache.check_integrity()
        assert (engine.cache.length(MOVES), engine.cache.n_free) == (0, 100)
        engine.cache.remove(OTHER, 0)
    saving(engine).restore(MOVES, saved, 182)
    moved, stayed = both_go_on(engine, MOVES)
    np.testing.assert_array_equal(moved, stayed)


def test_bytes_beyond_a_tensor_are_refused(engine: PunaEngine) -> None:
    """The library would end the process."""
    pool = engine.backend.storage(0, DType.F32, 4, 2)
    for offset, count in ((29, 4), (-1, 4), (0, 33)):
        with pytest.raises(ValueError, match="of a tensor that has 32"):
            engine.backend.read(pool, offset, np.zeros(count, np.uint8))
        with pytest.raises(ValueError, match="of a tensor that has 32"):
            engine.backend.write(pool, offset, np.zeros(count, np.uint8))
