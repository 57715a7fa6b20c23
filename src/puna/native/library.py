"""Open the shared libraries of ggml and llama.cpp, and refuse versions that were not tested.

Where they are, puna.native.providers knows. Each function is opened in one of two ways: *short* calls keep Python's
global lock (a graph is built by thousands of them, and giving the lock away each time would let another thread interrupt
the building), *long* calls release it so that other threads run meanwhile.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from puna.errors import NativeLibraryError
from puna.native.providers import TESTED_GGML, Provider, chosen
from puna.native.signature import declare

# How often a computing thread that waits looks again before it gives its core away (GCC's OpenMP; its own default is
# 300,000). Waits between two operations are far shorter; those between two steps are the time in which
# other threads bring the last step's tokens to their readers. Figures in docs/measurements.md.
SPIN_COUNT = 4000
# What a system without a compiler may lack: GCC's OpenMP is a package of its own.
_NO_OPENMP = """; the system lacks GCC's OpenMP:
  Debian, Ubuntu:  sudo apt install libgomp1
  Fedora:          sudo dnf install libgomp
  Alpine:          the prebuilt library needs glibc"""


class Functions:
    """C functions as attributes, under their C names."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} is not in the tables of puna.native")


class Opened:
    """The libraries, opened once per process in dependency order so that each finds the others."""

    def __init__(self, provider: Provider) -> None:
        # A failed assertion in ggml would start a debugger to print its stack before it aborts.
        os.environ.setdefault("GGML_NO_BACKTRACE", "1")
        if "OMP_WAIT_POLICY" not in os.environ:
            os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))  # read once, when the library is opened
        self.provider = provider
        self.paths = provider.paths
        self._long: dict[str, ctypes.CDLL] = {}
        self._short: dict[str, ctypes.CDLL] = {}
        for name, path in self.paths.items():
            self._open(name, path)
        self.version = self._asked_version()
        if self.version not in TESTED_GGML:
            raise NativeLibraryError(
                f"ggml {self.version} in {provider.folder} is not a tested version ({', '.join(TESTED_GGML)}); {provider.remedy}"
            )

    def _open(self, name: str, path: Path) -> None:
        mode = getattr(os, "RTLD_GLOBAL", 0) | getattr(os, "RTLD_NOW", 0)
        try:
            self._long[name] = ctypes.CDLL(str(path), mode=mode)
            self._short[name] = ctypes.PyDLL(str(path), mode=mode)
        except OSError as error:
            missing = _NO_OPENMP if str(error).startswith("libgomp") else f"; {self.provider.remedy}"
            package = self.provider.package
            raise NativeLibraryError(f"the tensor library ({package}) cannot be opened: {error}{missing}") from error

    def _asked_version(self) -> str:
        try:
            version = self._short["ggml-base"].ggml_version
        except AttributeError:
            raise self.misfit("it has no function ggml_version") from None
        version.restype = ctypes.c_char_p
        return str(version().decode())

    def bind(
        self, library: str, short: Mapping[str, str], long: Mapping[str, str], structs: Mapping[str, type[ctypes.Structure]]
    ) -> Functions:
        """A *library* that is none of the provider's own is opened beside those.

        Errors: NativeLibraryError that names every function which the library does not have, or where it is missing.
        """
        if library not in self._long:
            self._open(library, self.provider.path(library))
        functions = Functions()
        missing: list[str] = []
        for table, opened in ((short, self._short), (long, self._long)):
            for name, signature in table.items():
                symbol = _symbol(opened, library, name)
                if symbol is None:
                    missing.append(name)
                else:
                    setattr(functions, name, declare(symbol, signature, structs))
        if missing:
            raise self.misfit(f"it has no function {', '.join(missing)}")
        return functions

    def misfit(self, what: str) -> NativeLibraryError:
        """The error to raise where the library is not what the tables of this package say."""
        return NativeLibraryError(
            f"the tensor library ({self.provider.package} in {self.provider.folder}) does not fit: {what}; {self.provider.remedy}"
        )


def _symbol(opened: Mapping[str, ctypes.CDLL], library: str, name: str) -> Any:
    # ggml is one interface in three files: which of them holds a function is not part of it.
    for candidate in (library, "ggml-base", "ggml-cpu", "ggml"):
        try:
            return getattr(opened[candidate], name)
        except AttributeError:
            continue
    return None


@cache
def opened() -> Opened:
    return Opened(chosen())
