"""The processes that read images: started when first needed, replaced when an image was too much for one, ended with this one.

Any thread may ask, and waits for its answer.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from puna.environment import for_computing
from puna.errors import BadRequest, Overloaded
from puna.vision.images.limits import LIMIT_S, PATIENCE, PIXELS, PROBLEM, READY, REPLY, REQUEST
from puna.vision.model import Pixels

log = logging.getLogger(__name__)

MAX_PROCESSES = 2  # an image that takes all its time keeps one; the others' go through the next
START_S = 60.0
# What an image took goes back to the system when it is freed, and is not kept for the next (glibc's would be).
_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


class Ended(Exception):
    """The process is gone, in the middle of an image or before."""


class Reader:
    """One process."""

    def __init__(self, command: tuple[str, ...]) -> None:
        """Errors: OSError."""
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**for_computing(), **_ENVIRONMENT},
        )
        self.is_late = False

    def wait_until_ready(self) -> None:
        """Errors: Ended."""
        with self._within(START_S):
            if self._reply()[0] != READY:
                raise Ended

    def read(self, data: bytes, limit_s: float) -> Pixels:
        """Errors: BadRequest with what the process says of the image; Ended."""
        assert self.process.stdin is not None
        with self._within(limit_s):
            try:
                self.process.stdin.write(REQUEST.pack(len(data)) + data)
                self.process.stdin.flush()
            except OSError as error:
                raise Ended from error
            kind, first, second = self._reply()
            if kind == PROBLEM:
                raise BadRequest(self._bytes(first).decode("utf-8", "replace"))
            if kind != PIXELS:
                raise Ended
            return np.frombuffer(self._bytes(3 * first * second), np.uint8).reshape(second, first, 3)

    @contextmanager
    def _within(self, seconds: float) -> Iterator[None]:
        """Whatever the process does or leaves undone, it is over by then: reading from one that was ended fails."""
        timer = threading.Timer(seconds, self._end_late)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _end_late(self) -> None:
        self.is_late = True
        self.process.kill()

    def _reply(self) -> tuple[int, int, int]:
        kind, first, second = REPLY.unpack(self._bytes(REPLY.size))
        return kind, first, second

    def _bytes(self, n: int) -> bytes:
        assert self.process.stdout is not None
        try:
            data = self.process.stdout.read(n)
        except OSError as error:
            raise Ended from error
        if len(data) < n:
            raise Ended
        return data

    def end(self) -> int:
        """At once; its exit code."""
        self.process.kill()
        code = self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        return code


class Decoders:
    """Closed at the end; images that are read then are over."""

    def __init__(
        self, command: tuple[str, ...] = (sys.executable, "-m", "puna", "decode"), limit_s: float = PATIENCE * LIMIT_S
    ) -> None:
        self._command = command
        self._limit_s = limit_s
        self._places = threading.BoundedSemaphore(MAX_PROCESSES)
        self._lock = threading.Lock()
        self._idle: list[Reader] = []
        self._all: set[Reader] = set()
        self._is_closed = False

    @property
    def n_idle(self) -> int:
        return len(self._idle)

    def pixels(self, data: bytes) -> Pixels:
        """Errors: BadRequest saying what is wrong with the image; Overloaded where no process can be started."""
        with self._places:
            reader = self._reader()
            try:
                found = reader.read(data, self._limit_s)
            except Ended:
                raise BadRequest(self._why(reader)) from None
            except BadRequest:
                self._give_back(reader)
                raise
            except BaseException:
                self._drop(reader)
                raise
            self._give_back(reader)
            return found

    def _reader(self) -> Reader:
        with self._lock:
            while self._idle:
                reader = self._idle.pop()
                if reader.process.poll() is None:
                    return reader
                self._all.discard(reader)  # somebody ended it
                reader.end()
        try:
            reader = self._kept(lambda: Reader(self._command))
        except OSError as error:
            raise Overloaded(f"no process can be started to read images: {error.strerror or error}") from error
        try:
            reader.wait_until_ready()
        except Ended:
            self._drop(reader)
            raise Overloaded("the process that is to read images does not start") from None
        return reader

    def _kept(self, start: Callable[[], Reader]) -> Reader:
        with self._lock:
            if self._is_closed:
                raise Overloaded("images are not read any more")
            reader = start()
            self._all.add(reader)
            return reader

    def _give_back(self, reader: Reader) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(reader)
                return
        reader.end()

    def _drop(self, reader: Reader) -> int:
        with self._lock:
            self._all.discard(reader)
        return reader.end()

    def _why(self, reader: Reader) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            reader.process.wait(1.0)  # how it ended by itself says more than how it is ended here
        code = self._drop(reader)
        log.warning("a process that read an image ended with %d", code)
        if reader.is_late:
            return f"it takes longer than {self._limit_s:g} s to read"
        if code == -signal.SIGPROF:
            return f"it takes more than {LIMIT_S:g} s of a processor's time to read"
        return "the process that read it has crashed"

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            busy, idle = self._all.difference(self._idle), self._idle
            self._all, self._idle = set(), []
        for reader in busy:
            reader.process.kill()  # who waits for it ends it
        for reader in idle:
            reader.end()
