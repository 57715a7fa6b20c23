"""Where libllama turns cached keys wrongly, or not at all: a key of a shifted context is the key of its new position."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from puna.kvcache.batch import text_axes
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


@pytest.mark.parametrize("name", ["qwen2vl", "qwen3vl"])
def test_what_follows_an_image_moves_by_the_positions_that_the_image_took(name: str, tmp_path: Path) -> None:
    """Ten tokens and an image of 3 x 4 rows go: 22 of the cache, but 14 of the positions that keys turn by."""
    row = ROWS[name]
    shifted_alone = row.shifted_alone["f32"][0]
    path = row.write(tmp_path / "m.gguf", seed=5, **{"n_layers": 1, **shifted_alone})
    with PunaEngine(path, n_ctx=256, n_sequences=2) as puna:
        ids = tokens(72, 21, puna.n_vocab)
        image = np.array([[30, 30 + i // 4, 30 + i % 4, 0] for i in range(12)], np.int32).T
        axes = np.concatenate([text_axes(np.arange(30, dtype=np.int32)), image, text_axes(np.arange(34, 64, dtype=np.int32))], 1)
        puna.decode(ids, range(72), [0] * 72, [71], axes=axes)
        puna.cache.remove(0, 20, 42, n_positions=14)
        puna.decode(ids[:20] + ids[42:], range(50), [1] * 50, [49], axes=text_axes(np.arange(50, dtype=np.int32)))
        shifted, anew = puna.decode([7, 7], [50, 50], [0, 1], [0, 1], axes=text_axes(np.array([50, 50], np.int32)))
        assert ((shifted - anew) ** 2).sum() <= ENERGY * (anew**2).sum()
