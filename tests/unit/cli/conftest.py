from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S
from tests.unit.api.fake_server import FakeServer, running

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def shared_fake() -> Iterator[FakeServer]:
    with running() as server:
        yield server


@pytest.fixture
def fake(shared_fake: FakeServer) -> FakeServer:
    """A server that remembers nothing."""
    shared_fake.reset()
    return shared_fake


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A clean environment whose home is a folder of the test's own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OLLAMA_", "COLUMNS", "LINES"))}
    return {**kept, "HOME": str(tmp_path), "TERM": "xterm"}


@pytest.fixture
def puna(fake: FakeServer, environment: dict[str, str], tmp_path: Path) -> Cli:
    """Run ``puna`` against the fake server, with nothing on standard input unless told."""

    def run(*arguments: str, stdin: str | bytes = b"") -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "puna", *arguments],
            input=stdin.encode() if isinstance(stdin, str) else stdin,
            capture_output=True,
            cwd=tmp_path,
            env={**environment, "OLLAMA_HOST": fake.address.url},
            timeout=PATIENCE_S,
        )
        return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())

    return run
