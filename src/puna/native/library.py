"""Find and open the shared libraries of ggml and llama.cpp, and refuse versions that were not tested.

They come with the package llama-cpp-python, which is located but never imported. Each function is opened in one of two
ways: *short* calls keep Python's global lock (a graph is built by thousands of them, and giving the lock away each time
would let another thread interrupt the building), *long* calls release it so that other threads run meanwhile.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from puna.errors import NativeLibraryError
from puna.native.signature import declare

# ggml gives no promise that its functions or structs stay as they are; the tables here were checked against these.
TESTED_GGML = ("0.25.3",)
PACKAGE = "llama-cpp-python==0.3.36"

# How often a computing thread that waits looks again before it gives its core away (GCC's OpenMP; its own default is
# 300,000). Waits between two operations are far shorter; those between two steps are the time in which
# other threads bring the last step's tokens to their readers. Figures in docs/BENCHMARKS.md.
SPIN_COUNT = 4000

_SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")


def library_dir() -> Path:
    """The folder with libggml and libllama.

    Errors: NativeLibraryError when the package is not installed.
    """
    spec = importlib.util.find_spec("llama_cpp")
    for place in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(place) / "lib"
        if _file(folder, "llama").exists():
            return folder
    raise NativeLibraryError(
        f"the tensor library is not installed in this Python ({sys.executable}): run `pip install {PACKAGE}`"
    )


def _file(folder: Path, name: str) -> Path:
    return folder / (f"{name}.dll" if _SUFFIX == ".dll" else f"lib{name}{_SUFFIX}")


class Functions:
    """C functions as attributes, under their C names."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} is not in the tables of puna.native")


class Opened:
    """The libraries, opened once per process in dependency order so that each finds the others."""

    def __init__(self) -> None:
        # A failed assertion in ggml would start a debugger to print its stack before it aborts.
        os.environ.setdefault("GGML_NO_BACKTRACE", "1")
        if "OMP_WAIT_POLICY" not in os.environ:
            os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))  # read once, when the library is opened
        self.folder = library_dir()
        self.paths = {name: _file(self.folder, name) for name in ("ggml-base", "ggml-cpu", "ggml", "llama")}
        mode = getattr(os, "RTLD_GLOBAL", 0) | getattr(os, "RTLD_NOW", 0)
        try:
            self._long = {name: ctypes.CDLL(str(path), mode=mode) for name, path in self.paths.items()}
            self._short = {name: ctypes.PyDLL(str(path), mode=mode) for name, path in self.paths.items()}
        except OSError as error:
            raise NativeLibraryError(f"the tensor library cannot be opened: {error}; reinstall it: {PACKAGE}") from error
        version = self._short["ggml-base"].ggml_version
        version.restype = ctypes.c_char_p
        self.version: str = version().decode()
        if self.version not in TESTED_GGML:
            raise NativeLibraryError(
                f"ggml {self.version} in {self.folder} is not a tested version ({', '.join(TESTED_GGML)}); install {PACKAGE}"
            )

    def bind(
        self, library: str, short: Mapping[str, str], long: Mapping[str, str], structs: Mapping[str, type[ctypes.Structure]]
    ) -> Functions:
        functions = Functions()
        for table, opened in ((short, self._short), (long, self._long)):
            for name, signature in table.items():
                setattr(functions, name, declare(_symbol(opened, library, name), signature, structs))
        return functions


def _symbol(opened: Mapping[str, ctypes.CDLL], library: str, name: str) -> Any:
    # ggml is one interface in three files: which of them holds a function is not part of it.
    for candidate in (library, "ggml-base", "ggml-cpu", "ggml"):
        try:
            return getattr(opened[candidate], name)
        except AttributeError:
            continue
    raise NativeLibraryError(f"the tensor library has no function {name}; install {PACKAGE}")


@cache
def opened() -> Opened:
    return Opened()
