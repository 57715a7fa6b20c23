"""A model's logits are the same to the last bit whatever is computed in the same step, and with any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from puna.gguf.reader import GGUFFile
from puna.native.ggml import TYPE_F16, TYPE_Q8_0
from tests import needs
from tests.models.table import ENCODERS, ROWS
from tests.packed import ALL_TYPES
from tests.puna_engine import PunaEngine
from tests.scenarios import tokens
from tests.tiny import write_bert, write_llama

needs.kernels()

N_PROMPT, N_DECODED = 90, 4
COMMON = ("llama", "qwen3moe", "gemma3", "gpt-oss")
# Some of their matrices are multiplied by ggml, which sums one column in another order than several.
LEFT_OUT = ("deepseek2", "gemma3n")


def variants() -> Iterator[Any]:
    """A quantised file of each architecture."""
    for name, row in ROWS.items():
        options = [o for o in row.variants.values() if o.get("dtype") in ALL_TYPES]
        if options and name not in ENCODERS and name not in LEFT_OUT:
            yield pytest.param(name, options[0], id=name, marks=[] if name in COMMON else pytest.mark.thorough)


@pytest.mark.parametrize("cache_type", [TYPE_F16, TYPE_Q8_0], ids=["f16", "q8_0"])
@pytest.mark.parametrize(("name", "options"), list(variants()))
def test_logits_do_not_depend_on_what_is_computed_beside(
    tmp_path: Path, name: str, options: dict[str, Any], cache_type: int
) -> None:
    path = ROWS[name].write(tmp_path / "model.gguf", seed=3, **options)
    limits: dict[str, Any] = {"n_ctx": 512, "n_sequences": 6, "cache_type": cache_type, "use_kernels": True}
    found = []
    for n_threads, step, n_others in ((1, N_PROMPT, 0), (2, 1, 0), (3, 7, 4), (2, 32, 5)):
        with PunaEngine(path, n_threads=n_threads, **limits) as engine:
            found.append(logits(engine, step, n_others))
    for others in found[1:]:
        assert np.array_equal(others, found[0])


def logits(engine: PunaEngine, step: int, n_others: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Of a prompt's last row and of rows after it, the prompt computed so many tokens at a time, beside sequences that decode."""
    ids = tokens(N_PROMPT + N_DECODED, 1, engine.n_vocab)
    others = list(range(1, n_others + 1))
    for s in others:
        engine.decode(ids[:20], range(20), [s] * 20, [19])
    rows, depth = [], 20
    ends = [*range(step, N_PROMPT, step), *range(N_PROMPT, N_PROMPT + N_DECODED + 1)]
    for begin, end in zip([0, *ends], ends, strict=False):
        n = end - begin
        row = engine.decode(
            [*ids[begin:end], *(ids[s] for s in others)],
            [*range(begin, end), *([depth] * n_others)],
            [*([0] * n), *others],
            [n - 1, *range(n, n + n_others)],
        )[0]
        depth += 1
        if end >= N_PROMPT:
            rows.append(row.copy())
    return np.stack(rows)


DAMAGED = 7  # a token whose embedding is no number


def damaged(path: Path) -> Path:
    with GGUFFile.open(path) as file:
        embedding = file.tensors["token_embd.weight"]
    rows = np.memmap(path, np.float32, "r+", embedding.offset, embedding.shape[::-1])
    rows[DAMAGED] = np.nan
    rows.flush()
    return path


def of_text(n: int, seed: int, n_vocab: int) -> list[int]:
    return [token if token != DAMAGED else DAMAGED + 1 for token in tokens(n, seed, n_vocab)]


@pytest.mark.parametrize("cache_type", [TYPE_F16, TYPE_Q8_0], ids=["f16", "q8_0"])
@pytest.mark.parametrize("n_rows", [3, 40], ids=["few rows", "many rows"])
def test_what_is_no_number_spoils_no_row_before_it_and_no_other_sequence(tmp_path: Path, n_rows: int, cache_type: int) -> None:
    path = damaged(write_llama(tmp_path / "model.gguf", dtype="f32"))
    with PunaEngine(path, n_ctx=512, n_sequences=2, cache_type=cache_type, use_kernels=True) as engine:
        first, second, begin = (of_text(n_rows, seed, engine.n_vocab) for seed in (1, 2, 3))
        found = []
        for ids in (first, [*first[:-1], DAMAGED]):
            engine.forget()
            for sequence in (0, 1):
                engine.decode(begin, range(n_rows), [sequence] * n_rows, [n_rows - 1])
            positions, sequences = [*range(n_rows, 2 * n_rows)] * 2, [0] * n_rows + [1] * n_rows
            found.append(engine.decode([*ids, *second], positions, sequences, range(2 * n_rows)).copy())
    sound, spoilt = found
    is_sound = np.arange(2 * n_rows) != n_rows - 1
    others = np.arange(sound.shape[1]) != DAMAGED  # where the embedding is the output's matrix as well
    assert np.isfinite(sound[:, others]).all()
    assert np.isnan(spoilt[~is_sound]).all()
    assert np.array_equal(spoilt[is_sound][:, others], sound[is_sound][:, others])


def test_a_text_that_is_no_number_spoils_none_of_the_same_batch(tmp_path: Path) -> None:
    path = damaged(write_bert(tmp_path / "model.gguf"))
    with PunaEngine(path, n_ctx=128, n_sequences=3, use_kernels=True) as engine:
        texts = [of_text(n, seed, 100) for seed, n in enumerate((30, 50, 20))]
        sequences = [sequence for sequence, text in enumerate(texts) for _ in text]
        positions = [position for text in texts for position in range(len(text))]
        found = []
        for token in (texts[1][5], DAMAGED):
            texts[1][5] = token
            found.append(engine.decode([*chain(*texts)], positions, sequences, range(100)).copy())
    sound, spoilt = found
    is_other = np.array(sequences) == 1
    assert np.isfinite(sound).all()
    assert np.isnan(spoilt[is_other]).all()
    assert np.array_equal(spoilt[~is_other], sound[~is_other])
