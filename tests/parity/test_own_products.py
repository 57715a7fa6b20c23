"""Models with Puna's own products, as close to exact arithmetic as with ggml's.

Activations are rounded to 8 bits before they are multiplied. A sum in another order turns such a rounding now and then, and
that turns others behind it, so that two engines differ by up to as much as each differs from the model that rounds nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.exact import exact_copy
from tests.models.table import ROWS
from tests.packed import ALL_TYPES
from tests.puna_engine import PunaEngine
from tests.scenarios import tokens

CASES = [
    (name, variant)
    for name, row in ROWS.items()
    for variant, options in row.variants.items()
    if options.get("dtype") in ALL_TYPES and "cache" not in variant
]
N_TOKENS, N_STEPS, N_SEQUENCES = 40, 6, 3
MARGIN = 2.0
COUNTED = 0.75  # of the rows, those nearest: where a router chooses another expert, a row is far away with any products


def energy(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    of_rows = np.sort(((found - expected) ** 2).sum(axis=1) / (expected**2).sum(axis=1))
    return float(of_rows[: int(COUNTED * len(of_rows))].mean())


def rows_of(engine: PunaEngine) -> NDArray[np.float32]:
    """A prompt, steps after it, and steps of several sequences at once."""
    ids = tokens(N_TOKENS + N_STEPS, 1, engine.n_vocab)
    rows = [engine.decode(ids[:N_TOKENS], range(N_TOKENS), [0] * N_TOKENS, range(N_TOKENS)).copy()]
    rows += [engine.decode(ids[p : p + 1], [p], [0], [0]).copy() for p in range(N_TOKENS, N_TOKENS + N_STEPS)]
    others = range(1, N_SEQUENCES)
    for p in range(N_STEPS):
        rows.append(engine.decode([ids[p + s] for s in others], [p for _ in others], others, range(len(others))).copy())
    return np.concatenate(rows)


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}", scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, NDArray[np.float32]]:
    """Logits by ggml's products, by Puna's own, and exact ones."""
    name, variant = request.param
    row, folder = ROWS[name], tmp_path_factory.mktemp("tiny")
    path: Path = row.write(folder / "model.gguf", seed=5, **row.variants[variant])
    exact = exact_copy(path, folder / "exact.gguf")
    limits: dict[str, Any] = {"n_ctx": 1024, "n_sequences": N_SEQUENCES + 1, "n_threads": 1, **row.limits}
    rows = {}
    for kind, file, own in (("ggml", path, False), ("own", path, True), ("exact", exact, False)):
        with PunaEngine(file, **limits, use_kernels=own) as engine:
            assert bool(engine.backend.instructions) is own
            rows[kind] = rows_of(engine)
    return rows


def test_they_are_as_close_to_exact_arithmetic(found: dict[str, NDArray[np.float32]]) -> None:
    of_ggml = energy(found["ggml"], found["exact"])
    assert of_ggml > 0
    assert energy(found["own"], found["exact"]) <= MARGIN * of_ggml
    assert energy(found["own"], found["ggml"]) <= MARGIN * of_ggml
