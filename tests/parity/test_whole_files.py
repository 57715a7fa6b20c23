"""Nothing in a file is passed over: with anything that libllama would load for an architecture, either Puna's engine gives
the same logits, or the file is for libllama and the reason names what it is.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from puna.errors import PunaError
from puna.gguf.reader import GGUFFile
from puna.ml.ggml.backend import GGMLBackend
from puna.model.look import engine_of
from puna.model.registry import open_model
from tests.models.dialect import Translation
from tests.models.row import Row
from tests.models.table import ENCODERS, ROWS
from tests.oracle import Oracle
from tests.puna_engine import PunaEngine
from tests.scenarios import tokens
from tests.thorough import first
from tests.whole import kind, optional_tensors, with_tensors, write_whole

ENERGY = 1e-3
N_TOKENS = 40

# Of these libllama saves no whole file: it does not know how, or writes one that it cannot read.
UNWRITABLE = ("gemma3n", "gemma4")

# What Puna's engine computes with every tensor that libllama knows for them; the others have some that libllama leaves out.
COMPLETE = {
    "cohere2",
    "llama",
    "llama:experts",
    "mamba2",
    "mistral3",
    "mllama",  # its language part, which libllama reads as a Llama where no layer looks at images
    "mistral3:ancestor",
    "nemotron_h",
    "nemotron_h_moe",
    "qwen3",
    "qwen3moe",
    "qwen35",
    "qwen35:dialect",
    "qwen35moe",
}

CASES = {name: row for name, row in (ROWS | ENCODERS).items() if row.norm is None or name not in ("gptoss", "olmo3")}


def write_plain(row: Row, path: Path) -> Path:
    """As libllama names things."""
    return (row.norm or row.write)(path, seed=5, **next(iter(row.variants.values())))


def limits(name: str, row: Row) -> dict[str, Any]:
    return {"n_ctx": 128 if name in ENCODERS else 256, "n_sequences": 1, "n_threads": 1, **row.limits}


def of_libllama(name: str, row: Row, path: Path) -> npt.NDArray[np.float32] | None:
    """Logits, or an encoder's mean of a text; None where it refuses the file."""
    try:
        oracle = Oracle(path, **limits(name, row), embeddings=name in ENCODERS)
    except AssertionError:
        return None
    with oracle:
        ids = tokens(N_TOKENS, 2, min(oracle.n_vocab, 300))
        if name in ENCODERS:
            return oracle.embed([ids]).copy()
        return oracle.decode(ids, range(N_TOKENS), [0] * N_TOKENS, range(N_TOKENS)).copy()


def of_puna(name: str, row: Row, path: Path) -> npt.NDArray[np.float32]:
    with PunaEngine(path, **limits(name, row)) as puna:
        ids = tokens(N_TOKENS, 2, min(puna.n_vocab, 300))
        rows = puna.decode(ids, range(N_TOKENS), [0] * N_TOKENS, range(N_TOKENS)).copy()
        return rows.mean(0, keepdims=True) if name in ENCODERS else rows


def agree_or_name(name: str, row: Row, path: Path, *suspects: str) -> bool:
    """True when both engines computed the same, False when Puna's left the file to libllama and said why."""
    reference = of_libllama(name, row, path)
    with GGUFFile.open(path) as file:
        choice = engine_of(file)
    if choice.engine == "compat":
        assert any(suspect in choice.reason for suspect in suspects), choice.reason
        with closing(GGMLBackend(path, n_threads=1)) as backend, pytest.raises(PunaError) as refused:
            open_model(backend.file, backend, 128)
        assert choice.reason in str(refused.value)
        return False
    if reference is None:
        return False  # with libllama nobody gets this far; what Puna makes of it has no reference
    ours = of_puna(name, row, path)
    assert ((ours - reference) ** 2).sum() / (reference**2).sum() <= ENERGY
    return True


@pytest.mark.parametrize("name", [name for name in CASES if name not in UNWRITABLE and name not in ENCODERS])
def test_a_file_with_everything(name: str, tmp_path: Path) -> None:
    row = CASES[name]
    whole = write_whole(write_plain(row, tmp_path / "plain.gguf"), tmp_path / "whole.gguf")
    with GGUFFile.open(whole) as file:
        architecture, names = file.architecture, set(file.tensors)
    is_complete = agree_or_name(name, row, whole, *(f"tensor {tensor}" for tensor in names))
    assert is_complete == (name in COMPLETE), architecture


@pytest.mark.parametrize("name", first(3, CASES))
def test_each_tensor_alone(name: str, tmp_path: Path) -> None:
    row = CASES[name]
    plain = write_plain(row, tmp_path / "plain.gguf")
    has_whole = name not in UNWRITABLE and name not in ENCODERS
    optional = optional_tensors(plain, write_whole(plain, tmp_path / "whole.gguf") if has_whole else None)
    kinds = {kind(tensor) for tensor in optional}
    assert any(what.endswith(".scale") for what in kinds)
    agreed = 0
    for what in sorted(kinds):
        added = {tensor: values for tensor, values in optional.items() if kind(tensor) == what}
        path = with_tensors(plain, tmp_path / "with.gguf", added)
        agreed += agree_or_name(name, row, path, what.rsplit(".", 1)[0], "missing from the file")
    assert agreed, "no tensor of those was used"


# Keys that change what libllama computes, at least in some architectures, with values that no model of them has.
CHANGING: dict[str, tuple[Any, ...]] = {
    "attention.causal": (False, True),
    "attention.clamp_kqv": (0.01,),
    "attention.max_alibi_bias": (8.0,),
    "attention.sliding_window": (7,),
    "attn_logit_softcapping": (2.0,),
    "embedding_length_out": (128,),
    "expert_gating_func": (2,),
    "expert_weights_norm": (True, False),
    "expert_weights_scale": (2.5,),
    "final_logit_softcapping": (2.0,),
    "rope.freq_base_swa": (77.0,),
    "rope.scaling.attn_factor": (1.5,),
    "rope.scaling.finetuned": (False, True),
    "rope.scaling.yarn_ext_factor": (-1.0,),
    "swin_norm": (True,),
    "use_parallel_residual": (True, False),
}


@pytest.mark.parametrize("name", first(3, CASES))
def test_each_key_alone(name: str, tmp_path: Path) -> None:
    row = CASES[name]
    plain = write_plain(row, tmp_path / "plain.gguf")
    with GGUFFile.open(plain) as file:
        architecture, metadata = file.architecture, dict(file.metadata)
    n_agreed = 0
    for key, values in CHANGING.items():
        for value in values:
            if metadata.get(f"{architecture}.{key}") == value:
                continue
            changed = Translation(plain)
            changed.values[key] = value, None
            path = changed.save(tmp_path / "changed.gguf", architecture)
            n_agreed += agree_or_name(name, row, path, key)
    assert n_agreed
