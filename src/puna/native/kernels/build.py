"""Compile the library of matrix products, once for each instruction set, into one shared library beside its sources.

Uses the standard library only, so that the package's own build can run it before anything is installed:
``python -m puna.native.kernels.build`` does it by hand. What is compiled is kept in the user's cache folder under a key of
sources, compiler and options; it does not depend on the processor, since the library asks for that when it is opened. What was
not used for a month goes from there when something is added.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
LIBRARY = FOLDER / "libpuna-kernels.so"
OPTIONS = (
    *("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off"),
    *("-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized"),  # GCC 12 warns of its own headers
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
PORTABLE: Mapping[str, tuple[str, ...]] = {"portable": ()}
X86_64: Mapping[str, tuple[str, ...]] = {
    "avx2": _AVX2,
    "avx_vnni": (*_AVX2, "-mavxvnni"),
    "avx512": _AVX512,
    "avx512_vnni": (*_AVX512, "-mavx512vnni"),
    "avx512_bf16": (*_AVX512, "-mavx512vnni", "-mavx512bf16"),
    "amx": (*_AVX512, "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16", "-DPUNA_TILES"),
}
_NEON = ("-DPUNA_NEON",)
AARCH64: Mapping[str, tuple[str, ...]] = {
    "neon": (*_NEON, "-march=armv8-a"),
    "neon_dot": (*_NEON, "-march=armv8.2-a+dotprod"),
    "neon_i8mm": (*_NEON, "-march=armv8.2-a+dotprod+i8mm"),
}
# What is compiled once per instruction set, and for which of them.
PER_INSTRUCTIONS = {
    "instructions": (*PORTABLE, *X86_64, *AARCH64),
    "attention_instructions": ("portable", "avx2", "avx512", "neon"),
}
TIMEOUT_S = 600
SCRATCH = "puna-kernels-"  # how the names of folders begin that are compiled in
DAY_S = 24 * 3600.0
MOST_DAYS, MOST_KEPT = 30, 16  # of libraries that were not used; what was used within a day stays in any case


class BuildError(Exception):
    """The compiler's own words, or that there is none."""


def instruction_sets(machine: str = platform.machine()) -> Mapping[str, tuple[str, ...]]:
    """Besides the portable one, for the processors of one kind."""
    of_machine = {"x86_64": X86_64, "AMD64": X86_64, "aarch64": AARCH64, "arm64": AARCH64}
    return {**PORTABLE, **of_machine.get(machine, {})}


def compiler(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The C++ compiler as a command; empty where there is none."""
    wanted = shlex.split(environ.get("CXX", ""))
    for command in (wanted, ["c++"], ["g++"], ["clang++"]):
        if command and shutil.which(command[0]):
            return command
    return []


def sources() -> list[Path]:
    return sorted([*FOLDER.glob("*.cpp"), *FOLDER.glob("*.h")])


def key(command: list[str], options: tuple[str, ...], machine: str = platform.machine()) -> str:
    """The same key, the same library."""
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False, timeout=60).stdout
    sets = sorted(instruction_sets(machine).items()), sorted(PER_INSTRUCTIONS.items())
    parts = [version, *command, *options, repr(sets), machine, *platform.libc_ver()]
    parts += [source.name + "\0" + source.read_text() for source in sources()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def compile_library(
    target: Path, command: list[str], options: tuple[str, ...] = OPTIONS, machine: str = platform.machine()
) -> None:
    """*machine*: the kind of processor that the command compiles for.

    Errors: BuildError.
    """
    _remove_abandoned()
    with tempfile.TemporaryDirectory(prefix=SCRATCH) as scratch:
        sets = understood(command, instruction_sets(machine), Path(scratch))
        best_first = "".join(f"&{name}_instructions," for name in reversed([*sets]))
        units = [
            (f"{source}-{name}.o", f"{source}.cpp", (f"-DPUNA_INSTRUCTIONS={name}", *own))
            for source, of_source in PER_INSTRUCTIONS.items()
            for name, own in sets.items()
            if name in of_source
        ]
        others = (path.name for path in sources() if path.suffix == ".cpp" and path.stem not in PER_INSTRUCTIONS)
        units += [(f"{name}.o", name, (f"-DPUNA_KNOWN={best_first}",)) for name in others]

        def compiled(unit: tuple[str, str, tuple[str, ...]]) -> str:
            output, source, own = unit
            path = os.path.join(scratch, output)
            _run([*command, *options, *own, "-c", str(FOLDER / source), "-o", path])
            return path

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            objects = list(pool.map(compiled, units))
        linked = os.path.join(scratch, target.name)
        _run([*command, *options, "-shared", *objects, "-o", linked])
        _put(Path(linked), target)


def understood(command: list[str], sets: Mapping[str, tuple[str, ...]], scratch: Path) -> dict[str, tuple[str, ...]]:
    """Of several instruction sets those that the compiler knows: older ones lack the newest.

    Errors: BuildError where it knows none.
    """
    found: dict[str, tuple[str, ...]] = {}
    nothing = scratch / "nothing.cpp"
    nothing.write_text("")
    for name, own in sets.items():
        try:
            _run([*command, *own, "-c", str(nothing), "-o", str(nothing.with_suffix(".o"))])
            found[name] = own
        except BuildError:
            if name in PORTABLE:
                raise
    return found


def _put(source: Path, target: Path) -> None:
    """Whole or not at all; a process that has the old one open keeps it.

    Errors: OSError.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = tempfile.NamedTemporaryFile(dir=target.parent, delete=False)  # noqa: SIM115 - closed below, and gone if that fails
    try:
        with scratch, source.open("rb") as opened:
            shutil.copyfileobj(opened, scratch)
        os.chmod(scratch.name, 0o755)
        os.replace(scratch.name, target)
    except OSError:
        os.unlink(scratch.name)
        raise


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}".strip())


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "puna" / "kernels"


def kept(
    command: list[str],
    options: tuple[str, ...] = OPTIONS,
    machine: str = platform.machine(),
    cache: Path | None = None,
) -> Path:
    """The library in the cache, compiled if it is not there as it was written: a power failure may leave less of it.

    Errors: BuildError; OSError and RuntimeError where nothing can be kept.
    """
    folder = cache or cache_folder()
    library = folder / key(command, options, machine) / LIBRARY.name
    seal = library.with_suffix(".sha256")
    with suppress(OSError):  # it is not there, or not ours
        os.utime(library.parent)
    if not (library.exists() and seal.exists() and seal.read_text() == _digest(library)):
        compile_library(library, command, options, machine)
        seal.write_text(_digest(library))
        _tidy(folder)
    return library


def _tidy(cache: Path) -> None:
    """Of what is kept, that goes which was not used for so many days, and what is more than so much, unused for longest.

    The rule of puna.native.cache, which nothing can import before the package is installed.
    """
    with suppress(OSError):
        found = [path for path in cache.iterdir() if re.fullmatch(r"[0-9a-f]{20}", path.name)]
        for i, (unused_s, path) in enumerate(sorted((_unused_s(path), path) for path in found)):
            if unused_s > MOST_DAYS * DAY_S or (i >= MOST_KEPT and unused_s > DAY_S):
                shutil.rmtree(path, ignore_errors=True)


def _remove_abandoned() -> None:
    """Folders of this user that builds were killed in: one that goes on writes to its own once in TIMEOUT_S at least."""
    with suppress(OSError):
        for path in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*"):
            if _unused_s(path) > DAY_S:
                shutil.rmtree(path, ignore_errors=True)


def _unused_s(folder: Path) -> float:
    """For how long; 0 where it is no folder of this user's, or another process has just removed it."""
    try:
        found = folder.lstat()
    except OSError:
        return 0.0
    is_own = stat.S_ISDIR(found.st_mode) and (not hasattr(os, "getuid") or found.st_uid == os.getuid())
    return time.time() - found.st_mtime if is_own else 0.0


def build(target: Path = LIBRARY, cache: Path | None = None) -> Path:
    """The library at *target*, from the cache or compiled now.

    Errors: BuildError, also where there is no compiler.
    """
    command = compiler()
    if not command:
        raise BuildError("no C++ compiler was found")
    try:
        library: Path | None = kept(command, OPTIONS, cache=cache)
    except (OSError, RuntimeError):  # there is no home, or it cannot be written
        library = None
    try:
        if library is None:
            compile_library(target, command, OPTIONS)
        else:
            _put(library, target)
    except OSError as error:
        raise BuildError(f"{target} cannot be written: {error}") from error
    return target


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def main() -> int:
    try:
        print(build())
    except BuildError as error:
        print(f"the matrix products were not compiled: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
