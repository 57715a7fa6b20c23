from __future__ import annotations

from pathlib import Path

import numpy as np
from bench.slices import N_VOCAB, SLICES, Slice, grown, sizes

from tests.models.table import ROWS
from tests.puna_engine import PunaEngine


def test_a_slice_has_the_sizes_that_are_asked_for_and_runs(tmp_path: Path) -> None:
    config = sizes(512, 4, 2, 768, 64, expert_feed_forward_length=256, expert_count=6, expert_used_count=2)
    path = tmp_path / "grown.gguf"
    grown("qwen3moe", Slice("small", config, n_layers=2), tmp_path).write(path)
    with PunaEngine(path, n_ctx=64) as engine:
        shapes = {name: tensor.shape for name, tensor in engine.backend.file.tensors.items()}
        assert shapes["blk.1.ffn_gate_exps.weight"] == (512, 256, 6)
        assert shapes["blk.1.attn_q_norm.weight"] == (64,)
        assert shapes["output.weight"] == (512, N_VOCAB)
        assert "blk.2.attn_q.weight" not in shapes
        logits = engine.decode([5, 6, 7], range(3), [0] * 3, [2])
        assert logits.shape == (1, N_VOCAB)
        assert np.isfinite(logits).all()


def test_every_slice_grows_from_a_row() -> None:
    assert set(SLICES) <= set(ROWS)


def test_only_those_families_have_no_slice_that_are_known_to() -> None:
    """Other programs' dialects are the same layers again, and so are Qwen 3.5's with experts: those of Qwen3-Next."""
    families = {name.partition(":")[0] for name, row in ROWS.items() if row.norm is None}
    assert families - {name.partition(":")[0] for name in SLICES} == {"gemma4", "qwen35moe"}
