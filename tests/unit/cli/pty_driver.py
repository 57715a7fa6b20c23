"""Drives ``puna`` on a pseudo-terminal as a person would: sends keys, waits for text on the screen."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.patience import PATIENCE_S

# the child makes the terminal its own, so that Ctrl-C becomes a signal
_BOOT = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, sys.argv[1:])"
_ESCAPES = re.compile(r"\x1b(\[[0-9;?>]*[a-zA-Z]|\][^\x07]*\x07|[=>])|\r")


class Screen:
    def __init__(self, master: int, process: subprocess.Popen[bytes]) -> None:
        self._master = master
        self.process = process
        self.raw = ""
        self._seen = 0

    def send(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait_for(self, text: str) -> str:
        """Everything shown since the last call, up to and including *text*."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self._unseen():
            assert self._read(deadline - time.monotonic()), f"no {text!r} in {self._unseen()!r}"
        shown = self._unseen()
        end = shown.index(text) + len(text)
        self._seen += end
        return shown[:end]

    def wait_for_end(self) -> tuple[str, int]:
        """What is shown until the program ends, and its exit status."""
        deadline = time.monotonic() + PATIENCE_S
        while self._read(deadline - time.monotonic()):
            pass
        return self._unseen(), self.process.wait(max(deadline - time.monotonic(), 1))

    def _unseen(self) -> str:
        return _ESCAPES.sub("", self.raw)[self._seen :]

    def _read(self, timeout: float) -> bool:
        if not select.select([self._master], [], [], max(timeout, 0))[0]:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:  # Linux' way to say that nobody has the terminal open any more
            return False
        self.raw += data.decode("utf-8", "replace")
        if "\x1b[6n" in data.decode("utf-8", "replace"):
            self.send("\x1b[1;1R")  # the terminal's answer to "where is the cursor?"
        return bool(data)


@contextmanager
def terminal(*arguments: str, env: dict[str, str], cwd: Path, script: list[str] | None = None) -> Iterator[Screen]:
    """Run ``python -m puna`` (or *script*) with *arguments* on a terminal of 80 columns."""
    master, slave = pty.openpty()
    command = [sys.executable, "-c", _BOOT, sys.executable, *(script or ["-m", "puna"]), *arguments]
    process = subprocess.Popen(
        command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**env, "COLUMNS": "80", "LINES": "24"},
        cwd=cwd,
        start_new_session=True,
    )
    os.close(slave)
    try:
        yield Screen(master, process)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(master)
