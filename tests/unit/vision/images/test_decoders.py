"""The processes that read images: what crashes, hangs or eats memory there is one image's error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from puna.errors import BadRequest, Overloaded
from puna.vision.images.decoders import Decoders, Reader
from puna.vision.model import Pixels
from tests.hostile_images import HOSTILE, encoded, noise
from tests.patience import wait_until

ROOT = Path(__file__).parents[4]


@pytest.fixture
def decoders() -> Iterator[Decoders]:
    made = Decoders()
    yield made
    made.close()


def children() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # or it has ended, whosever it is, and nobody has asked how
            found += [child] if "decode" in child.cmdline() else []
    return found


def test_pixels_come_back_as_they_are(decoders: Decoders) -> None:
    assert (decoders.pixels(encoded("PNG", noise(123, 45))) == np.asarray(noise(123, 45))).all()


def test_every_hostile_image_is_refused_and_the_next_is_read(decoders: Decoders) -> None:
    assert len(HOSTILE) >= 30
    decoders.pixels(encoded("PNG"))
    (child,) = children()
    for name, (make, word) in HOSTILE.items():
        with pytest.raises(BadRequest) as refused:
            decoders.pixels(make())
        assert word in str(refused.value), name
        assert decoders.pixels(encoded("PNG")).shape == (30, 40, 3), name
    assert len(children()) == 1
    del child


def test_the_memory_that_an_image_took_is_given_back(decoders: Decoders) -> None:
    decoders.pixels(encoded("PNG"))
    (child,) = children()
    before, ours = child.memory_info().rss, psutil.Process().memory_info().rss
    for _ in range(3):
        decoders.pixels(encoded("BMP", noise(3000, 3000)))
    wait_until(lambda: child.memory_info().rss - before < 20 << 20)
    assert psutil.Process().memory_info().rss - ours < 60 << 20


@pytest.mark.parametrize(("number", "why"), [(signal.SIGKILL, "crashed"), (signal.SIGPROF, "processor's time")])
def test_a_process_that_ends_in_the_middle_of_an_image_is_that_images_error(
    decoders: Decoders, number: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoders.pixels(encoded("PNG"))
    (child,) = children()
    child.suspend()
    problems: list[str] = []
    is_reading = threading.Event()
    read = Reader.read

    def told(reader: Reader, data: bytes, limit_s: float) -> Pixels:
        is_reading.set()
        return read(reader, data, limit_s)

    monkeypatch.setattr(Reader, "read", told)

    def ask() -> None:
        with pytest.raises(BadRequest) as refused:
            decoders.pixels(encoded("PNG", noise(500, 500)))
        problems.append(str(refused.value))

    thread = threading.Thread(target=ask)
    thread.start()
    is_reading.wait()
    os.kill(child.pid, number)
    os.kill(child.pid, signal.SIGCONT)
    thread.join()
    assert why in problems[0]
    assert decoders.pixels(encoded("PNG")).shape == (30, 40, 3)


def test_an_image_that_takes_too_long_is_given_up() -> None:
    decoders = Decoders()
    try:
        decoders.pixels(encoded("PNG"))
        (child,) = children()
        child.suspend()
        decoders._limit_s = 0.5
        with pytest.raises(BadRequest, match=r"longer than 0\.5 s"):
            decoders.pixels(encoded("PNG"))
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    finally:
        decoders.close()


def test_without_a_process_nothing_is_read() -> None:
    for command in (("/nowhere/python",), (sys.executable, "-c", "")):
        decoders = Decoders(command)
        with pytest.raises(Overloaded):
            decoders.pixels(encoded("PNG"))
        decoders.close()


def test_closing_leaves_no_process(decoders: Decoders) -> None:
    decoders.pixels(encoded("PNG"))
    decoders.close()
    assert not children()
    with pytest.raises(Overloaded):
        decoders.pixels(encoded("PNG"))


def test_the_processes_end_with_the_one_that_asked_however_that_ends() -> None:
    program = (
        "from puna.vision.images.decoders import Decoders\n"
        "from tests.hostile_images import encoded\n"
        "import sys, time\n"
        "decoders = Decoders(); decoders.pixels(encoded('PNG')); print('ready', flush=True); time.sleep(600)\n"
    )
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environ) as asking:
        assert asking.stdout is not None
        assert asking.stdout.readline() == b"ready\n"
        (child,) = psutil.Process(asking.pid).children()
        asking.kill()
        asking.wait()
        wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_images_are_read_side_by_side(decoders: Decoders) -> None:
    """One that takes all its time keeps no other waiting."""
    decoders.pixels(encoded("PNG"))
    (child,) = children()
    child.suspend()

    def ask() -> None:
        with pytest.raises(BadRequest):
            decoders.pixels(encoded("PNG"))

    thread = threading.Thread(target=ask)
    thread.start()
    while decoders.n_idle:
        time.sleep(0.01)
    assert decoders.pixels(encoded("PNG")).shape == (30, 40, 3)
    child.kill()
    thread.join()
