"""Each family as it is published, converted: the logits are those of its authors' program, and libllama agrees.

The expected numbers in tests/checkpoints/vectors were computed with the library transformers 5.23 and torch 2.15 on CPU, in
F32, by tools/checkpoint_vectors.py, from the same configurations and the same seeded weights.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from puna.errors import PunaError
from puna.gguf.convert.checkpoint import Checkpoint
from puna.gguf.convert.registry import convert
from puna.gguf.reader import GGUFFile
from puna.model.look import engine_at
from puna.native.ggml import TYPE_F32
from puna.store.recipe import Recipe
from puna.store.store import Store
from tests.checkpoints.cases import CASES, ENCODERS, ROWS, STRIDE, TOKENS
from tests.checkpoints.folder import expected, tensors, write_case
from tests.hf import write_safetensors
from tests.oracle import Oracle
from tests.parity.test_embeddings import Running, cosines
from tests.puna_engine import PunaEngine
from tests.thorough import first

MODULES = ("", "1_Pooling", "2_Normalize")
DECODERS = [name for name in CASES if name not in ENCODERS]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "models")


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


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_computes_what_its_authors_program_does(name: str, tmp_path: Path) -> None:
    path = converted(write_case(tmp_path / "hf", name))
    running = Running(path)
    try:
        ours = running.embed([TOKENS], normalize=False)[:, ::STRIDE]
    finally:
        running.engine.close()
    with Oracle(path, n_ctx=128, embeddings=True) as oracle:
        theirs = oracle.embed([TOKENS])[:, ::STRIDE].astype(np.float64)
    wanted = expected(name)
    assert max(error(ours, wanted), error(theirs, wanted)) <= CASES[name].tolerance


@pytest.mark.parametrize("name", ["qwen3moe", "deepseek3", "granite-hybrid"])
def test_files_of_several_make_the_same_model(name: str, tmp_path: Path) -> None:
    one, several = (converted(write_case(tmp_path / str(n), name, n_shards=n)) for n in (1, 5))
    assert one.read_bytes() == several.read_bytes()


# Q4_K_M needs rows of 256 numbers; what these have becomes Q5_0 and the like.
@pytest.mark.parametrize("name", first(5, [name for name in DECODERS if not CASES[name].blocks]))
def test_a_folder_is_quantised_on_the_way(name: str, store: Store, tmp_path: Path) -> None:
    folder = write_case(tmp_path / "hf", name)
    files = {path.name: store.blobs.import_file(path).digest for path in folder.iterdir()}
    model = store.create("small", Recipe(files=files, quantize="q4_K_M"))
    assert model.quantization_level == "Q4_K_M"
    assert engine_at(model.model_path).engine == "puna"
    with GGUFFile.open(model.model_path) as file:
        kinds = {info.type.name for info in file.tensors.values()}
    assert kinds & {"Q5_0", "Q8_0", "Q4_K", "Q5_1"}, kinds
    found, wanted = logits(PunaEngine, model.model_path), expected(name)
    assert np.corrcoef(found.ravel(), wanted.ravel())[0, 1] > 0.9


@pytest.mark.parametrize(("quantize", "kind"), [("", "Q8_0"), ("f16", "F16"), ("q4_0", "Q4_0")])
def test_eight_bits_stay_eight_bits_where_nothing_else_is_asked_for(
    quantize: str, kind: str, store: Store, tmp_path: Path
) -> None:
    folder = write_case(tmp_path / "hf", "llama-fp8")
    files = {path.name: store.blobs.import_file(path).digest for path in folder.iterdir()}
    model = store.create("small", Recipe(files=files, quantize=quantize))
    assert model.quantization_level == kind
    assert error(logits(PunaEngine, model.model_path), expected("llama-fp8")) < {"Q8_0": 0.02, "F16": 2e-3, "Q4_0": 0.3}[kind]


def test_four_bits_are_not_quantised_again(store: Store, tmp_path: Path) -> None:
    folder = write_case(tmp_path / "hf", "gpt-oss-mxfp4")
    files = {path.name: store.blobs.import_file(path).digest for path in folder.iterdir()}
    assert store.create("small", Recipe(files=files)).quantization_level == "MXFP4"
    with pytest.raises(PunaError, match="quantization is only supported for F16, BF16 and F32 models"):
        store.create("smaller", Recipe(files=files, quantize="q4_0"))


def test_a_decoder_that_embeds_is_known_by_what_lies_beside_it(tmp_path: Path) -> None:
    """Published ones name their tensors without the beginning that those which generate have."""
    folder = write_case(tmp_path / "hf", "qwen3", tie_word_embeddings=True)
    named = {key.removeprefix("model."): values for key, values in tensors("qwen3").items() if key != "lm_head.weight"}
    write_safetensors(folder / "model.safetensors", named)
    modules = [{"path": path, "type": f"sentence_transformers.models.{path[2:] or 'Transformer'}"} for path in MODULES]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    path = converted(folder)
    running = Running(path)
    try:
        ours = running.embed([TOKENS])
    finally:
        running.engine.close()
    with Oracle(path, n_ctx=128, embeddings=True) as oracle:
        assert cosines(ours, oracle.embed([TOKENS])).min() > 0.9999
    with GGUFFile.open(path) as file:
        assert file.metadata.integer("pooling_type") == 3
