"""The instruction sets of 64-bit ARM: compiled by a cross compiler, and computed by an emulator of such a processor.

Both are programs of the system: ``apt install g++-aarch64-linux-gnu qemu-user``.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from puna.native.kernels import build
from tests import needs

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
SYSTEM = "/usr/aarch64-linux-gnu"  # the libraries of that processor
ALL = [*reversed([*build.AARCH64]), "portable"]

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def library() -> Path:
    needs.arm()
    return build.kept([COMPILER], machine="aarch64")


def computed(library: Path, folder: Path, name: str, *arguments: str, cpu: str = "max") -> list[str]:
    """What a program of this folder says that it computed with; it ends with the largest difference that it found."""
    program, source = folder / name, Path(__file__).with_name(f"{name}.cpp")
    options = ("-std=c++17", "-O1", "-pthread", f"-I{build.FOLDER}")
    subprocess.run([COMPILER, *options, str(source), str(library), "-o", str(program)], check=True, timeout=600)
    command = [EMULATOR, "-cpu", cpu, "-L", SYSTEM, "-E", f"LD_LIBRARY_PATH={library.parent}", str(program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    *names, _difference = done.stdout.split()
    return names


def test_every_format_and_size_is_as_the_portable_one_s(library: Path, tmp_path: Path) -> None:
    assert computed(library, tmp_path, "every_product") == ALL


def test_attention_is_exact_and_has_the_same_bits_with_any_number_of_threads(library: Path, tmp_path: Path) -> None:
    assert computed(library, tmp_path, "every_attention", "6") == ALL


def test_a_processor_is_asked_what_it_has(library: Path, tmp_path: Path) -> None:
    assert computed(library, tmp_path, "every_attention", "1", cpu="cortex-a53") == ["neon", "portable"]
    assert computed(library, tmp_path, "every_attention", "1", cpu="neoverse-n1") == ["neon_dot", "neon", "portable"]
