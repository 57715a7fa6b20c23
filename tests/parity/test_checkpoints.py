"""Each family as it is published, converted: the logits are those of its authors' program, and libllama agrees.

The expected numbers in tests/checkpoints/vectors were computed with the library transformers 5.23 and torch 2.15 on CPU, in
F32, by tools/checkpoint_vectors.py, from the same configurations and the same seeded weights.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from puna.gguf.convert.checkpoint import Checkpoint
from puna.gguf.convert.registry import convert
from puna.model.look import engine_at
from puna.native.ggml import TYPE_F32
from tests.checkpoints.cases import CASES, ROWS, STRIDE, TOKENS
from tests.checkpoints.folder import expected, write_case
from tests.oracle import Oracle
from tests.parity.test_embeddings import Running
from tests.puna_engine import PunaEngine

DECODERS = [name for name in CASES if name != "nomic-bert"]


def converted(folder: Path) -> Path:
    convert(Checkpoint.of_folder(folder), folder / "out.gguf")
    return folder / "out.gguf"


def logits(engine: type[PunaEngine] | type[Oracle], path: Path) -> npt.NDArray[np.float64]:
    n = len(TOKENS)
    with engine(path, n_ctx=128, cache_type=TYPE_F32) as opened:
        found = opened.decode(TOKENS, range(n), [0] * n, range(n))
        return found[ROWS, ::STRIDE].astype(np.float64)


def error(found: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("name", DECODERS)
def test_a_family_computes_what_its_authors_program_does(name: str, tmp_path: Path) -> None:
    path = converted(write_case(tmp_path / "hf", name))
    engines = (PunaEngine, Oracle) if CASES[name].oracle else (PunaEngine,)
    errors = {engine.__name__: error(logits(engine, path), expected(name)) for engine in engines}
    assert max(errors.values()) <= CASES[name].tolerance, errors
    assert engine_at(path).engine == "puna", engine_at(path).reason


def test_an_encoder_computes_what_its_authors_program_does(tmp_path: Path) -> None:
    path = converted(write_case(tmp_path / "hf", "nomic-bert"))
    running = Running(path)
    try:
        ours = running.embed([TOKENS], normalize=False)[:, ::STRIDE]
    finally:
        running.engine.close()
    with Oracle(path, n_ctx=128, embeddings=True) as oracle:
        theirs = oracle.embed([TOKENS])[:, ::STRIDE].astype(np.float64)
    wanted = expected("nomic-bert")
    assert max(error(ours, wanted), error(theirs, wanted)) <= CASES["nomic-bert"].tolerance


@pytest.mark.parametrize("name", ["qwen3moe", "deepseek3", "granite-hybrid"])
def test_files_of_several_make_the_same_model(name: str, tmp_path: Path) -> None:
    one, several = (converted(write_case(tmp_path / str(n), name, n_shards=n)) for n in (1, 5))
    assert one.read_bytes() == several.read_bytes()
