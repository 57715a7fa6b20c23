"""Workers on this machine for tests of devices on other machines: real ones, on free ports of loopback."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from puna.errors import NativeLibraryError
from puna.native.rpc import rpc
from tests import needs
from tests.patience import PATIENCE_S

THREADS = "1"


def needed() -> None:
    """Called where a module begins that computes on workers."""
    try:
        rpc()
    except NativeLibraryError as error:
        if os.environ.get("PUNA_LIBRARY") == "prebuilt":  # it never has them, and that it says so has a test of its own
            pytest.skip(str(error), allow_module_level=True)
        needs.missing(str(error))


class WorkerProcess:
    """Is there when it listens."""

    def __init__(self, *options: str, port: int = 0) -> None:
        command = [sys.executable, "-m", "puna", "rpc-worker", "--port", str(port), "--threads", THREADS, *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.said: list[str] = []
        self._listens = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        assert self._listens.wait(PATIENCE_S)
        found = re.search(r"RPC worker \(protocol [\d.]+\) on .*:(\d+)$", "".join(self.said).strip())
        if not found:
            self.close()
            raise AssertionError("".join(self.said))
        self.port = int(found.group(1))

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.said.append(line)
                if line.startswith("RPC worker"):
                    self._listens.set()
        self._listens.set()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def device(self) -> str:
        return f"RPC0[{self.endpoint}]"

    def kill(self) -> None:
        """As a machine that goes down takes them: without a word."""
        self.process.kill()
        self.close()

    def close(self) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self._reader.join(PATIENCE_S)


@contextmanager
def running(n: int = 1, *options: str) -> Iterator[list[WorkerProcess]]:
    workers: list[WorkerProcess] = []
    try:
        for _ in range(n):
            workers.append(WorkerProcess(*options))
        yield workers
    finally:
        for worker in workers:
            worker.close()
