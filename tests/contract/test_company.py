"""A model's logits are the same to the last bit whatever is computed in the same step, and with any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from puna.native.ggml import TYPE_F16, TYPE_Q8_0
from tests import needs
from tests.models.table import ENCODERS, ROWS
from tests.packed import ALL_TYPES
from tests.puna_engine import PunaEngine
from tests.scenarios import tokens

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
