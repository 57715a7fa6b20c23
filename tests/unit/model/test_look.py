"""What the server says of a file's engine: from its declarations alone, and the same as what the engine decides."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from puna.errors import UnsupportedModel
from puna.gguf.reader import GGUFFile
from puna.gguf.types import TensorType
from puna.ml.ggml.backend import GGMLBackend
from puna.model.look import engine_at, engine_of
from puna.model.registry import open_model
from puna.runner.loading.engines import open_file
from puna.wire import LoadOptions
from tests.models.dialect import Translation
from tests.models.table import EMBEDDERS, ENCODERS, ROWS
from tests.thorough import first_of_each_name
from tests.tiny import write_llama
from tests.whole import with_tensors

RUN = ROWS | ENCODERS | EMBEDDERS
VARIANTS = [
    (name, variant)
    for name, row in RUN.items()
    for variant in row.variants
    if "cache" not in variant and "no-flash" not in variant
]


@pytest.mark.parametrize("case", first_of_each_name(VARIANTS), ids="-".join)
def test_all_that_the_engine_runs(case: tuple[str, str], tmp_path: Path) -> None:
    name, variant = case
    row = RUN[name]
    with GGUFFile.open(row.write(tmp_path / "model.gguf", seed=5, **row.variants[variant])) as file:
        choice = engine_of(file)
    assert choice.engine == "puna", choice.reason


def odd_tensor(path: Path) -> Path:
    plain = write_llama(path.with_name("plain.gguf"))
    return with_tensors(plain, path, {"blk.0.attn_sinks.weight": np.ones(4, np.float32), "oddity": np.ones(4, np.float32)})


def odd_key(path: Path) -> Path:
    return write_llama(path, metadata={"llama.attention.causal": False})


def imprecise(path: Path) -> Path:
    names = {"general.tensor_extra.name": ["output.weight"], "general.tensor_extra.prec_a4": [False]}
    return write_llama(path, metadata=names)


@pytest.mark.parametrize(
    ("write", "named"),
    [
        (odd_tensor, "tensor blk.0.attn_sinks.weight and 1 more"),
        (odd_key, "key llama.attention.causal"),
        (imprecise, "key general.tensor_extra.prec_a4"),
    ],
    ids=["tensor", "key", "precision"],
)
def test_what_would_be_passed_over_is_a_reason(write: Callable[[Path], Path], named: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")
    choice = engine_at(path)
    assert choice.engine == "compat"
    assert named in choice.reason
    assert str(path) not in choice.reason
    with GGUFFile.open(path) as file:
        backend = GGMLBackend(file, n_threads=1)
        with pytest.raises(UnsupportedModel, match=named):
            open_model(file, backend, 128)
        backend.close()
        # Where the engine is forced, it is an error that says the same.
        with pytest.raises(UnsupportedModel, match=named):
            open_file(file, LoadOptions(n_ctx=128, n_threads=1), 1, new_engine=True)


def test_the_runner_gives_the_same_reason(tmp_path: Path) -> None:
    path = odd_key(tmp_path / "model.gguf")
    with GGUFFile.open(path) as file:
        opened = open_file(file, LoadOptions(n_ctx=128, n_threads=1), 1)
        opened.close()
        assert opened.choice == engine_of(file)


def test_a_file_for_neither_engine_is_refused_with_both_reasons(tmp_path: Path) -> None:
    path = odd_tensor(tmp_path / "model.gguf")
    with GGUFFile.open(path) as file, pytest.raises(UnsupportedModel, match=r"attn_sinks.*libllama does not run the file either"):
        open_file(file, LoadOptions(n_ctx=128, n_threads=1), 1)


def test_what_says_nothing_is_no_reason(tmp_path: Path) -> None:
    translation = Translation(write_llama(tmp_path / "plain.gguf"))
    one = (1,), TensorType.F32, np.ones(1, np.float32).tobytes()
    for name in ("v.blk.0.attn_q.weight", "mm.input_projection.weight", "mtp.0.norm.weight", "blk.0.attn_q.input_scale"):
        translation.tensors[name] = one
    translation.values |= {"attention.causal": (True, None), "pooling_type": (0xFFFFFFFF, None), "swin_norm": (True, None)}
    path = translation.save(tmp_path / "model.gguf", "llama")
    assert engine_at(path).engine == "puna"


def test_a_changed_file_is_looked_at_again(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "model.gguf")
    assert engine_at(path).engine == "puna"
    odd_key(path)
    assert engine_at(path).engine == "compat"


def test_looking_loads_no_tensor_library(tmp_path: Path) -> None:
    path = odd_key(tmp_path / "model.gguf")
    code = (
        "import sys; from pathlib import Path; from puna.model.look import engine_at\n"
        "choice = engine_at(Path(sys.argv[1])); "
        "print(choice.engine, [m for m in sys.modules if m.startswith(('puna.native', 'puna.ml.ggml', 'llama_cpp'))])"
    )
    said = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "compat []"
