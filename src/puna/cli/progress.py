"""Progress of long requests on standard error: bars on a terminal, a line now and then elsewhere.

Takes the events that pull and create stream (status, digest, total, completed). What goes to standard output is not its business.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

from puna.cli.format import human_bytes, human_duration
from puna.cli.terminal import is_terminal, printable

if TYPE_CHECKING:
    from rich.progress import TaskID

_SPINNER_DELAY_S = 0.3
_LINE_STEP_PERCENT = 10
_PACE_FROM_S = 1.0


class Display(Protocol):
    """Shows one step after another; steps with the same text are the same step."""

    def update(self, status: str, completed: int, total: int) -> None: ...


def follow(events: Iterable[Mapping[str, Any]]) -> None:
    """Show events until they end; an error among them has been raised by their source."""
    with display() as shown:
        for event in events:
            total = int(event.get("total") or 0)
            if total or not event.get("digest"):  # a layer of unknown length shows up once its length is known
                shown.update(str(event.get("status", "")), int(event.get("completed") or 0), total)


@contextmanager
def display() -> Iterator[Display]:
    if is_terminal(sys.stderr):
        with _bars() as bars:
            yield bars
    else:
        yield _Lines()


class _Lines:
    def __init__(self) -> None:
        self._status = ""
        self._percent = 0
        self._began = (0.0, 0)  # when a step was first seen, and how much of it was done then

    def update(self, status: str, completed: int, total: int) -> None:
        if status != self._status:
            self._status, self._percent = status, -1
            self._began = (time.monotonic(), completed)
        if not total:
            if self._percent < 0:
                self._percent = 0
                self._say(status)
            return
        percent = min(completed * 100 // total, 100)
        if self._percent < 0 or percent // _LINE_STEP_PERCENT > self._percent // _LINE_STEP_PERCENT:
            self._percent = percent
            self._say(f"{status}: {percent}% ({human_bytes(completed)} of {human_bytes(total)}{self._pace(completed, total)})")

    def _pace(self, completed: int, total: int) -> str:
        """Rate and time left, once they can be told."""
        began, before = self._began
        elapsed = time.monotonic() - began
        if elapsed < _PACE_FROM_S or completed <= before:
            return ""
        rate = (completed - before) / elapsed
        left = f", {human_duration(round((total - completed) / rate))} left" if completed < total else ""
        return f", {human_bytes(round(rate))}/s{left}"

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


@contextmanager
def _bars() -> Iterator[Display]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    with Progress(
        TextColumn("{task.description}", markup=False),
        TextColumn("{task.percentage:>3.0f}%"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
    ) as progress:
        tasks: dict[str, TaskID] = {}
        spoken = ""

        class Bars:
            def update(self, status: str, completed: int, total: int) -> None:
                nonlocal spoken
                if total:
                    if status not in tasks:
                        tasks[status] = progress.add_task(printable(status), total=total)
                    progress.update(tasks[status], completed=completed, total=total)
                elif status != spoken and status not in tasks:
                    spoken = status
                    progress.console.print(printable(status), markup=False, highlight=False)

        yield Bars()


class Spinner:
    """A spinner on a terminal's standard error, shown only when the wait is long enough to be felt."""

    def __init__(self, text: str = "") -> None:
        self._text = text
        self._lock = threading.Lock()
        self._stopped = not is_terminal(sys.stderr)
        self._status: Any = None
        self._timer = threading.Timer(_SPINNER_DELAY_S, self._show)
        self._timer.daemon = True

    def __enter__(self) -> Spinner:
        if not self._stopped:
            self._timer.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the spinner off the screen; harmless when it never was there."""
        self._timer.cancel()
        with self._lock:
            self._stopped = True
            if self._status is not None:
                with suppress(OSError):
                    self._status.stop()
                self._status = None

    def _show(self) -> None:
        from rich.console import Console

        console = Console(stderr=True)
        with self._lock:
            if not self._stopped:
                self._status = console.status(self._text)
                self._status.start()
