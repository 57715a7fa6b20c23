"""Tiles of AMX, which few processors have: the same source beside an emulation of their instructions.

What computes beside them is not emulated: on a processor without it this test is not collected (conftest.py).
"""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from puna.native.kernels import build
from tests import needs

needs.kernels()
HERE = Path(__file__).parent
OPTIONS = (
    "-std=c++17",
    "-O1",
    "-g0",
    "-ffp-contract=off",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    f"-I{build.FOLDER}",
)
# Tiles begin with what registers of AVX-512 unpack.
LEAST = "avx512_bf16"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler, folder = needs.cxx_compiler(), tmp_path_factory.mktemp("tiles")
    emulated = f'-DPUNA_EMULATED_TILES="{HERE / "emulated_tiles.h"}"'
    sets = [(name, (*build.instruction_sets()[name], emulated)) for name in ("portable", "avx512_vnni", LEAST, "amx")]
    units = [(name, build.FOLDER / "instructions.cpp", (f"-DPUNA_INSTRUCTIONS={name}", *options)) for name, options in sets]
    units += [
        (path.stem, path, ()) for path in (build.FOLDER / "self_check.cpp", build.FOLDER / "packing.cpp", HERE / "every_tile.cpp")
    ]

    def compiled(unit: tuple[str, Path, tuple[str, ...]]) -> str:
        name, source, own = unit
        command = [*compiler, *OPTIONS, *own, "-c", str(source), "-o", str(folder / f"{name}.o")]
        subprocess.run(command, check=True, timeout=600)
        return command[-1]

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, units))
    subprocess.run([*compiler, *OPTIONS, *objects, "-o", str(folder / "every_tile")], check=True, timeout=600)
    return folder / "every_tile"


@pytest.mark.thorough
def test_tiles_compute_what_registers_do_and_are_checked_before_use(program: Path) -> None:
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    worst, *checks = done.stdout.split()
    assert float(worst) < 2e-6
    assert checks == ["1", "0", "0"]  # right, wrong by one, and an instruction that ends the process
