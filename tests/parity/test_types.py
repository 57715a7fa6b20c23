"""Matrices in every type that the library multiplies run on Puna's engine, with the numbers that libllama gives."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile
from puna.gguf.types import TensorType
from puna.model.look import engine_of
from puna.native.library import opened
from puna.runner.loading.engines import open_file
from puna.wire import LoadOptions
from tests.models.dialect import Translation
from tests.models.gemma import GEMMA
from tests.models.llama import write_mixtral
from tests.models.starcoder2 import STARCODER2
from tests.oracle import Oracle
from tests.puna_engine import PunaEngine
from tests.scenarios import tokens
from tests.thorough import first
from tests.tiny import ggml_base, write_llama
from tests.whole import factors, values_for, with_tensors

ENERGY = 1e-3
N_TOKENS = 40
LIMITS: dict[str, Any] = {"n_ctx": 256, "n_threads": 1}


class _Traits(ctypes.Structure):
    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("block_size", ctypes.c_int64),
        ("interleaved", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


class _CpuTraits(ctypes.Structure):
    _fields_ = (("from_float", ctypes.c_void_p), ("vec_dot", ctypes.c_void_p))


def numbers(kind: TensorType, encoded: bytes, n: int) -> npt.NDArray[np.float32]:
    """What the library reads in a matrix."""
    base = ctypes.CDLL(ggml_base()._name)
    base.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
    out, source = np.empty(n, np.float32), np.frombuffer(encoded, np.uint8)
    base.ggml_get_type_traits(int(kind)).contents.to_float(source.ctypes.data, out.ctypes.data, n)
    return out


def logits(engine: type[Oracle] | type[PunaEngine], path: Path) -> npt.NDArray[np.float32]:
    with engine(path, **LIMITS) as running:
        rows = running.decode(tokens(N_TOKENS, 2, 300), range(N_TOKENS), [0] * N_TOKENS, range(N_TOKENS))
        return rows.copy()


def assert_same(path: Path, reference: Path) -> None:
    with GGUFFile.open(path) as file:
        choice = engine_of(file)
    assert choice.engine == "puna", choice.reason
    ours, theirs = logits(PunaEngine, path), logits(Oracle, reference)
    assert ((ours - theirs) ** 2).sum() / (theirs**2).sum() <= ENERGY


def test_what_is_multiplied_is_what_the_library_says() -> None:
    cpu = ctypes.CDLL(str(opened().paths["ggml-cpu"]))
    cpu.ggml_get_type_traits_cpu.restype = ctypes.POINTER(_CpuTraits)
    found = {kind: bool(cpu.ggml_get_type_traits_cpu(int(kind)).contents.vec_dot) for kind in TensorType}
    assert {kind: kind.is_multiplied for kind in TensorType} == found


# Their encoders search for seconds.
SLOW_TO_WRITE = tuple(kind for kind in TensorType if kind.is_multiplied and kind.name.startswith(("IQ1", "IQ2", "IQ3")))


def _kinds() -> list[Any]:
    kinds = [kind for kind in TensorType if kind.is_multiplied]
    return [pytest.param(kind, marks=pytest.mark.thorough) if kind in SLOW_TO_WRITE else kind for kind in kinds]


@pytest.mark.parametrize("kind", _kinds(), ids=lambda kind: kind.name)
def test_a_model_in_each_type(kind: TensorType, tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", seed=5, dtype=kind.name)
    assert_same(path, path)


@pytest.mark.parametrize(
    "kind", first(3, [TensorType.MXFP4, TensorType.NVFP4, TensorType.TQ2_0, TensorType.IQ2_XS]), ids=lambda kind: kind.name
)
def test_experts_in_each_kind_of_type(kind: TensorType, tmp_path: Path) -> None:
    path = write_mixtral(tmp_path / "m.gguf", seed=5, dtype=kind.name)
    assert_same(path, path)


def test_nvfp4_with_factors(tmp_path: Path) -> None:
    """As files of this type have them: one beside each matrix, and one of activations that the CPU does not use."""
    plain = write_llama(tmp_path / "plain.gguf", seed=5, dtype="nvfp4")
    with GGUFFile.open(plain) as file:
        added = factors(file)
    added |= {name.removesuffix("scale") + "input_scale": values_for(name, (1,)) for name in added}
    added["output.scale"] = values_for("output.scale", (1,))
    path = with_tensors(plain, tmp_path / "m.gguf", added)
    assert_same(path, path)


def folded(path: Path, into: Path) -> Path:
    """The model with matrices in F32 that have their factors within."""
    changed = Translation(path)
    for name in [name for name in changed.tensors if name.endswith(".scale")]:
        _, _, factor = changed.tensors.pop(name)
        matrix = name.removesuffix("scale") + "weight"
        shape, kind, encoded = changed.tensors[matrix]
        values = numbers(kind, encoded, int(np.prod(shape))) * np.frombuffer(factor, np.float32)
        changed.tensors[matrix] = shape, TensorType.F32, values.tobytes()
    with GGUFFile.open(path) as file:
        return changed.save(into, file.architecture)


@pytest.mark.parametrize("row", [GEMMA, STARCODER2], ids=["without-biases", "with-biases"])
def test_nvfp4_has_its_factors_where_libllama_leaves_them_out(row: Any, tmp_path: Path) -> None:
    """The numbers mean nothing without; the same model without factors is the reference."""
    plain = row.write(tmp_path / "plain.gguf", seed=5, dtype="nvfp4")
    with GGUFFile.open(plain) as file:
        path = with_tensors(plain, tmp_path / "m.gguf", factors(file))
    assert_same(path, folded(path, tmp_path / "folded.gguf"))


@pytest.mark.parametrize("new_engine", [True, False], ids=["puna", "libllama"])
@pytest.mark.parametrize("kind", [kind for kind in TensorType if not kind.is_multiplied], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["blk.0.ffn_up.weight", "token_embd.weight"])
def test_a_matrix_of_another_type_is_refused(name: str, kind: TensorType, new_engine: bool, tmp_path: Path) -> None:
    changed = Translation(write_llama(tmp_path / "plain.gguf"))
    shape, _, _ = changed.tensors[name]
    changed.tensors[name] = shape, kind, bytes(kind.n_bytes(int(np.prod(shape))))
    path = changed.save(tmp_path / "m.gguf", "llama")
    with GGUFFile.open(path) as file, pytest.raises(FileFormatError, match=f"{name} is a matrix in {kind.name}"):
        open_file(file, LoadOptions(n_ctx=128, n_threads=1), 1, new_engine)
