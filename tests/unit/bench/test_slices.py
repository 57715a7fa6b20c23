from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from bench.engine import Encoder, encode
from bench.slices import N_VOCAB, SLICES, Slice, grown, sizes

from puna.model.registry import ARCHITECTURES
from tests.models.table import ENCODERS, ROWS
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


def test_a_slice_of_an_encoder_runs_on_a_whole_text(tmp_path: Path) -> None:
    small = Slice("small", sizes(128, 2, 2, 256, context_length=64), n_layers=2, axes={"positions": 64, "segments": 2})
    path = tmp_path / "grown.gguf"
    grown("bert", small, tmp_path).write(path)
    text = list(range(5, 55))
    limits: dict[str, Any] = {"n_ctx": 64, "n_threads": 2}
    with PunaEngine(path, **limits) as puna, Encoder(path, **limits, embeddings=True) as oracle:
        ours, theirs = (encode(50)(engine, text)() for engine in (puna, oracle))
        assert isinstance(ours, np.ndarray)
        assert isinstance(theirs, np.ndarray)
        assert ours.shape == (50, 128)
        mean = ours.mean(0)
        assert mean @ theirs[0] / np.linalg.norm(mean) / np.linalg.norm(theirs[0]) > 0.999


def test_every_slice_grows_from_a_row() -> None:
    assert {slice.row or name for name, slice in SLICES.items()} <= {*ROWS, *ENCODERS}


def test_every_architecture_has_a_slice_but_other_programs_names_of_one_that_has() -> None:
    sliced = {name.partition(":")[0] for name in SLICES}
    renamed = {name for name in set(ARCHITECTURES) - sliced if ROWS[name].norm is not None}
    # libllama has no mllama, but for what a file of it without images can be written as.
    assert set(ARCHITECTURES) - sliced == renamed == {"glm4moelite", "gptoss", "mllama", "olmo3", "qwen25vl"}
