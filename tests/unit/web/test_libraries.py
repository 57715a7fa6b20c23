"""What the page takes from others: pinned, fetched once, and missed without harm."""

from __future__ import annotations

import json
import re
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from puna.web import libraries
from tests import needs

# In place of npm: leaves the files that are asked for, or fails as it does.
NPM = """#!{python}
import json, pathlib, sys
assert sys.argv[1:2] == ["ci"] and "--ignore-scripts" in sys.argv, sys.argv
lock = json.loads(pathlib.Path("package-lock.json").read_text())
pathlib.Path({log!r}).open("a").write("asked\\n")
if {fails!r}:
    sys.exit("npm error code ENOTFOUND")
for name in {names!r}:
    path = pathlib.Path("node_modules") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("// " + name)
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs, and no others; nor what was fetched before."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    return folder


def put_npm(folder: Path, *, fails: bool = False) -> Path:
    log = folder / "log"
    python = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin") or "/usr/bin/env python3"
    (folder / "npm").write_text(NPM.format(python=python, log=str(log), fails=fails, names=list(libraries.TAKEN.values())))
    (folder / "npm").chmod(0o755)
    return log


def test_they_are_fetched_once_and_found_in_the_cache_afterwards(programs: Path, tmp_path: Path) -> None:
    log = put_npm(programs)
    target = libraries.fetch(tmp_path / "one")
    assert {path.name for path in target.iterdir()} == set(libraries.TAKEN)
    assert (target / "marked.js").read_text() == "// marked/lib/marked.esm.js"
    (programs / "npm").unlink()
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "old.js").touch()
    assert {path.name for path in libraries.fetch(tmp_path / "two").iterdir()} == set(libraries.TAKEN)
    assert log.read_text() == "asked\n"


def test_without_npm_it_is_said(programs: Path, tmp_path: Path) -> None:
    with pytest.raises(libraries.FetchError, match="npm was not found"):
        libraries.fetch(tmp_path / "none")


def test_what_npm_says_is_said_and_nothing_is_kept(programs: Path, tmp_path: Path) -> None:
    put_npm(programs, fails=True)
    with pytest.raises(libraries.FetchError, match="ENOTFOUND"):
        libraries.fetch(tmp_path / "none")
    assert not list(libraries.cache_folder().iterdir())
    put_npm(programs)
    libraries.fetch(tmp_path / "some")


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often npm asked a registry for what, which has an excuse each time."""
    asked: Counter[str] = Counter()

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked[self.path] += 1
            self.send_error(503)

        def log_message(self, *_given: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("NPM_CONFIG_REGISTRY", f"http://127.0.0.1:{server.server_port}/")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield asked
        server.shutdown()


def test_a_registry_that_refuses_is_asked_once_more_and_not_waited_for(
    refusals: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs.node()
    monkeypatch.setenv("NPM_CONFIG_CACHE", str(tmp_path / "npm"))
    with pytest.raises(libraries.FetchError, match="503"):
        libraries.fetch(tmp_path / "none", tmp_path / "cache")
    assert refusals
    assert max(refusals.values()) == 2


def test_versions_are_exact_and_digests_known_and_no_address_is_written_down() -> None:
    wanted = json.loads((libraries.FOLDER / "package.json").read_text())["dependencies"]
    text = (libraries.FOLDER / "package-lock.json").read_text()
    locked = json.loads(text)["packages"]
    assert locked[""]["dependencies"] == wanted
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in wanted.values())
    for name, version in wanted.items():
        assert locked[f"node_modules/{name}"]["version"] == version
    assert all(package["integrity"].startswith("sha512-") for name, package in locked.items() if name)
    assert "resolved" not in text
    assert {name for name in wanted if any(source.startswith(f"{name}/") for source in libraries.TAKEN.values())} == set(wanted)


def test_each_comes_with_its_licence() -> None:
    modules = {name.removesuffix(".js") for name in libraries.TAKEN if name.endswith(".js")}
    assert {f"{name}-license.txt" for name in modules} == {name for name in libraries.TAKEN if name.endswith(".txt")}
