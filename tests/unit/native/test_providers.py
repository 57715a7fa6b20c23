"""Which library is used, in which order they are looked for, and what is said where one is missing or does not fit."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from puna.errors import NativeLibraryError
from puna.native import cpu, fit, providers
from puna.native.ggml import STRUCTS, ggml
from puna.native.library import Functions, Opened, opened
from puna.native.llama import LONG, SHORT, llama, llama_context_params, structs_of
from puna.native.providers import Provider, build_home, chosen
from puna.native.signature import declare
from tests.patience import PATIENCE_S

SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")


def library_in(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in providers.NAMES:
        (folder / f"lib{name}{SUFFIX}").write_text(name)
    return folder


def package(site: Path, name: str) -> Path:
    """A package that ends the process when it is imported."""
    (site / name).mkdir(parents=True)
    (site / name / "__init__.py").write_text("raise SystemExit('it was imported')")
    return site / name


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Without any library: an empty cache, an empty folder of packages."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PUNA_LIBRARY", raising=False)
    for name in ("llama_cpp", "xllamacpp"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    return tmp_path


def with_prebuilt(machine: Path) -> Path:
    file = package(machine / "site", "xllamacpp") / "xllamacpp.abi3.so"
    file.write_text("")
    return file


def with_installed(machine: Path) -> Path:
    return library_in(package(machine / "site", "llama_cpp") / "lib")


def with_compiled() -> Path:
    library_in(build_home() / "one" / "lib")
    (build_home() / "chosen").write_text("one\n")
    return build_home() / "one" / "lib"


def test_without_any_the_error_names_the_package(machine: Path) -> None:
    with pytest.raises(NativeLibraryError, match=r"not installed .*pip install xllamacpp=="):
        chosen()


def test_the_one_compiled_for_this_processor_goes_before_the_prebuilt_one(machine: Path) -> None:
    file = with_prebuilt(machine)
    assert (chosen().kind, chosen().paths["ggml-cpu"], chosen().files) == ("prebuilt", file, [file])
    folder = with_installed(machine)
    assert (chosen().kind, chosen().folder) == ("installed", folder)
    folder = with_compiled()
    assert (chosen().kind, chosen().folder) == ("compiled", folder)
    assert len(chosen().files) == len(providers.NAMES)
    assert [found.kind for found in providers.available()] == ["compiled", "installed", "prebuilt"]


def test_what_the_setting_names_is_used_whatever_there_is(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_compiled()
    file, own = with_prebuilt(machine), library_in(machine / "own" / "lib")
    for value, kind, path in [
        ("prebuilt", "prebuilt", file),
        ("compiled", "compiled", build_home() / "one" / "lib" / f"libllama{SUFFIX}"),
        (str(own), "named", own / f"libllama{SUFFIX}"),
        (str(own.parent), "named", own / f"libllama{SUFFIX}"),
        (str(file), "named", file),
    ]:
        monkeypatch.setenv("PUNA_LIBRARY", value)
        assert (chosen().kind, chosen().paths["llama"]) == (kind, path)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("prebuilt", "PUNA_LIBRARY=prebuilt: xllamacpp.* is not installed"),
        ("compiled", "PUNA_LIBRARY=compiled: .* run `puna native build`"),
        ("/nowhere", "PUNA_LIBRARY=/nowhere: no .*llama.* is there"),
    ],
)
def test_what_is_named_and_missing_is_an_error(machine: Path, value: str, says: str) -> None:
    with pytest.raises(NativeLibraryError, match=says):
        chosen(value)


def test_a_library_for_another_processor_is_not_seen(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_prebuilt(machine)
    with_compiled()
    monkeypatch.setattr(cpu, "model", lambda: cpu.Model("another", frozenset({"amx_tile"})))
    assert chosen().kind == "prebuilt"


def test_half_a_build_is_not_seen(machine: Path) -> None:
    with_prebuilt(machine)
    folder = with_compiled()
    (folder / f"libggml-cpu{SUFFIX}").unlink()
    assert chosen().kind == "prebuilt"


def test_a_file_that_is_no_library_is_named(tmp_path: Path) -> None:
    file = tmp_path / "broken.so"
    file.write_text("no library")
    with pytest.raises(NativeLibraryError, match=r"broken\.so.* cannot be opened.*; unset PUNA_LIBRARY"):
        Opened(Provider("named", str(file), dict.fromkeys(providers.NAMES, file), "unset PUNA_LIBRARY"))


def test_a_library_of_something_else_is_named() -> None:
    mapped = (Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines())
    file = next(path for path in mapped if path.name.startswith(("libc.so", "libc-", "ld-musl")))
    with pytest.raises(NativeLibraryError, match="does not fit: it has no function ggml_version"):
        Opened(Provider("named", str(file), dict.fromkeys(providers.NAMES, file), "unset PUNA_LIBRARY"))


def test_every_function_that_is_missing_is_named() -> None:
    with pytest.raises(NativeLibraryError, match="no function ggml_not_there, ggml_nor_there; "):
        opened().bind("ggml", {"ggml_not_there": "v ", "ggml_version": "s "}, {"ggml_nor_there": "v "}, STRUCTS)


# ---- structs, without headers


def test_the_library_that_is_open_fits() -> None:
    assert list(fit.ggml_misfits(ggml(), STRUCTS)) == []
    assert list(fit.llama_misfits(llama())) == []


def _swapped(struct: type[ctypes.Structure], first: int, second: int) -> type[ctypes.Structure]:
    """The same with two neighbours' names exchanged."""
    fields = [list(field) for field in struct._fields_]
    fields[first][0], fields[second][0] = fields[second][0], fields[first][0]
    return type(struct.__name__, (ctypes.Structure,), {"_fields_": [tuple(field) for field in fields]})


# What a wrong table would take for one another; a tensor without an extra and padding of zeros look the same.
TENSOR_SLIPS = [("ne", "nb"), ("op", "type"), ("view_src", "view_offs"), ("data", "view_src"), ("flags", "op"), ("extra", "data")]


@pytest.mark.parametrize(("one", "other"), TENSOR_SLIPS)
def test_a_slip_in_the_tensor_is_found(one: str, other: str) -> None:
    names = [field[0] for field in STRUCTS["ggml_tensor"]._fields_]
    wrong = _swapped(STRUCTS["ggml_tensor"], names.index(one), names.index(other))
    assert next(fit.ggml_misfits(ggml(), {**STRUCTS, "ggml_tensor": wrong})).startswith(
        "a ggml_tensor takes" if ctypes.sizeof(wrong) != 336 else "ggml_tensor."
    )


def test_a_tensor_of_another_size_is_found() -> None:
    class Longer(ctypes.Structure):
        _fields_ = [*STRUCTS["ggml_tensor"]._fields_, ("more", ctypes.c_int64)]

    assert "bytes and not" in next(fit.ggml_misfits(ggml(), {**STRUCTS, "ggml_tensor": Longer}))


def test_the_parameters_of_another_version_are_found() -> None:
    """A switch would be read from the bytes of another: this is what the table of a neighbouring version looks like."""
    other = next(structs_of(v)["llama_context_params"] for v in providers.TESTED_GGML if v != opened().version)
    # The library may write more than the other struct holds.
    padded = type("padded", (ctypes.Structure,), {"_fields_": [*other._fields_, ("rest", ctypes.c_uint8 * 64)]})
    library = ctypes.CDLL(str(opened().paths["llama"]))  # a handle of its own: others have declared the same functions rightly
    functions = Functions()
    for name in ("llama_model_default_params", "llama_context_default_params", "llama_batch_init", "llama_batch_free"):
        structs = {**structs_of(opened().version), "llama_context_params": padded}
        setattr(functions, name, declare(getattr(library, name), (SHORT | LONG)[name], structs))
    assert next(fit.llama_misfits(functions)).startswith("llama_context_params.")


def test_contexts_know_when_to_stop_whichever_the_version() -> None:
    """The field that was added stands before the callback that ends a computation."""
    older, newer = llama_context_params, structs_of("0.26.0")["llama_context_params"]
    assert newer.abort_callback.offset - older.abort_callback.offset == ctypes.sizeof(ctypes.c_size_t)
    assert newer.type_v.offset == older.type_v.offset
    assert [f[0] for f in newer._fields_ if f[0] != "moe_cache_size"] == [f[0] for f in older._fields_]


def test_a_library_that_cannot_be_used_is_reported_with_its_reason(tmp_path: Path) -> None:
    file = tmp_path / "broken.so"
    file.write_text("no library")
    done = subprocess.run(
        [sys.executable, "-m", "puna.native.report"],
        env={**os.environ, "PUNA_LIBRARY": str(file), "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1
    assert f"error: the tensor library ({file}) cannot be opened: " in done.stdout
