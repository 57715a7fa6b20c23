"""Bars for people who wait: on a terminal or in a notebook, on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from puna.store.progress import Progress, Report, silent


@contextmanager
def counting(total: int, *, shows: bool) -> Iterator[Callable[[], None]]:
    """A bar that moves by one at each call."""
    if not shows or not total:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task("answers", total=total)
        yield lambda: bars.advance(task)


@contextmanager
def pull_progress(*, shows: bool) -> Iterator[Report]:
    """For a pull: a bar for each layer."""
    if not shows:
        yield silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, console=Console(stderr=True)) as bars:
        tasks = {}

        def report(progress: Progress) -> None:
            if progress.total:
                if progress.status not in tasks:
                    tasks[progress.status] = bars.add_task(progress.status, total=progress.total)
                bars.update(tasks[progress.status], completed=progress.completed)

        yield report
