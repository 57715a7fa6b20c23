"""Drives ``puna`` on a pseudo-terminal as a person would: sends keys, waits for text, changes the size, sees what is shown.

What the program writes is also drawn by a terminal emulator, so that a test can look at the screen and not only at the bytes.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyte
from tests.patience import PATIENCE_S

# the child makes the terminal its own, so that Ctrl-C becomes a signal
_BOOT = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, sys.argv[1:])"
_ESCAPES = re.compile(r"\x1b(\[[0-9;?>]*[a-zA-Z]|\][^\x07]*\x07|[=>])|\r")


class _Drawn(pyte.Screen):
    """Answers questions of the program, as to "where is the cursor?"."""

    def __init__(self, columns: int, lines: int, answer: Callable[[str], None]) -> None:
        super().__init__(columns, lines)
        self._answer = answer

    def write_process_input(self, data: str) -> None:
        self._answer(data)


class Screen:
    """A terminal and the program in it."""

    def __init__(self, master: int, process: subprocess.Popen[bytes], columns: int, lines: int) -> None:
        self._master = master
        self.process = process
        self.raw = ""
        self._seen = 0
        self._drawn = _Drawn(columns, lines, self.send)
        self._emulator = pyte.ByteStream(self._drawn)

    @property
    def lines(self) -> list[str]:
        """What is on the screen now, but for empty lines."""
        return [line.rstrip() for line in self._drawn.display if line.strip()]

    @property
    def colours(self) -> set[str]:
        """Of the characters on the screen now."""
        rows = self._drawn.buffer.values()
        return {colour for row in rows for cell in row.values() for colour in (cell.fg, cell.bg)} - {"default"}

    def send(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        """As a person does with the mouse: the program gets SIGWINCH."""
        self._drawn.resize(lines, columns)
        set_size(self._master, columns, lines)

    def wait_for(self, text: str) -> str:
        """Everything shown since the last call, up to and including *text*."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self._unseen():
            assert self._read(deadline - time.monotonic()), f"no {text!r} in {self._unseen()!r}"
        shown = self._unseen()
        end = shown.index(text) + len(text)
        self._seen += end
        return shown[:end]

    def wait_until_shown(self, line: str) -> list[str]:
        """The screen once it has a line that is *line*."""
        deadline = time.monotonic() + PATIENCE_S
        while line not in self.lines:
            assert self._read(deadline - time.monotonic()), f"no {line!r} in {self.lines!r}"
        return self.lines

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
        self._emulator.feed(data)
        return bool(data)


def drawn(text: str, columns: int) -> list[str]:
    """What a terminal of so many columns shows of a text, but for empty lines."""
    screen = pyte.Screen(columns, 200)
    pyte.Stream(screen).feed(text)
    return [line.rstrip() for line in screen.display if line.strip()]


def set_size(descriptor: int, columns: int, lines: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


@contextmanager
def terminal(
    *arguments: str, env: dict[str, str], cwd: Path, script: list[str] | None = None, columns: int = 80, lines: int = 24
) -> Iterator[Screen]:
    """Run ``python -m puna`` (or *script*) with *arguments* on a terminal of so many columns and lines."""
    master, slave = pty.openpty()
    set_size(master, columns, lines)
    command = [sys.executable, "-c", _BOOT, sys.executable, *(script or ["-m", "puna"]), *arguments]
    known = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES")}  # these hide the real size
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=known, cwd=cwd, start_new_session=True)
    os.close(slave)
    try:
        yield Screen(master, process, columns, lines)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(master)
