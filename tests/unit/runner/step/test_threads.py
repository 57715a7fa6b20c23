"""How many threads compute beside other processes: the policy by itself, then a real process beside a busy one."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.patience import PATIENCE_S, wait_until
from tests.tiny import write_llama

from puna.host import usable_cores
from puna.native.usage import Usage, usage
from puna.native.waits import waits
from puna.runner.engine import Engine
from puna.runner.loading.load import n_threads
from puna.runner.step.threads import TRY_AFTER_S, WINDOW_S, Threads, demanded_by_others
from puna.wire import CompletionReply, CompletionRequest, LoadOptions, LoadRequest, Piece

Step = Callable[[Threads], float]


class Machine:
    """Cores that are shared evenly by whoever computes, as the system does it, apart from those that yield to all."""

    def __init__(self, n_cores: int, *, tells_waits: bool = True) -> None:
        self.n_cores = n_cores
        self.now = self.busy = self.own = self.waited = 0.0
        self._tells_waits = tells_waits

    def usage(self) -> Usage:
        return Usage(self.now, self.busy, self.own, self.waited if self._tells_waits else None)

    def run(self, seconds: float, n_threads: int, others: float, yielding: float = 0) -> None:
        share = min(1.0, self.n_cores / max(n_threads + others, 1))
        idle = self.n_cores - (n_threads + others) * share
        self.now += seconds
        self.own += seconds * n_threads * share
        self.busy += seconds * ((n_threads + others) * share + min(yielding, idle))
        self.waited += seconds * n_threads * (1 - share)

    def settle(
        self, threads: Threads, others: float, seconds: float = 1.0, yielding: float = 0, step: Step = lambda _threads: 0.01
    ) -> int:
        """The count after some time beside so many busy processes; *step* is how long one takes."""
        end = self.now + seconds
        while self.now < end:
            self.run(WINDOW_S, threads.count, others, yielding)
            for _ in range(5):
                threads.note(1, step(threads))
            threads.has_changed()
        return threads.count


def adaptive(machine: Machine, most: int) -> Threads:
    return Threads(most, machine.n_cores, machine.usage, lambda: machine.now)


@pytest.mark.parametrize("tells_waits", [True, False])
@pytest.mark.parametrize("n_cores", [2, 4, 8, 64])
@pytest.mark.parametrize("others", [0, 1, 2, 3, 5, 40])
def test_every_thread_has_a_core_of_its_own_and_all_come_back(n_cores: int, others: int, tells_waits: bool) -> None:
    machine = Machine(n_cores, tells_waits=tells_waits)
    threads = adaptive(machine, n_cores)
    assert machine.settle(threads, others) == max(1, n_cores - others)
    assert machine.settle(threads, 0) == n_cores


def test_one_window_is_enough_to_be_patient_and_to_return() -> None:
    machine = Machine(2)
    threads = adaptive(machine, 2)
    machine.run(WINDOW_S, 2, others=1)
    assert threads.has_changed()
    assert (threads.count, threads.is_patient) == (2, True)
    machine.run(WINDOW_S, 2, others=0)
    assert threads.has_changed()
    assert (threads.count, threads.is_patient) == (2, False)


def test_one_step_that_is_held_up_is_enough() -> None:
    """Long before a window is over: whoever types a question beside a busy process sees the first words at once."""
    machine = Machine(2)
    threads = adaptive(machine, 2)
    machine.run(0.036, 2, others=1)
    threads.note(1, 0.036)
    assert threads.has_changed()
    assert threads.is_patient


def test_long_steps_that_nobody_holds_up_are_left_alone() -> None:
    machine, n_reads = Machine(2), 0

    def read() -> Usage:
        nonlocal n_reads
        n_reads += 1
        return machine.usage()

    threads = Threads(2, 2, read, lambda: machine.now)
    n_reads = 0
    for _ in range(24):
        machine.run(0.01, 2, others=0)
        threads.note(1, 0.01)
        assert not threads.has_changed()
    assert n_reads <= 5  # after 10 ms, and whenever twice as much was computed


def test_what_no_system_tells_is_not_looked_for_in_steps() -> None:
    machine = Machine(2, tells_waits=False)
    threads = adaptive(machine, 2)
    machine.run(0.036, 2, others=1)
    threads.note(1, 0.036)
    assert not threads.has_changed()


def looking(threads: Threads) -> float:
    """Seconds of a step on two cores beside a busy process: patient threads are the best."""
    return 0.01 if threads.count == 1 else 0.004 if threads.is_patient else 0.05


def crowding(threads: Threads) -> float:
    """Where sleepers are not woken soon."""
    return 0.011 if threads.count == 1 else 0.05


def crowded(threads: Threads) -> float:
    """Where each thread gets a small share, and two that never sleep get two."""
    return 0.09 if threads.count == 1 else 0.2 if threads.is_patient else 0.05


@pytest.mark.parametrize(("step", "better"), [(looking, (2, True)), (crowding, (1, True)), (crowded, (2, False))])
def test_the_fastest_way_has_nearly_all_the_time(step: Step, better: tuple[int, bool]) -> None:
    machine = Machine(2)
    threads = adaptive(machine, 2)
    machine.settle(threads, others=1, seconds=4 * TRY_AFTER_S, step=step)
    ways = []
    for _ in range(1200):
        machine.settle(threads, others=1, seconds=WINDOW_S, step=step)
        ways.append((threads.count, threads.is_patient))
    assert 1 < len(ways) - ways.count(better) <= 0.02 * len(ways)
    assert machine.settle(threads, others=0) == 2
    assert not threads.is_patient


def test_what_is_faster_may_change() -> None:
    machine = Machine(2)
    threads = adaptive(machine, 2)
    machine.settle(threads, others=1, seconds=60, step=crowded)
    machine.settle(threads, others=1, seconds=80, step=crowding)
    counts = [machine.settle(threads, others=1, seconds=WINDOW_S, step=crowding) for _ in range(100)]
    assert counts.count(1) >= 98


def test_steps_of_different_sizes_are_not_compared() -> None:
    """A long prompt in one window and single tokens in the next say nothing; patience is the best guess."""
    machine = Machine(2)
    threads = adaptive(machine, 2)
    ways = []
    for _ in range(400):
        machine.run(WINDOW_S, threads.count, others=1)
        threads.note(512 if threads.is_patient and threads.count == 2 else 1, 1.0 if threads.count == 2 else 0.01)
        threads.has_changed()
        ways.append((threads.count, threads.is_patient))
    assert ways[20:].count((2, True)) > 0.95 * len(ways[20:])


def test_one_that_yields_is_found_out() -> None:
    """It took the second core while nothing was computed here; once all threads run it has none."""
    machine = Machine(2)
    threads = adaptive(machine, 2)
    machine.run(5.0, 0, others=0, yielding=1)
    assert threads.has_changed()
    assert threads.is_patient
    assert machine.settle(threads, others=0, yielding=1, seconds=TRY_AFTER_S + 1) == 2
    assert {machine.settle(threads, others=0, yielding=1, seconds=WINDOW_S) for _ in range(100)} == {2}
    assert not threads.is_patient


def test_a_nice_process_that_does_not_yield_counts_in_full() -> None:
    """Where sessions have equal shares, those of another one wait for nobody: the threads' own waits tell."""
    machine = Machine(2)
    threads = adaptive(machine, 2)
    for _ in range(2):
        machine.now, machine.own = machine.now + WINDOW_S, machine.own + 0.2 * WINDOW_S
        machine.busy, machine.waited = machine.busy + 2 * WINDOW_S, machine.waited + 1.7 * WINDOW_S
        threads.has_changed()
    assert threads.is_patient


def test_who_leaves_makes_room_also_when_others_stay() -> None:
    machine = Machine(8)
    threads = adaptive(machine, 8)
    assert machine.settle(threads, others=5) == 3
    assert machine.settle(threads, others=2) == 6


def test_between_windows_nothing_is_asked() -> None:
    machine = Machine(2)
    n_reads = 0

    def read() -> Usage:
        nonlocal n_reads
        n_reads += 1
        return machine.usage()

    threads = Threads(2, 2, read, lambda: machine.now)
    for _ in range(1000):
        machine.run(WINDOW_S / 1000, 2, others=1)
        threads.has_changed()
    assert n_reads <= 2  # the first is the beginning


def test_cores_that_nobody_computes_on_are_nobodys_loss() -> None:
    """One thread per physical core leaves logical ones to others."""
    machine = Machine(16)
    threads = adaptive(machine, 8)
    assert machine.settle(threads, 8) == 8
    assert machine.settle(threads, 10) == 6


@pytest.mark.parametrize("tells_waits", [True, False])
@pytest.mark.parametrize("others", [0.1, 0.3])
def test_small_work_beside_costs_less_than_a_thread_would(others: float, tells_waits: bool) -> None:
    """Such as the server's own, which passes on what the runner writes."""
    machine = Machine(2, tells_waits=tells_waits)
    threads = adaptive(machine, 2)
    assert {machine.settle(threads, others, seconds=WINDOW_S) for _ in range(100)} == {2}


def test_the_time_before_a_request_counts_as_well() -> None:
    """An idle runner beside a busy process is patient from its first step on."""
    machine = Machine(2)
    threads = adaptive(machine, 2)
    machine.run(10.0, 0, others=1)
    assert threads.has_changed()
    assert threads.is_patient


@pytest.mark.parametrize(
    ("used", "wanted"),
    [
        (Usage(wall=0, busy=0, own=0), 0),  # read twice at once
        (Usage(wall=1, busy=0.9, own=1.0), 0),  # the two accounts are not read at the same moment
        (Usage(wall=1, busy=2.1, own=0), 2),
        (Usage(wall=1, busy=2.0, own=0.001), 2),
        (Usage(wall=1, busy=2.0, own=2.0, waited=0.0), 0),
        (Usage(wall=1, busy=2.0, own=0.3, waited=2.1), 2),  # more threads than those that compute have waited
    ],
)
def test_accounts_that_do_not_quite_agree(used: Usage, wanted: float) -> None:
    assert demanded_by_others(used, 2, 2) == pytest.approx(wanted, abs=0.01)


@pytest.fixture
def busy() -> Iterator[Callable[[], psutil.Process]]:
    """Starts processes that compute without end."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> psutil.Process:
        code = "import time\nend = time.time() + 120\nwhile time.time() < end: pass"
        started.append(subprocess.Popen([sys.executable, "-S", "-c", code]))
        return psutil.Process(started[-1].pid)

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_busy_process_shows_in_the_accounts(busy: Callable[[], psutil.Process]) -> None:
    child = busy()
    time.sleep(0.3)
    before, child_before = usage(), sum(child.cpu_times()[:2])
    wait_until(lambda: sum(child.cpu_times()[:2]) - child_before > 0.3)
    taken = sum(child.cpu_times()[:2]) - child_before
    used = usage().since(before)
    assert used.busy - used.own > taken - 0.05


@pytest.mark.skipif(usage().waited is None, reason="this system does not tell how long threads wait")
def test_threads_that_wait_for_a_core_are_seen(busy: Callable[[], psutil.Process]) -> None:
    for _ in range(2 * usable_cores()):
        busy()
    time.sleep(0.3)
    must_end = threading.Event()
    worker = threading.Thread(target=lambda: [None for _ in iter(must_end.is_set, True)])
    worker.start()
    before = usage()
    time.sleep(1.0)
    used = usage().since(before)
    n_threads = psutil.Process().num_threads()  # each of them may have waited
    must_end.set()
    worker.join()
    assert used.waited is not None
    assert 0.1 < used.waited < n_threads * used.wall + 0.1


def test_own_work_is_nobody_elses() -> None:
    before = usage()
    end = time.process_time() + 0.5
    while time.process_time() < end:
        pass
    used = usage().since(before)
    assert used.own > 0.4
    assert used.own <= usable_cores() * used.wall + 0.1
    assert used.busy > used.own / 2  # the two are read one after the other, and much may happen between


@pytest.mark.parametrize("asked", [0, 2])
def test_the_engine_gives_way_unless_it_was_told_a_number(asked: int, busy: Callable[[], psutil.Process], tmp_path: Path) -> None:
    """Beside as many busy processes as there are cores its threads are patient, or one."""
    engine = Engine(write_llama(tmp_path / "tiny.gguf", n_layers=1))
    try:
        assert engine.load(LoadRequest(options=LoadOptions(n_ctx=256, n_threads=asked))).success
        loaded = engine.loop.model
        given: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loaded.backend, "set_threads", given.append)
            for _ in range(usable_cores()):
                busy()
            replies: queue.SimpleQueue[CompletionReply] = queue.SimpleQueue()
            handle = engine.submit(CompletionRequest(prompt="a", n_predict=100_000, ignore_eos=True), replies.put)
            time.sleep(1.5)
            if not asked and n_threads(LoadOptions()) > 1:
                wait_until(lambda: given)
            handle.cancel()
            while isinstance(replies.get(timeout=PATIENCE_S), Piece):
                pass
        if asked:
            assert (loaded.threads, given) == (None, [])
        else:
            assert loaded.threads is not None
            assert given if n_threads(LoadOptions()) > 1 else not given
    finally:
        waits.shorten(False)
        engine.close()


@pytest.mark.parametrize("asked", [usable_cores() + 1, 4096])
def test_there_are_never_more_threads_than_cores(asked: int) -> None:
    assert n_threads(LoadOptions(n_threads=asked)) == usable_cores()
    assert n_threads(LoadOptions(n_threads=1)) == 1
