"""Puna as people install it: the distributions that are built, and an environment with nothing but them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from tools import manual, setup

from puna import __version__
from puna.native.kernels import build as kernels
from puna.store.store import Store
from puna.web import files, libraries
from tests import needs
from tests.conftest import STARTER

ROOT = Path(setup.__file__).resolve().parent.parent
PAGE = "puna/web/page"
LIBRARY = f"puna/native/kernels/{kernels.LIBRARY.name}"
pytestmark = pytest.mark.thorough

QUESTION = "What is the capital of France? Answer in one short sentence."
TIMEOUT_S = 600.0


def _run(*command: str | Path, environ: Mapping[str, str] = os.environ, cwd: Path = ROOT) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env=environ, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _with_npm() -> dict[str, str]:
    """As `make dist` builds: npm is the one of the development environment."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}


def _built(folder: Path, *options: str, environ: Mapping[str, str] = os.environ) -> None:
    _run(sys.executable, "-m", "build", "--outdir", folder, *options, ROOT, environ=environ)


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `python -m build` leaves: a source archive, and the wheel that was built of it."""
    folder = tmp_path_factory.mktemp("dist")
    _built(folder, environ=_with_npm())
    return folder


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> Path:
    [path] = distributions.glob("*.whl")
    return path


def test_one_wheel_for_every_python_of_a_platform(wheel: Path) -> None:
    needs.cxx_compiler()
    name, version, python, abi, platform = wheel.name.removesuffix(".whl").split("-")
    assert (name, version, python, abi) == ("puna", __version__, "py3", "none")
    assert platform != "any"
    assert LIBRARY in zipfile.ZipFile(wheel).namelist()


def test_the_wheel_brings_what_shells_and_man_look_for(wheel: Path) -> None:
    data = {name.partition(".data/data/")[2] for name in zipfile.ZipFile(wheel).namelist() if ".data/data/" in name}
    assert data == set(manual.files())


def test_the_wheel_brings_the_page_with_all_that_it_takes_from_others(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith(f"{PAGE}/")}
    own = {f"{PAGE}/{path.relative_to(files.PAGE).as_posix()}" for path in _own_files()}
    assert names == own | {f"{PAGE}/libraries/{name}" for name in libraries.TAKEN}


def _own_files() -> list[Path]:
    return [path for path in files.PAGE.rglob("*") if path.is_file() and libraries.TARGET not in path.parents]


def test_the_archive_has_all_that_a_build_needs_and_no_product_of_one(distributions: Path) -> None:
    [path] = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(source.relative_to(ROOT)) for source in kernels.sources()}
    assert sources | {"pyproject.toml", "setup.py", "README.md", "LICENSE", "src/puna/py.typed"} | set(manual.files()) <= names
    web = {str(path.relative_to(ROOT)) for path in [*_own_files(), *(libraries.FOLDER / name for name in libraries.LISTS)]}
    assert web <= names
    assert [name for name in names if name.endswith((".so", ".pyc", ".gguf")) or "/libraries/" in name] == []


def test_without_a_compiler_and_npm_the_wheel_is_for_any_platform(tmp_path: Path) -> None:
    nothing = tmp_path / "bin"
    nothing.mkdir()
    environ = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX")} | {"PATH": str(nothing)}
    environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")  # nothing that was fetched before is found
    _built(tmp_path, "--wheel", environ=environ)
    [path] = tmp_path.glob("*.whl")
    assert path.name == f"puna-{__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(path).namelist()
    assert LIBRARY not in names
    assert f"{PAGE}/index.html" in names
    assert not [name for name in names if "/libraries/" in name]
    assert "puna/native/kernels/product.h" in names  # for whoever gets a compiler later


def test_an_empty_environment_answers_after_one_command(wheel: Path, starter_store: Store, tmp_path: Path) -> None:
    shutil.copytree(starter_store.root, tmp_path / "models", copy_function=os.link)
    place = tmp_path / "environment"
    _run(sys.executable, "-m", "venv", place)
    environ = os.environ | {
        "PIP_ONLY_BINARY": ":all:",  # nothing is compiled
        "XDG_CACHE_HOME": str(tmp_path / "cache"),  # nothing that was compiled for this machine is found
        "OLLAMA_MODELS": str(tmp_path / "models"),
        "OLLAMA_HOST": "127.0.0.1:1",  # nobody listens there: the command starts its own server
    }
    environ = {name: value for name, value in environ.items() if name not in ("PYTHONPATH", "PUNA_LIBRARY")}
    _run(place / "bin" / "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel, environ=environ)
    puna = place / "bin" / "puna"
    (tmp_path / "Modelfile").write_text(f"FROM {STARTER}\nPARAMETER temperature 0\nPARAMETER num_predict 40\n")
    _run(puna, "create", "sure", "-f", "Modelfile", environ=environ, cwd=tmp_path)
    assert "Paris" in _run(puna, "run", "sure", QUESTION, environ=environ, cwd=tmp_path)
    assert (place / "share" / "man" / "man1" / "puna.1").is_file()
    assert (place / "share" / "bash-completion" / "completions" / "puna").is_file()
    where = _run(place / "bin" / "python", "-c", "import puna; print(puna.__file__)", environ=environ, cwd=tmp_path)
    assert where.startswith(str(place))
