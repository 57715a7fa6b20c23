"""How many connections a download has, and that it leaves little to be flushed at its end and little in memory."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from puna.store.disk.blobs import Blobs
from puna.store.disk.partial import Part, Partial
from puna.store.progress import Progress, silent
from puna.store.sources.web import download
from puna.store.sources.web.download import Remote, fetch
from tests.patience import PATIENCE_S

PIECE = 64 << 10
PART_BYTES = 1 << 20
N_BYTES = 8 * PART_BYTES
CONTENT = bytes(PIECE)
DIGEST = f"sha256:{hashlib.sha256(bytes(N_BYTES)).hexdigest()}"


class Answer:
    """A part of zeros, each piece of which comes when it may."""

    status = 206

    def __init__(self, begin: int, end: int, may_come: threading.Event | None) -> None:
        self.headers = {"content-range": f"bytes {begin}-{end - 1}/{N_BYTES}"}
        self._n_bytes = end - begin
        self._may_come = may_come

    def blocks(self) -> Iterator[bytes]:
        for at in range(0, self._n_bytes, PIECE):
            if self._may_come is not None:
                assert self._may_come.wait(PATIENCE_S)
            yield CONTENT[: self._n_bytes - at]

    def abort(self) -> None:
        pass


class Server:
    """Counts those who are connected at once; *on_open* gets their number."""

    def __init__(self, may_come: threading.Event | None = None) -> None:
        self.n_open, self.n_most, self.may_come = 0, 0, may_come
        self.grown = threading.Condition()

    @contextmanager
    def open(self, begin: int, end: int) -> Iterator[Answer]:
        with self.grown:
            self.n_open += 1
            self.n_most = max(self.n_most, self.n_open)
            self.grown.notify_all()
        try:
            yield Answer(begin, end, self.may_come)
        finally:
            with self.grown:
                self.n_open -= 1

    def remote(self) -> Remote:
        return Remote(DIGEST, N_BYTES, self.open)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "MIN_PART_BYTES", PART_BYTES)


def test_a_server_that_is_slower_than_the_hash_is_asked_over_all_connections(tmp_path: Path) -> None:
    server = Server(threading.Event())

    def let_all_come() -> None:
        with server.grown:
            server.grown.wait_for(lambda: server.n_open == 4, PATIENCE_S)
        assert server.may_come is not None
        server.may_come.set()

    thread = threading.Thread(target=let_all_come)
    thread.start()
    assert fetch(Blobs(tmp_path), server.remote(), silent, 4).digest == DIGEST
    thread.join()
    assert server.n_most == 4


def test_a_server_that_is_faster_than_the_hash_is_asked_over_one_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_come = threading.Event()
    may_come.set()
    server = Server(may_come)
    begun, come, sha256 = threading.Event(), threading.Event(), hashlib.sha256
    real, n_looks = Partial.write, 0

    class Slow:
        """A hash that begins when all has come."""

        def __init__(self) -> None:
            self._sha256 = sha256()

        def update(self, block: memoryview) -> None:
            assert come.wait(PATIENCE_S)
            self._sha256.update(block)

        def hexdigest(self) -> str:
            return self._sha256.hexdigest()

    def write(self: Partial, part: Part, data: memoryview) -> None:
        real(self, part, data)
        if not begun.is_set():  # the rest comes when it has been thought over whether to connect once more
            may_come.clear()
            begun.set()

    def look(progress: Progress) -> None:
        nonlocal n_looks
        n_looks += 1
        assert begun.wait(PATIENCE_S)
        if n_looks == 3:
            may_come.set()
        if progress.completed == N_BYTES:
            come.set()

    monkeypatch.setattr(Partial, "write", write)
    monkeypatch.setattr(download, "BEHIND_BYTES", 0)
    monkeypatch.setattr(hashlib, "sha256", Slow)
    assert fetch(Blobs(tmp_path), server.remote(), look, 4).digest == DIGEST
    assert server.n_most == 1


def test_what_comes_is_flushed_while_more_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing more comes until what came has been flushed: were that left for the end, none would."""
    may_come = threading.Event()
    may_come.set()
    server = Server(may_come)
    n_flushed: list[int] = []
    real_write, real_flush = Partial.write, os.fsync
    held = threading.Lock()
    n_come = 0

    def write(self: Partial, part: Part, data: memoryview) -> None:
        nonlocal n_come
        real_write(self, part, data)
        with held:
            n_come += len(data)
            if n_come - (n_flushed[-1] if n_flushed else 0) >= 2 * PART_BYTES:
                may_come.clear()

    def flush(descriptor: int) -> None:
        with held:
            n_before = n_come
        real_flush(descriptor)
        with held:
            n_flushed.append(n_before)
            may_come.set()

    monkeypatch.setattr(Partial, "write", write)
    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(download, "NOTE_S", 1e9)
    monkeypatch.setattr(download, "NOTE_BYTES", PART_BYTES)
    fetch(Blobs(tmp_path), server.remote(), silent, 1)
    assert len([n for n in n_flushed if n < N_BYTES]) >= 3


_SERVER_AND_PULL = """
import os, resource, sys
from pathlib import Path
from bench.pulling import served
from puna.store.disk.blobs import Blobs
from puna.store.progress import silent
from puna.store.sources.web.download import Remote, fetch
from puna.store.sources.web.http import Http

source, folder, digest, n_bytes = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
with served(source) as (url, _), Http("127.0.0.1") as http:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ask = lambda begin, end: http.ask("GET", url, {"Range": f"bytes={begin}-{end - 1}"})
    fetch(Blobs(folder), Remote(digest, n_bytes, ask), silent, 4)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def _grown_bytes(folder: Path, n_bytes: int) -> int:
    """By how much the peak of a process grows that pulls so many bytes."""
    source, store = folder / "source", folder / "store"
    with source.open("wb") as file:
        file.truncate(n_bytes)
    digest, block = hashlib.sha256(), bytes(1 << 20)
    for _ in range(n_bytes // len(block)):
        digest.update(block)
    work = [str(source), str(store), f"sha256:{digest.hexdigest()}", str(n_bytes)]
    command = [sys.executable, "-c", _SERVER_AND_PULL, *work]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10 * PATIENCE_S, check=False)
    assert not done.returncode, done.stderr
    source.unlink()
    return int(done.stdout)


@pytest.mark.parametrize("n_mib", [128, pytest.param(2048, marks=pytest.mark.thorough)])
def test_memory_does_not_grow_with_what_is_pulled(tmp_path: Path, n_mib: int) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "large").mkdir()
    small, large = _grown_bytes(tmp_path / "small", n_mib << 17), _grown_bytes(tmp_path / "large", n_mib << 20)
    assert large - small < 8 << 20, f"{small} bytes for {n_mib // 8} MiB, {large} for {n_mib} MiB"
