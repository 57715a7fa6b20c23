"""Long work of the store that several clients may follow: it runs in a thread of its own, once per key.

Who joins late is told what happened before. When the last follower leaves, the work is cancelled at its next report.
Knows nothing of HTTP, nor of what the work is.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Hashable
from concurrent.futures import Future

from puna.errors import PunaError
from puna.store.progress import Cancelled, Progress, Report

log = logging.getLogger(__name__)

INTERVAL_S = 0.06  # between two reports of the same line
HEARTBEAT_S = 5.0  # the last line is repeated when nothing happens for so long, for clients that give up on silence

Work = Callable[[Report], object]


class _Transfer:
    """One piece of work and what it has reported: one entry per line, each in its latest state."""

    def __init__(self, work: Work) -> None:
        self.n_followers = 0
        self.done: Future[None] = Future()
        self.error: Exception | None = None
        self.is_cancelled = False
        self._lines: list[Progress] = []
        self._work = work

    def start(self) -> None:
        threading.Thread(target=self._run, name="transfer", daemon=True).start()

    def since(self, index: int) -> list[Progress]:
        return self._lines[index:]

    def _run(self) -> None:
        try:
            self._work(self._report)
        except Cancelled:
            log.info("cancelled: nobody waits for it any more")
            self.error = PunaError("cancelled")
        except OSError as error:
            log.warning("a file operation failed", exc_info=error)
            self.error = PunaError(f"the model store could not be written: {error.strerror or error}")
        except Exception as error:  # noqa: BLE001  # the edge of the thread: every follower gets it
            self.error = error
        except BaseException as error:  # a panic in a library is no Exception
            log.exception("work of the store has failed")
            self.error = PunaError(f"internal error: {type(error).__name__}: {error}")
        finally:
            self.done.set_result(None)

    def _report(self, progress: Progress) -> None:
        if self.is_cancelled:
            raise Cancelled
        last = self._lines[-1] if self._lines else None
        if last is None or (last.status, last.digest) != (progress.status, progress.digest):
            self._lines.append(progress)
        elif last != progress:
            self._lines[-1] = progress


class Transfers:
    """All work under way."""

    def __init__(self) -> None:
        self._running: dict[Hashable, _Transfer] = {}
        self._lock = threading.Lock()

    async def follow(self, key: Hashable, work: Work) -> AsyncGenerator[Progress, None]:
        """Start *work*, or join what runs under the same key, and yield its lines until it ends.

        Errors: what the work raised, after all lines.
        """
        transfer = self._join(key, work)
        try:
            async for line in _lines(transfer):
                yield line
        finally:
            self._leave(key, transfer)
        if transfer.error is not None:
            raise transfer.error

    def close(self) -> None:
        """Cancel everything."""
        with self._lock:
            for transfer in self._running.values():
                transfer.is_cancelled = True
            self._running.clear()

    def _join(self, key: Hashable, work: Work) -> _Transfer:
        with self._lock:
            transfer = self._running.get(key)
            if transfer is None or transfer.done.done():
                transfer = _Transfer(work)
                transfer.start()
                self._running[key] = transfer
            transfer.n_followers += 1
            return transfer

    def _leave(self, key: Hashable, transfer: _Transfer) -> None:
        with self._lock:
            transfer.n_followers -= 1
            if transfer.n_followers == 0:
                transfer.is_cancelled = True
                if self._running.get(key) is transfer:
                    del self._running[key]


async def _lines(transfer: _Transfer) -> AsyncGenerator[Progress, None]:
    done = asyncio.wrap_future(transfer.done)
    index, last, said_at = 0, None, time.monotonic()
    while True:
        await asyncio.wait({done}, timeout=INTERVAL_S)
        is_over = done.done()
        lines = transfer.since(index)
        is_quiet = bool(lines) and lines[-1] is last
        must_repeat = is_quiet and time.monotonic() - said_at > HEARTBEAT_S
        for line in lines:
            if line is not last or must_repeat:
                yield line
                said_at = time.monotonic()
        if lines:
            index, last = index + len(lines) - 1, lines[-1]
        if is_over:
            return
