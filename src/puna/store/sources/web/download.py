"""One large file over several connections into the folder of blobs, hashed while it comes; stopped, it is taken up again.

Each connection fills one part after another; a thread hashes what is there from the beginning without a gap. There are more
connections only as long as that thread has nothing to do: no download can end before its hash, and what comes from far behind
the beginning does not help it. Another thread sees to it that little is left to be flushed at the end. Who asks for a
file that another thread or process is bringing waits for that one. Knows not who serves the file and how one gets access.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from puna.errors import PunaError, SourceError
from puna.store.disk import partial as partials
from puna.store.disk.blobs import Blob, Blobs, short
from puna.store.disk.partial import Part, Partial
from puna.store.disk.space import storing
from puna.store.progress import Progress, Report
from puna.store.sources.web.http import Answer, Passing
from puna.store.sources.web.retry import Pace, Tries

MIN_PART_BYTES = 100_000_000
MAX_PART_BYTES = 1_000_000_000
N_PARTS = 16
HASH_BYTES = 256 << 10
TICK_S = 0.06
HASH_TICK_S = 0.01
NOTE_S = 1.0  # between two times that the parts' files say how much is there, at most
NOTE_BYTES = 64 << 20  # that come between two such times, at most: flushed while others come, not when all have come
BEHIND_BYTES = 4 << 20  # that are there and not hashed; with more of them, another connection would not help
END_S = 5.0  # how long threads may take to notice that all is over

Open = Callable[[int, int], AbstractContextManager[Answer]]
"""Asks for the bytes from *begin* to *end*; the answer is 206, or 200 with all of the file.

Errors: Passing; SourceError.
"""


@dataclass(frozen=True)
class Remote:
    """A file to fetch: what it must be, and how to ask for parts of it."""

    digest: str
    n_bytes: int
    open: Open
    status: str = ""  # of its progress, if not the usual

    @property
    def progress(self) -> Progress:
        return Progress(self.status or f"pulling {short(self.digest)}", self.digest, self.n_bytes)


class _NoRangesError(Exception):
    """The server sends the whole file whatever part is asked for."""


class _GivenUpError(Exception):
    """Nobody wants the file any more, or another connection has failed for good."""


def fetch(blobs: Blobs, remote: Remote, report: Report, n_streams: int, *, is_known: bool = True) -> Blob:
    """Bring a blob, or see that it is there.

    Where the digest of the file is not known, that of *remote* is only what it is called until it is here.

    Errors: SourceError with what failed last, or when the file is not what it should be; DiskFull; StoreError; what *report*
    raises. What has come stays for the next try, but for a file with another digest.
    """
    while True:
        if blobs.has(remote.digest):
            blobs.claim(remote.digest)
            if blobs.has(remote.digest):
                with storing(blobs.folder):
                    partials.tidy(blobs, remote.digest)  # whoever finished it may have died then
                report(_at(remote, remote.n_bytes))
                return Blob(remote.digest, remote.n_bytes, is_new=False)
        partial = partials.begin(blobs, remote.digest, remote.n_bytes, _part_bytes(remote.n_bytes))
        if partial is not None and blobs.has(remote.digest):  # it was finished between the two looks
            partial.discard()
            continue
        if partial is not None:
            return _bring(partial, remote, report, n_streams, is_known=is_known)
        report(_at(remote, partials.n_fetched(blobs, remote.digest)))
        time.sleep(TICK_S)


def _part_bytes(n_bytes: int) -> int:
    return max(1, min(max(n_bytes // N_PARTS, MIN_PART_BYTES), MAX_PART_BYTES))


def _at(remote: Remote, n_done: int) -> Progress:
    known = remote.progress
    return Progress(known.status, known.digest, known.total, n_done)


@dataclass(eq=False)
class _Stream:
    """One connection at work on one part."""

    part: Part
    answer: Answer
    pace: Pace
    is_stalled: bool = False


@dataclass
class _Shared:
    """What the threads of one download tell each other; changed under the condition's lock."""

    todo: deque[Part]
    changed: threading.Condition = field(default_factory=threading.Condition)
    over: threading.Event = field(default_factory=threading.Event)
    streams: set[_Stream] = field(default_factory=set)
    error: BaseException | None = None
    n_hashed: int = 0

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self.error = self.error or error
            self.over.set()
            self.changed.notify_all()


def _bring(partial: Partial, remote: Remote, report: Report, n_streams: int, *, is_known: bool) -> Blob:
    try:
        try:
            found = _Fetch(partial, remote, report).run(n_streams)
        except _NoRangesError:
            partial.restart(partials.divided(remote.n_bytes, max(1, remote.n_bytes)))
            found = _Fetch(partial, remote, report).run(1)
        if is_known and found != remote.digest:
            partial.discard()
            raise SourceError(f"digest mismatch, file must be downloaded again: want {remote.digest}, got {found}")
        return partial.commit(found)
    finally:
        partial.leave()


class _Fetch:
    """One go at all parts that are missing, which this thread watches over."""

    def __init__(self, partial: Partial, remote: Remote, report: Report) -> None:
        self._partial = partial
        self._remote = remote
        self._report = report
        self._sha256 = hashlib.sha256()
        self._shared = _Shared(deque(part for part in partial.parts if not part.is_done))
        self._threads: list[threading.Thread] = []

    def run(self, n_streams: int) -> str:
        """Returns the digest of what is there."""
        n_streams = min(n_streams, len(self._shared.todo))
        self._partial.note()
        try:
            self._start("hash", self._hash)
            self._start("flush", self._note)
            self._watch(n_streams)
        finally:
            self._end()
        return f"sha256:{self._sha256.hexdigest()}"

    def _start(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._guarded, args=(work,), name=f"download: {name}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _watch(self, n_streams: int) -> None:
        """Report, connect, and look for connections that hardly move, until all is here and hashed."""
        shared, partial, n_started = self._shared, self._partial, 0
        while True:
            if n_started < n_streams and partial.n_in_front - shared.n_hashed <= BEHIND_BYTES:
                self._start("receive", self._work)
                n_started += 1
            with shared.changed:
                shared.changed.wait_for(lambda: shared.error or shared.n_hashed == partial.n_bytes, TICK_S)
                error, is_over = shared.error, shared.n_hashed == partial.n_bytes
            if error is not None:
                raise error
            self._report(_at(self._remote, partial.n_done))
            if is_over:
                return
            self._end_stalled()

    def _note(self) -> None:
        shared, partial = self._shared, self._partial
        noted_at, n_noted = time.monotonic(), partial.n_done
        while not shared.over.wait(TICK_S):
            if partial.n_done - n_noted >= NOTE_BYTES or time.monotonic() - noted_at > NOTE_S:
                n_noted = partial.n_done
                partial.note()
                noted_at = time.monotonic()

    def _end_stalled(self) -> None:
        now = time.monotonic()
        with self._shared.changed:
            streams = list(self._shared.streams)
        for stream in streams:
            stream.pace.note(now, stream.part.n_done)
        for stream in streams:
            others = [other.pace.bytes_per_s for other in streams if other is not stream and other.pace.is_judged]
            if not stream.is_stalled and stream.pace.is_stalled(others):
                stream.is_stalled = True
                stream.answer.abort()

    def _end(self) -> None:
        shared = self._shared
        shared.over.set()
        with shared.changed:
            shared.changed.notify_all()
            for stream in shared.streams:
                stream.answer.abort()
        deadline = time.monotonic() + END_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except _GivenUpError:
            pass
        except (PunaError, _NoRangesError, OSError) as error:
            self._shared.fail(error)
        except BaseException as error:  # noqa: BLE001 - the edge of the thread: whoever waits gets it
            self._shared.fail(error)

    def _hash(self) -> None:
        shared, partial = self._shared, self._partial
        block = memoryview(bytearray(HASH_BYTES))  # small enough to stay in the processor's cache between the copy and the hash
        while shared.n_hashed < partial.n_bytes:
            with shared.changed:
                shared.changed.wait_for(lambda: shared.over.is_set() or partial.n_in_front > shared.n_hashed, HASH_TICK_S)
            while not shared.over.is_set() and (n_ready := partial.n_in_front - shared.n_hashed):
                n = partial.read_into(block[: min(HASH_BYTES, n_ready)], shared.n_hashed)
                self._sha256.update(block[:n])
                shared.n_hashed += n
            if shared.over.is_set():
                return
        with shared.changed:
            shared.changed.notify_all()

    def _work(self) -> None:
        shared = self._shared
        while True:
            with shared.changed:
                if not shared.todo:
                    return
                part = shared.todo.popleft()
            self._fill(part)

    def _fill(self, part: Part) -> None:
        tries = Tries()
        while not part.is_done:
            n_before = part.n_done
            try:
                self._receive(part)
            except Passing as error:
                if part.n_done > n_before:
                    tries.progressed()
                tries.again(error, self._sleep, error.after_s)

    def _receive(self, part: Part) -> None:
        """Ask for what is missing of a part, and take it."""
        self._check_wanted()
        begin = part.begin + part.n_done
        with self._remote.open(begin, part.end) as answer:
            self._check_range(answer, begin)
            stream = _Stream(part, answer, Pace(time.monotonic(), part.n_done))
            with self._shared.changed:
                self._check_wanted()
                self._shared.streams.add(stream)
            try:
                self._take(stream)
            except Passing as error:
                if stream.is_stalled:
                    raise Passing(f"{error} (given up: it hardly moved)") from error
                raise
            finally:
                with self._shared.changed:
                    self._shared.streams.discard(stream)

    def _take(self, stream: _Stream) -> None:
        part = stream.part
        for chunk in stream.answer.blocks():
            self._check_wanted()
            self._partial.write(part, chunk[: part.n_bytes - part.n_done])
            if part.is_done:
                break
        with self._shared.changed:
            self._shared.changed.notify_all()
        if not part.is_done:
            raise Passing(f"{part.n_bytes - part.n_done} bytes are missing at the end of what came")

    def _check_range(self, answer: Answer, begin: int) -> None:
        """Errors: _NoRangesError; SourceError when it is another file; Passing when it is another part."""
        n_bytes = self._partial.n_bytes
        if answer.status == 200:
            if begin:
                raise _NoRangesError
            length = answer.headers.get("content-length", "")
            stated = int(length) if length.isascii() and length.isdigit() else n_bytes
        else:
            unit, _, span = answer.headers.get("content-range", "").partition(" ")
            first, _, total = span.partition("/")
            if unit.lower() != "bytes" or first.partition("-")[0] != str(begin):
                raise Passing(f"bytes from {begin} were asked for, but these came: {span[:50] or 'nobody knows which'}")
            stated = int(total) if total.isascii() and total.isdigit() else n_bytes
        if stated != n_bytes:
            raise SourceError(f"{self._remote.digest} should have {n_bytes} bytes, but has {stated} where it is served")

    def _check_wanted(self) -> None:
        if self._shared.over.is_set():
            raise _GivenUpError

    def _sleep(self, seconds: float) -> None:
        if self._shared.over.wait(seconds):
            raise _GivenUpError
