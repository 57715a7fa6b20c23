"""A benchmark that is ended by SIGTERM leaves no process behind."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.patience import PATIENCE_S
from tests.tiny import write_llama

# With a model that is there, and without the package that is compared with.
LOADING = """
import pathlib, sys
from bench import loading
path = pathlib.Path(sys.argv.pop())
loading.models.smollm2 = lambda: path
loading.has_peer = lambda: True
loading.PEER = "import time; time.sleep(3600)"
loading.main()
"""
FIRST_TOKEN = """
import os, sys
from bench.ending import interrupt_on_sigterm
from bench.first_token import first_byte
interrupt_on_sigterm()
first_byte([sys.executable, "-c", "import time; time.sleep(3600)"], dict(os.environ))
"""


def runs(process: psutil.Process) -> bool:
    """What has ended waits for this machine's first process to notice; not every one does."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


@pytest.mark.parametrize(
    ("arguments", "n_processes"),
    [
        (["-m", "bench.load.soak", "--only", "runner", "--requests", "10000000"], 1),
        (["-m", "bench.load.soak", "--only", "server", "--requests", "10000000"], 2),
        (["-m", "bench.load.chaos", "--requests", "10000000"], 2),
        (["-c", LOADING, "--model", "smollm2"], 4),  # two servers, the spare of one, the peer
        (["-c", FIRST_TOKEN], 1),
    ],
    ids=["a runner's soak", "a server's soak", "chaos", "loading", "first token"],
)
def test_nothing_is_left(tmp_path: Path, arguments: list[str], n_processes: int) -> None:
    model = [str(write_llama(tmp_path / "tiny.gguf", n_layers=1, n_ctx=2048))] if LOADING in arguments else []
    with (tmp_path / "log").open("w") as log:
        program = subprocess.Popen([sys.executable, *arguments, *model], stdout=log, stderr=log)
    seen: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + PATIENCE_S
        while len(seen) < n_processes:
            assert program.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, (seen, (tmp_path / "log").read_text())
            time.sleep(0.1)
            seen = psutil.Process(program.pid).children(recursive=True)
        time.sleep(0.5)  # at work
        seen = psutil.Process(program.pid).children(recursive=True)
        program.send_signal(signal.SIGTERM)
        program.wait(PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        while left := [process for process in seen if runs(process)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
    finally:
        for process in seen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        program.kill()
        program.wait()
