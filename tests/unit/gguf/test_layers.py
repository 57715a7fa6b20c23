"""A file's number of layers is believed by nobody before it was looked at: lists and memory are made by it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from puna.errors import FileFormatError
from puna.gguf.layers import MAX_LAYERS, n_stored_layers
from puna.gguf.reader import GGUFFile
from tests.models.dialect import Translation
from tests.models.mamba import write_mamba2
from tests.tiny import write_bert, write_llama
from tests.tiny_others import write_stablelm

WRITERS: dict[str, Callable[..., Path]] = {
    "llama": write_llama,
    "mamba2": write_mamba2,
    "bert": write_bert,
    "stablelm": write_stablelm,
}

# With room for the libraries and for no list of 2^31; what is said of the file, by each engine and where it is free to choose.
OPEN = """
import resource, sys
from pathlib import Path
from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile
from puna.runner.loading.engines import open_file
from puna.wire import LoadOptions

resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
for new_engine in (None, True, False):
    with GGUFFile.open(Path(sys.argv[1])) as file:
        try:
            open_file(file, LoadOptions(n_ctx=128, n_threads=1), 1, new_engine)
        except FileFormatError as error:
            print(error)
        except Exception as error:
            print(type(error), error)
"""


def with_layers(architecture: str, n_layers: int, folder: Path) -> Path:
    changed = Translation(WRITERS[architecture](folder / "plain.gguf"))
    changed.values["block_count"] = n_layers, None
    return changed.save(folder / "m.gguf", architecture)


@pytest.mark.parametrize("n_layers", [0, MAX_LAYERS + 1, 2**31 - 1, 2**31, 2**40])
def test_a_number_of_layers_that_no_model_has(n_layers: int, tmp_path: Path) -> None:
    with GGUFFile.open(with_layers("llama", n_layers, tmp_path)) as file, pytest.raises(FileFormatError, match="block_count"):
        n_stored_layers(file.metadata)


@pytest.mark.parametrize("architecture", WRITERS)
def test_no_engine_makes_lists_of_it(architecture: str, tmp_path: Path) -> None:
    path = with_layers(architecture, 2**31, tmp_path)
    said = subprocess.run([sys.executable, "-c", OPEN, str(path)], capture_output=True, text=True, check=True)
    lines = said.stdout.splitlines()
    expected = f"{path}: {architecture}.block_count {2**31} is no number of layers; a model has from 1 to {MAX_LAYERS}"
    refusals = 2 if architecture == "stablelm" else 3  # which Puna's engine does not know at all
    assert lines.count(expected) >= refusals - 1, said.stdout
    assert all("block_count" in line or "not supported" in line for line in lines), said.stdout
    assert len(lines) == 3
