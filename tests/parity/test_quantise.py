"""Models quantised by ``create``: progress, refusals, and the result on Puna's engine against libllama on the same file."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from puna.errors import PunaError
from puna.gguf.quantise import KINDS
from puna.gguf.reader import GGUFFile
from puna.store.creating import quantise as quantising
from puna.store.models.model import StoredModel
from puna.store.models.show import show
from puna.store.progress import Cancelled, Progress
from puna.store.recipe import Recipe
from puna.store.store import Store
from tests.hf import hf_config, hf_tensors, write_checkpoint
from tests.oracle import Oracle
from tests.parity.test_llama import assert_close, tokens
from tests.patience import PATIENCE_S
from tests.puna_engine import PunaEngine
from tests.tiny import write_llama

FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "models")


def imported(store: Store, path: Path, name: str = "base") -> StoredModel:
    return store.create(name, Recipe(files={"model.gguf": store.blobs.import_file(path).digest}))


def base(store: Store, folder: Path, dtype: str = "f16") -> StoredModel:
    metadata = {"general.file_type": FILE_TYPES[dtype]}
    return imported(store, write_llama(folder / "m.gguf", seed=7, dtype=dtype, metadata=metadata))


def compare(path: Path) -> None:
    ids = tokens(60, 1, 300)
    with PunaEngine(path, n_ctx=128) as puna, Oracle(path, n_ctx=128) as oracle:
        for batch in ((ids, range(60), [0] * 60, range(60)), (ids[:1], [60], [0], [0])):
            assert_close(puna.decode(*batch), oracle.decode(*batch), is_quantised=True)


@pytest.mark.parametrize(
    ("dtype", "asked", "kind", "matrix"),
    [
        ("f16", "q4_K_M", "Q4_K_M", "Q4_K"),
        ("f16", "q8_0", "Q8_0", "Q8_0"),
        ("f32", "Q4_K", "Q4_K_M", "Q4_K"),
        ("bf16", "q4_k_s", "Q4_K_S", "Q4_K"),
        ("f32", "f16", "F16", "F16"),
        ("f16", "q5_1", "Q5_1", "Q5_1"),
        ("f16", "iq4_nl", "IQ4_NL", "IQ4_NL"),
    ],
)
def test_the_result_runs_on_both_engines(dtype: str, asked: str, kind: str, matrix: str, store: Store, tmp_path: Path) -> None:
    source = base(store, tmp_path, dtype)
    seen: list[Progress] = []
    model = store.create("small", Recipe(base="base", quantize=asked), seen.append)
    assert (model.quantization_level, model.parent) == (kind, "base:latest")
    assert show(model).details.quantization_level == kind
    with GGUFFile.open(model.model_path) as file:
        assert file.tensors["blk.1.ffn_gate.weight"].type.name == matrix
        assert file.tensors["blk.1.ffn_norm.weight"].type.name == "F32"
    assert model.model_path.stat().st_size < source.model_path.stat().st_size
    compare(model.model_path)
    lines = [progress for progress in seen if progress.status == f"quantizing {dtype.upper()} model to {kind}"]
    assert {line.digest for line in lines} == {"0" * 19}
    assert lines[0].completed == 0
    assert lines[-1].completed == lines[-1].total > 0
    assert [p.status for p in seen if p not in lines][:1] == ["verifying conversion"]
    assert not list((store.root / "tmp").glob("*"))


def test_every_kind_can_be_made(store: Store, tmp_path: Path) -> None:
    base(store, tmp_path, "f32")
    for kind in KINDS:
        model = store.create("small", Recipe(base="base", quantize=kind.lower()))
        assert model.quantization_level == kind
    with pytest.raises(PunaError, match=r"unsupported quantization type IQ1_S - supported types are F32, .*Q2_K$"):
        store.create("small", Recipe(base="base", quantize="iq1_s"))


def test_quantised_models_are_near_the_original(store: Store, tmp_path: Path) -> None:
    original = base(store, tmp_path, "f32")
    ids = tokens(60, 1, 300)
    rows = {}
    for name, model in (
        ("F32", original),
        *((kind, store.create(kind.lower(), Recipe(base="base", quantize=kind))) for kind in ("Q8_0", "Q4_K_M")),
    ):
        with PunaEngine(model.model_path, n_ctx=128) as engine:
            rows[name] = engine.decode(ids, range(60), [0] * 60, range(60)).copy()
    errors = {kind: float(((rows[kind] - rows["F32"]) ** 2).sum() / (rows["F32"] ** 2).sum()) for kind in ("Q8_0", "Q4_K_M")}
    assert 0 < errors["Q8_0"] < 0.01 < errors["Q4_K_M"] < 0.3, errors


def test_a_checkpoint_is_converted_and_quantised_in_one_go(store: Store, tmp_path: Path) -> None:
    source = write_llama(tmp_path / "m.gguf", seed=7, dtype="f16")
    folder = write_checkpoint(tmp_path / "hf", hf_tensors(source), hf_config(source), n_shards=2)
    files = {path.name: store.blobs.import_file(path).digest for path in folder.iterdir()}
    seen: list[Progress] = []
    model = store.create("small", Recipe(files=files, quantize="q8_0"), seen.append)
    assert (model.family, model.quantization_level) == ("llama", "Q8_0")
    assert model.chat_template
    compare(model.model_path)
    statuses = [progress.status for progress in seen]
    assert statuses[0] == "converting model"
    assert "quantizing F16 model to Q8_0" in statuses
    assert max(progress.completed for progress in seen if progress.status == "converting model") > 0
    in_use = {layer.digest for layer in model.manifest.blobs} | set(files.values())  # type: ignore[union-attr]
    assert set(store.blobs) == in_use  # the step between leaves nothing


def test_what_is_quantised_already_is_refused_or_left_alone(store: Store, tmp_path: Path) -> None:
    base(store, tmp_path)
    store.create("small", Recipe(base="base", quantize="q8_0"))
    with pytest.raises(PunaError, match="quantization is only supported for F16, BF16 and F32 models"):
        store.create("smaller", Recipe(base="small", quantize="q4_0"))
    same = store.create("same", Recipe(base="small", quantize="Q8_0"))
    assert same.model_path == store.get("small").model_path
    # A file that does not say what it is.
    path = write_llama(tmp_path / "silent.gguf", dtype="q4_0")
    imported(store, path, "silent")
    with pytest.raises(PunaError, match="the model could not be quantized: requantizing from type q4_0 is disabled"):
        store.create("smaller", Recipe(base="silent", quantize="q8_0"))


@pytest.mark.parametrize("poll_s", [0.001, PATIENCE_S], ids=["at its begin", "at its end"])
def test_a_cancelled_quantisation_ends_its_process_and_leaves_nothing(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, poll_s: float
) -> None:
    base(store, tmp_path)
    monkeypatch.setattr(quantising, "POLL_S", poll_s)
    before = set(store.blobs)

    def cancel(progress: Progress) -> None:
        if progress.status.startswith("quantizing") and list((store.root / "tmp").glob("*/output")):
            raise Cancelled

    with pytest.raises(Cancelled):
        store.create("small", Recipe(base="base", quantize="q4_K_M"), cancel)
    assert set(store.blobs) == before
    assert not list((store.root / "tmp").glob("*"))
    assert [model.name for model in store.list()] == ["base:latest"]


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("import os; os.abort()", "ended by SIGABRT"),
        ("import sys; sys.exit('GGML_ASSERT(x) failed')", r"ended with status 1: GGML_ASSERT\(x\) failed"),
        ("""print('{"error": "no room"}')""", "no room"),
    ],
)
def test_the_death_of_the_process_is_an_error(
    program: str, says: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base(store, tmp_path)
    monkeypatch.setattr(quantising, "command_for", lambda *_: [sys.executable, "-c", program])
    with pytest.raises(PunaError, match=f"the model could not be quantized: .*{says}"):
        store.create("small", Recipe(base="base", quantize="q4_K_M"))


def test_a_process_that_hangs_is_killed_when_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid_file = tmp_path / "pid"
    program = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(3600)"
    monkeypatch.setattr(quantising, "command_for", lambda *_: [sys.executable, "-c", program])

    def cancel_when_running(_done: int, _total: int) -> None:
        if pid_file.exists() and pid_file.read_text():
            raise Cancelled

    begin = time.monotonic()
    with pytest.raises(Cancelled):
        quantising.quantise(tmp_path / "a", tmp_path, "Q8_0", cancel_when_running)
    assert time.monotonic() - begin < PATIENCE_S
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), signal.SIG_DFL)


def test_weights_that_are_no_numbers_are_refused(store: Store, tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", dtype="f32", metadata={"general.file_type": 0})
    with GGUFFile.open(path) as file, path.open("r+b") as target:
        target.seek(file.tensors["blk.0.ffn_up.weight"].offset)
        target.write(np.full(8, np.nan, np.float32).tobytes())
    imported(store, path)
    with pytest.raises(PunaError, match=r"could not be quantized: tensor 'blk.0.ffn_up.weight' has invalid data"):
        store.create("small", Recipe(base="base", quantize="q8_0"))
