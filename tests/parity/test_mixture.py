"""Every kind of quantised file has the types and the bytes that libllama's own quantiser gives it."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from puna.gguf.mixture import BASE
from puna.gguf.quantise import KINDS
from puna.gguf.reader import GGUFFile
from puna.runner.process.quantise import quantise
from tests import needs
from tests.models.llama import write_mixtral
from tests.models.table import ROWS
from tests.tiny import write_llama

ROOT = Path(__file__).resolve().parents[2]
# Layers enough for every rule about first and last ones; heads that share keys; widths of no whole blocks.
LLAMAS = {
    "many layers": {"n_layers": 17, "n_heads": 8, "n_kv_heads": 2, "n_ff": 256},
    "tied": {"tied": True, "n_layers": 9},
    "narrow": {"n_embd": 96, "n_heads": 4, "n_kv_heads": 4, "n_ff": 160},
    "half": {"dtype": "f16"},
    "brain": {"dtype": "bf16"},
}
ALL_KINDS, SOME_KINDS = ("many layers", "narrow"), ("Q4_K_M",)


def sources(folder: Path) -> dict[str, Path]:
    found = {name: write_llama(folder / f"{i}.gguf", seed=3, **options) for i, (name, options) in enumerate(LLAMAS.items())}  # type: ignore[arg-type]
    found["experts"] = write_mixtral(folder / "mixtral.gguf", seed=3)
    for name, row in ROWS.items():
        write = row.norm or row.write  # libllama does not read other programs' names
        found[name] = write(folder / f"{len(found)}.gguf", **next(iter(row.variants.values())))
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[Path, Path]]:
    """Sources and what libllama makes of them, for every kind of the llamas, and for two of every architecture."""
    folder = tmp_path_factory.mktemp("mixtures")
    library = needs.compiled_library()
    pairs = {}
    for name, source in sources(folder).items():
        for kind in KINDS if name in ALL_KINDS else SOME_KINDS:
            pairs[name, kind] = (source, folder / f"{source.stem}-{kind}.gguf")
    lines = "".join(f"{source} {target} {KINDS[kind]}\n" for (_, kind), (source, target) in pairs.items())
    environ = {**os.environ, "PUNA_LIBRARY": str(library.folder)}
    command = [sys.executable, "-m", "tests.parity.quantise_worker"]
    subprocess.run(command, input=lines, env=environ, cwd=ROOT, text=True, check=True, timeout=600)
    return pairs


def test_every_kind_has_a_base() -> None:
    assert list(BASE) == list(KINDS)


@pytest.mark.parametrize("name", [*LLAMAS, "experts", *ROWS])
def test_types_and_bytes_are_libllamas(name: str, made: dict[tuple[str, str], tuple[Path, Path]], tmp_path: Path) -> None:
    own = tmp_path / "own.gguf"
    for (asked, kind), (source, target) in made.items():
        if asked != name:
            continue
        with GGUFFile.open(source) as file, ThreadPoolExecutor(2) as pool:
            quantise(file, own, kind, pool, lambda _n_bytes: None)
        with GGUFFile.open(own) as ours, GGUFFile.open(target) as theirs:
            expected = {tensor.name: tensor.type.name for tensor in theirs.tensors.values()}
            assert {tensor.name: tensor.type.name for tensor in ours.tensors.values()} == expected, kind
            assert all(ours.tensor_data(tensor) == theirs.tensor_data(tensor) for tensor in expected), kind
            assert {key: ours.encoded_value(key) for key in ours.metadata} == {
                key: theirs.encoded_value(key) for key in theirs.metadata
            }, kind
