"""What the files of tests cost: processor time with all processes that they start, whatever else the machine does meanwhile.

``pytest -p tests.times`` shows it, the most expensive file first. Of files that were run as a whole, as by
``make test-all ARGS="-p tests.times"``, it is kept in ``times.txt``, by which later runs order them: a file belongs to one
worker, and one that takes long must not begin last. Time of a process counts when somebody waited for it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

KEPT = Path(__file__).with_name("times.txt")
_KEY = "processor seconds"
_WORTH_KEEPING_S = 2.0


def kept_s() -> dict[str, float]:
    """Of files that take long, by their paths from the checkout."""
    lines = (line.split() for line in KEPT.read_text().splitlines())
    return {path: float(seconds) for seconds, path in lines}


def longest_first(items: list[pytest.Item]) -> None:
    seconds = kept_s()
    items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0.0))


def _spent_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class _Meter:
    """In each process that runs tests: what went by since the last report belongs to the next."""

    def __init__(self) -> None:
        self._before_s = _spent_s()

    def pytest_collection_finish(self) -> None:
        self._before_s = _spent_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now_s = _spent_s()
        report.user_properties = [*report.user_properties, (_KEY, now_s - self._before_s)]
        self._before_s = now_s
        return report


class _Table:
    """In the process that shows them."""

    def __init__(self, ran_whole_files: bool) -> None:
        self.ran_whole_files = ran_whole_files
        self.spent_s: Counter[str] = Counter()
        self.n_tests: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        path = report.nodeid.partition("::")[0]
        self.spent_s[path] += sum(value for key, value in report.user_properties if key == _KEY)  # type: ignore[misc]
        self.n_tests[path] += report.when == "call"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"processor time: {self.spent_s.total():.0f} s")
        for path, seconds in self.spent_s.most_common():
            terminalreporter.write_line(f"{seconds:8.2f} s {self.n_tests[path]:5d} tests {path}")
        if not self.ran_whole_files:
            return
        known = {path: s for path, s in {**kept_s(), **self.spent_s}.items() if s >= _WORTH_KEEPING_S and Path(path).exists()}
        longest = sorted(known.items(), key=lambda entry: (-entry[1], entry[0]))
        KEPT.write_text("".join(f"{seconds:.0f} {path}\n" for path, seconds in longest))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Meter())
    if not hasattr(config, "workerinput"):
        some = config.option.keyword or config.option.markexpr or any("::" in argument for argument in config.args)
        config.pluginmanager.register(_Table(ran_whole_files=not some))
