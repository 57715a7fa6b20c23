"""Where libllama turns cached keys wrongly: a key of a shifted context is the key of its new position."""

from __future__ import annotations

from pathlib import Path

import pytest

from puna.native.ggml import TYPE_F16, TYPE_Q8_0
from tests.models.table import ROWS
from tests.parity.test_architectures import ENERGY
from tests.puna_engine import PunaEngine
from tests.scenarios import tokens

ALONE = [
    (name, variant, i) for name, row in ROWS.items() for variant, files in row.shifted_alone.items() for i in range(len(files))
]


@pytest.mark.parametrize("case", ALONE, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}")
def test_in_one_layer_a_shifted_key_is_the_key_of_its_new_position(case: tuple[str, str, int], tmp_path: Path) -> None:
    """There a key depends on nothing but its own token and position, so computing it anew must give the same."""
    name, variant, index = case
    row = ROWS[name]
    options = {**row.variants[variant], "n_layers": 1, **row.shifted_alone[variant][index]}
    path = row.write(tmp_path / "m.gguf", seed=5, **options)
    cache_type = TYPE_Q8_0 if "cache-q8_0" in variant else TYPE_F16
    with PunaEngine(path, n_ctx=1024, n_sequences=2, cache_type=cache_type) as puna:
        ids = tokens(200, 21, puna.n_vocab)
        kept = ids[:10] + ids[60:]
        puna.decode(ids, range(200), [0] * 200, [199])
        puna.cache.remove(0, 10, 60)
        puna.decode(kept, range(150), [1] * 150, [149])
        shifted, anew = puna.decode([7, 7], [150, 150], [0, 1], [0, 1])
        assert ((shifted - anew) ** 2).sum() <= ENERGY * (anew**2).sum()
