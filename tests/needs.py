"""What some tests need of a machine beside Python: compilers, a library that was compiled, programs of the system.

On a machine without, those tests are skipped and say why. Where PUNA_TESTS is ``complete``, as in what a merge must pass,
nothing may be missing: they fail instead.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from puna.native.kernels import build, library
from puna.native.providers import Provider, compiled, installed
from puna.web import libraries


def is_complete() -> bool:
    return os.environ.get("PUNA_TESTS") == "complete"


def missing(reason: str) -> NoReturn:
    if is_complete():
        pytest.fail(f"PUNA_TESTS=complete, but {reason}", pytrace=False)
    pytest.skip(reason, allow_module_level=True)


def c_compiler() -> str:
    found = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    return found or missing("there is no C compiler")


def cxx_compiler() -> list[str]:
    return build.compiler() or missing("there is no C++ compiler")


def arm() -> None:
    """A compiler for 64-bit ARM, and an emulator of such a processor."""
    for program, package in (("aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu"), ("qemu-aarch64", "qemu-user")):
        if not shutil.which(program):
            missing(f"there is no {program}: apt-get install {package}")


def kernels() -> None:
    """Puna's own products."""
    if not library.is_compiled():
        missing("Puna's own products were not compiled: there was no C++ compiler")


def instruction_sets() -> list[str]:
    """Of Puna's own products, as parameters of tests; where those were not compiled, one whose test has to ask `kernels`."""
    return library.kernels().available() if library.is_compiled() else ["own"]


def compiled_library() -> Provider:
    return compiled() or installed() or missing("no tensor library was compiled for this processor: make native")


def version_of(provider: Provider) -> str:
    """Of its ggml; asked in a process of its own, since this one may have opened another library."""
    program = "import ctypes, sys; f = ctypes.CDLL(sys.argv[1]).ggml_version; f.restype = ctypes.c_char_p; print(f().decode())"
    command = [sys.executable, "-c", program, str(provider.paths["ggml-base"])]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def chromium() -> str:
    """The system's browser, which the tests of the page drive."""
    found = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
    return found or missing("there is no Chromium: apt-get install chromium")


def page_libraries() -> None:
    """What the page takes from others."""
    if not libraries.TARGET.is_dir():
        missing("the page's libraries were not fetched: python -m puna.web.libraries")


def node() -> str:
    """The program that runs JavaScript; also where Python packages put theirs."""
    found = shutil.which("node") or shutil.which("node", path=str(Path(sys.executable).parent))
    return found or missing("there is no node")
