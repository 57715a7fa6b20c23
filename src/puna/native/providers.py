"""Where the tensor library is: named in a setting, compiled for this processor, or prebuilt for many.

ggml and libllama come from one of several packages, all located and none imported. The first of these that is there is
used: what PUNA_LIBRARY names; what ``puna native build`` compiled for this processor (puna.native.build), in the user's
cache; llama-cpp-python, which pip compiled when it was installed; xllamacpp, whose wheel is one extension file with
the same C functions. Knows nothing of what is in them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from puna import settings
from puna.errors import NativeLibraryError
from puna.native import cache, cpu

# ggml gives no promise that its functions or structs stay as they are; the tables of this package were checked with these.
SOURCE = "llama-cpp-python==0.3.36"
PREBUILT = "xllamacpp==2026.10.11549"
TESTED_GGML = ("0.25.3", "0.26.0")

BUILD = "puna native build"
NAMES = ("ggml-base", "ggml-cpu", "ggml", "llama")  # in the order in which each finds those that it needs
_SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")

Kind = Literal["named", "compiled", "installed", "prebuilt"]


@dataclass(frozen=True)
class Provider:
    kind: Kind
    package: str  # what it is, for people
    paths: Mapping[str, Path]  # of NAMES; all the same where one file holds everything
    remedy: str  # what to do where it does not work
    include: Path | None = None  # the headers it was compiled with, where they are known

    @property
    def folder(self) -> Path:
        return self.paths["llama"].parent

    @property
    def files(self) -> list[Path]:
        """All that belongs to the library, also what it opens by itself."""
        if self.is_one_file:
            return [self.paths["llama"]]
        return sorted(path for path in self.folder.iterdir() if _SUFFIX in path.suffixes or path.suffix == _SUFFIX)

    @property
    def is_one_file(self) -> bool:
        return len(set(self.paths.values())) == 1

    def path(self, library: str) -> Path:
        """Of a library that is in NAMES, or lies beside those and is opened only where it is wanted; it may be missing."""
        found = self.paths.get(library)
        return found or (self.paths["llama"] if self.is_one_file else self.folder / _file_name(library))


def chosen(wanted: str | None = None) -> Provider:
    """The library to use: as *wanted* says, or else the setting PUNA_LIBRARY.

    Errors: NativeLibraryError when there is none, or not the one that is wanted.
    """
    name = settings.load().library if wanted is None else wanted
    if name == "auto":
        found = next(available(), None)
        if found is None:
            raise NativeLibraryError(
                f"the tensor library is not installed in this Python ({sys.executable}): run `pip install {PREBUILT}`"
            )
        return found
    if name == "prebuilt":
        return _required(prebuilt(), f"PUNA_LIBRARY=prebuilt: {PREBUILT} is not installed in this Python ({sys.executable})")
    if name == "compiled":
        return _required(compiled() or installed(), f"PUNA_LIBRARY=compiled: none was compiled for this processor; run `{BUILD}`")
    return named(Path(name).expanduser())


def available() -> Iterator[Provider]:
    """Those that are found without being named, the first one to be used."""
    finders: tuple[Callable[[], Provider | None], ...] = (compiled, installed, prebuilt)
    return (found for find in finders if (found := find()))


def _required(found: Provider | None, otherwise: str) -> Provider:
    if found is None:
        raise NativeLibraryError(otherwise)
    return found


def named(place: Path) -> Provider:
    """The library in a folder, or in one file.

    Errors: NativeLibraryError when there is none.
    """
    remedy = "correct or unset PUNA_LIBRARY"
    if place.is_file():
        return Provider("named", str(place), dict.fromkeys(NAMES, place), remedy)
    paths = _in_folder(place) or _in_folder(place / "lib")
    if paths is None:
        raise NativeLibraryError(f"PUNA_LIBRARY={place}: no {_file_name('llama')} is there, nor is it a file; {remedy}")
    return Provider("named", str(place), paths, remedy)


def compiled(home: Path | None = None) -> Provider | None:
    """What was compiled for this processor and kept in the user's cache."""
    folder = build_home(home)
    try:
        build = folder / (folder / "chosen").read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    paths = _in_folder(build / "lib")
    return Provider("compiled", SOURCE, paths, f"compile it again: `{BUILD} --again`", build / "include") if paths else None


def build_home(home: Path | None = None) -> Path:
    """Where libraries compiled for this processor are kept: one folder each, and their latest's name in ``chosen``."""
    parts = [SOURCE, cpu.model().key, sys.platform, platform.machine(), *platform.libc_ver()]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    return (home or cache.home()) / "native" / key


def installed() -> Provider | None:
    for package in _package("llama_cpp"):
        if paths := _in_folder(package / "lib"):
            return Provider("installed", SOURCE, paths, f"reinstall it here: {SOURCE}", package.parent / "include")
    return None


def prebuilt() -> Provider | None:
    for package in _package("xllamacpp"):
        for file in sorted([*package.glob("xllamacpp*.so"), *package.glob("xllamacpp*.pyd")]):
            remedy = f"reinstall it ({PREBUILT}) or compile one for this processor: `{BUILD}`"
            return Provider("prebuilt", PREBUILT, dict.fromkeys(NAMES, file), remedy)
    return None


def _package(name: str) -> list[Path]:
    """The folders of a package; finding it does not run it."""
    spec = importlib.util.find_spec(name)
    return [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []


def _in_folder(folder: Path) -> dict[str, Path] | None:
    paths = {name: folder / _file_name(name) for name in NAMES}
    return paths if all(path.exists() for path in paths.values()) else None


def _file_name(name: str) -> str:
    return f"{name}.dll" if _SUFFIX == ".dll" else f"lib{name}{_SUFFIX}"
