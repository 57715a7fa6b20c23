"""Progress of long requests on standard error: bars on a terminal that can draw them, a line now and then elsewhere.

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
from puna.cli.terminal import can_draw, printable, text_width

if TYPE_CHECKING:
    from rich.progress import TaskID

_SPINNER_DELAY_S = 0.3
_LINE_STEP_PERCENT = 10
_PACE_FROM_S = 1.0
_BAR_COLUMNS = 40
_MIN_BAR_COLUMNS = 5


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
    if can_draw(sys.stderr):
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
    from rich.progress import Progress, ProgressColumn, Task
    from rich.text import Text

    class Line(ProgressColumn):
        """All of a step in one line, which leaves out what has no place on a narrow terminal."""

        def render(self, task: Task) -> Text:
            total = int(task.total or 0)
            left = task.time_remaining if task.time_remaining is not None else 0.0
            line = fitted(task.description, int(task.completed), total, task.speed or 0.0, left, console.width)
            return Text(line, no_wrap=True, overflow="crop")

    console = Console(stderr=True)
    with Progress(Line(), console=console) as progress:
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


def fitted(status: str, completed: int, total: int, rate: float, left_s: float, width: int) -> str:
    """The line of one step that is at *completed* of *total* bytes, not wider than *width* columns."""
    share = min(completed / total, 1.0) if total else 0.0
    is_done = completed >= total
    parts = [f"{int(share * 100):3d}%", f"{human_bytes(completed)}/{human_bytes(total)}"]
    parts += [f"{human_bytes(round(rate))}/s"] if rate else []
    parts += [clock(left_s)] if rate and not is_done else []
    status = shortened(status, max(width // 2, 12))
    while len(parts) > 1 and text_width(status) + sum(map(len, parts)) + len(parts) > width:
        parts.pop()
    n_bar = min(width - text_width(status) - sum(map(len, parts)) - len(parts) - 1, _BAR_COLUMNS)
    if n_bar >= _MIN_BAR_COLUMNS:
        n_full = int(share * n_bar)
        parts.insert(1, "━" * n_full + "╌" * (n_bar - n_full))
    return " ".join([status, *parts])


def shortened(text: str, width: int) -> str:
    """At most *width* columns of a text, its beginning and its end."""
    if text_width(text) <= width:
        return text
    head, tail = "", ""
    for front, back in zip(text, reversed(text), strict=True):
        if text_width(head + front + tail) >= width:
            break
        head += front
        if text_width(head + back + tail) >= width:
            break
        tail = back + tail
    return f"{head}…{tail}"


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


class Spinner:
    """A spinner on a terminal's standard error, shown only when the wait is long enough to be felt."""

    def __init__(self, text: str = "") -> None:
        self._text = text
        self._lock = threading.Lock()
        self._stopped = not can_draw(sys.stderr)
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
