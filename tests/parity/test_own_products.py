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

from tests import needs
from tests.exact import exact_copy
from tests.models.table import ROWS
from tests.packed import ALL_TYPES
from tests.puna_engine import PunaEngine
from tests.scenarios import tokens

needs.kernels()

CASES = [
    (name, variant)
    for name, row in ROWS.items()
    for variant, options in row.variants.items()
    if options.get("dtype") in {*ALL_TYPES} - {"f32"} and "cache" not in variant
]
N_TOKENS, N_STEPS, N_SEQUENCES = 40, 6, 3
SEEDS = (5, 6, 7, 8)
MARGIN = 2.0  # a router that chooses another expert is a large part of what few tokens see


def energy(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    return float(((found - expected) ** 2).sum() / (expected**2).sum())


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
    """Logits by ggml's products and attention, by Puna's own, and exact ones: of several files where a router chooses experts."""
    name, variant = request.param
    row, folder = ROWS[name], tmp_path_factory.mktemp("tiny")
    limits: dict[str, Any] = {"n_ctx": 1024, "n_sequences": N_SEQUENCES + 1, "n_threads": 1, **row.limits}
    rows: dict[str, list[NDArray[np.float32]]] = {"ggml": [], "own": [], "exact": []}
    for seed in SEEDS:
        path: Path = row.write(folder / "model.gguf", seed=seed, **row.variants[variant])
        exact = exact_copy(path, folder / "exact.gguf")
        # ggml sums what attention mixes in half precision, also in a model without rounding; Puna's own attention does not.
        for kind, file, own in (("ggml", path, False), ("own", path, True), ("exact", exact, True)):
            with PunaEngine(file, **limits, use_kernels=own) as engine:
                assert bool(engine.backend.instructions) is own
                rows[kind].append(rows_of(engine))
                has_router = engine.backend.has_tensor("blk.1.ffn_gate_inp.weight")
        if not has_router:
            break
    return {kind: np.concatenate(of_files) for kind, of_files in rows.items()}


def test_they_are_as_close_to_exact_arithmetic(found: dict[str, NDArray[np.float32]]) -> None:
    of_ggml = energy(found["ggml"], found["exact"])
    assert of_ggml > 0
    assert energy(found["own"], found["exact"]) <= MARGIN * of_ggml
    assert energy(found["own"], found["ggml"]) <= MARGIN * of_ggml
