from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from puna import wire
from puna.errors import LoadError, Overloaded, RunnerDied
from puna.llm import discovery
from puna.llm import launch as launch_module
from puna.llm.discovery import Machine
from puna.llm.launch import FIRST_PAUSE_S, FORGET_S, LONGEST_PAUSE_S, Backoff, Launcher, for_one_model
from puna.llm.oom import oom_kills
from puna.llm.runner import Runner
from puna.llm.spare import Spare
from tests.patience import PATIENCE_S
from tests.unit.llm.scripted import events, fake_command, write_script

A, B = Path("a"), Path("b")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_first_reload_is_immediate_and_then_the_pause_doubles_up_to_a_bound() -> None:
    backoff = Backoff(Clock())
    assert backoff.pause_s(A) == 0
    pauses = []
    for _ in range(9):
        backoff.ended(A, has_crashed=True, has_served=False)
        pauses.append(backoff.pause_s(A))
    assert pauses[:3] == [0, FIRST_PAUSE_S, 2 * FIRST_PAUSE_S]
    assert pauses[-1] == pauses[-2] == LONGEST_PAUSE_S
    assert backoff.pause_s(B) == 0, "another model has nothing to do with it"


def test_an_answer_in_between_and_time_heal() -> None:
    clock = Clock()
    backoff = Backoff(clock)
    for _ in range(4):
        backoff.ended(A, has_crashed=True, has_served=False)
    backoff.ended(A, has_crashed=True, has_served=True)
    assert backoff.pause_s(A) == 0
    backoff.ended(A, has_crashed=True, has_served=False)
    assert backoff.pause_s(A) == FIRST_PAUSE_S
    clock.now += FIRST_PAUSE_S / 2
    assert backoff.pause_s(A) == FIRST_PAUSE_S / 2
    backoff.ended(A, has_crashed=False, has_served=False)  # a load that was cancelled proves nothing
    assert backoff.pause_s(A) == FIRST_PAUSE_S / 2
    clock.now += FORGET_S
    assert (backoff.pause_s(A), backoff.crashes_in_a_row(A)) == (0, 0)
    assert not backoff._crashes
    for _ in range(4):
        backoff.ended(A, has_crashed=True, has_served=False)
    backoff.ended(A, has_crashed=False, has_served=True)
    assert backoff.crashes_in_a_row(A) == 0


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "FIRST_PAUSE_S", 0.4)


async def start(path: Path) -> Runner:
    return await Runner.start(fake_command(path), timeout_s=PATIENCE_S)


class Still(Backoff):
    """Time stands still between crashes, however slow the machine is; notes the pauses it was asked for."""

    def __init__(self) -> None:
        super().__init__(clock=lambda: 0.0)
        self.pauses: list[float] = []

    def pause_s(self, model_path: Path) -> float:
        self.pauses.append(super().pause_s(model_path))
        return self.pauses[-1]


def still(launcher: Launcher) -> list[float]:
    launcher._backoff = backoff = Still()
    return backoff.pauses


async def load_and_ask(launcher: Launcher, path: Path) -> tuple[float, str]:
    """Seconds until the process was there, and how the request ended."""
    begin = time.monotonic()
    runner = await launcher.launch(path)
    started_s = time.monotonic() - begin
    try:
        await runner.load(wire.LoadRequest(), PATIENCE_S)
        return started_s, type([reply async for reply in runner.complete(wire.CompletionRequest())][-1]).__name__
    except RunnerDied:
        return started_s, "RunnerDied"
    finally:
        await runner.close()


@pytest.mark.parametrize("script", [{"exit_at_load": 1}, {"die_at_piece": 0}], ids=["in the load", "in the first step"])
@pytest.mark.usefixtures("short_pauses")
def test_a_model_that_always_crashes_is_started_ever_more_rarely(script: dict[str, Any], tmp_path: Path) -> None:
    path = write_script(tmp_path, **script)
    sound = write_script(tmp_path, "sound")

    async def scenario() -> None:
        launcher = Launcher(start=start)
        pauses = still(launcher)
        waits = [await load_and_ask(launcher, path) for _ in range(4)]
        assert {end for _, end in waits} == {"RunnerDied"}
        assert pauses == [0.0, 0.0, 0.4, 0.8]
        assert all(wait >= pause for (wait, _), pause in zip(waits, pauses, strict=True))
        await load_and_ask(launcher, sound)
        assert pauses[4:] == [0.0]
        await launcher.close()

    uvloop.run(scenario())


def test_who_would_wait_long_is_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The place of a model that keeps crashing is free for others meanwhile."""
    monkeypatch.setattr(launch_module, "FIRST_PAUSE_S", 30.0)
    monkeypatch.setattr(launch_module, "LONGEST_PAUSE_S", 30.0)
    path = write_script(tmp_path, exit_at_load=3, stderr="GGML_ASSERT(sky > 0) failed")

    async def scenario() -> None:
        launcher = Launcher(start=start)
        for _ in range(2):
            assert (await load_and_ask(launcher, path))[1] == "RunnerDied"
        expected = (
            r"model has crashed 2 times in a row, the last time with exit status 3: GGML_ASSERT\(sky > 0\) failed; .* in (29|30)"
        )
        with pytest.raises(Overloaded, match=expected):
            await launcher.launch(path)
        await launcher.close()

    uvloop.run(scenario())


@pytest.mark.usefixtures("short_pauses")
def test_one_that_was_closed_or_had_answered_is_started_at_once(tmp_path: Path) -> None:
    path = write_script(tmp_path)

    async def scenario() -> None:
        launcher = Launcher(start=start)
        pauses = still(launcher)
        for _ in range(3):
            assert (await load_and_ask(launcher, path))[1] == "Done"
        for _ in range(3):
            runner = await launcher.launch(path)
            await runner.load(wire.LoadRequest(), PATIENCE_S)
            assert [reply async for reply in runner.complete(wire.CompletionRequest())]
            os.kill(runner.pid, signal.SIGKILL)
            await runner.wait()
            await runner.close()
            assert runner.has_crashed
        await load_and_ask(launcher, path)
        assert set(pauses) == {0.0}
        await launcher.close()
        assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    uvloop.run(scenario())


def test_a_kill_for_want_of_memory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent sees SIGKILL and nothing else; the system's count of such kills has risen meanwhile."""
    counts = iter([3, 4])
    monkeypatch.setattr("puna.llm.runner.oom_kills", lambda: next(counts))
    path = write_script(tmp_path, die_at_piece=0)

    async def scenario() -> str:
        runner = await start(path)
        try:
            await runner.load(wire.LoadRequest(), PATIENCE_S)
            with pytest.raises(RunnerDied) as raised:
                _ = [reply async for reply in runner.complete(wire.CompletionRequest())]
            return str(raised.value)
        finally:
            await runner.close()

    assert "(signal SIGKILL, the system has run out of memory)" in uvloop.run(scenario())


def test_the_control_groups_count_comes_before_the_machines(tmp_path: Path) -> None:
    membership, mount, vmstat = tmp_path / "cgroup", tmp_path / "fs", tmp_path / "vmstat"
    assert oom_kills(membership, mount, vmstat) == 0
    vmstat.write_text("nr_free_pages 1\noom_kill 7\n")
    assert oom_kills(membership, mount, vmstat) == 7
    membership.write_text("0::/box\n")
    assert oom_kills(membership, mount, vmstat) == 7
    (mount / "box").mkdir(parents=True)
    (mount / "box" / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert oom_kills(membership, mount, vmstat) == 2


class DriverThatCrashes:
    """The search for devices ends by a signal unless drivers are hidden; how runners were started is noted."""

    def __init__(self, folder: Path) -> None:
        self.is_sound = folder / "sound"
        self.started: list[str] = []
        self.ends_before_it_listens = False
        self.model = write_script(folder)
        text = (
            f"import os\n'GGML_DISABLE_VULKAN' in os.environ or os.path.exists({str(self.is_sound)!r}) or os.abort()\n"
            "print('{\"devices\": []}')"
        )
        machine = Machine([sys.executable, "-S", "-E", "-c", text])
        self.launcher = Launcher(start=self._start, machine=machine, start_with=self._start_with)

    async def _start(self, path: Path) -> Runner:
        self.started.append("as usual")
        if self.ends_before_it_listens:
            raise LoadError("the runner has terminated (signal SIGSEGV)")
        return await start(path)

    async def _start_with(self, path: Path, environ: Mapping[str, str]) -> Runner:
        self.started.append(environ["CUDA_VISIBLE_DEVICES"])
        return await start(path)

    async def launch(self) -> list[str]:
        """How processes were started for it; the last of them is the runner, and the others have gone."""
        self.started.clear()
        runner = await self.launcher.launch(self.model)
        assert (await runner.health()).status == "loading"
        await runner.close()
        return list(self.started)


def test_runners_are_kept_from_a_driver_that_ends_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first had been started before the search was over; the driver is tried again later."""

    async def scenario() -> None:
        world = DriverThatCrashes(tmp_path)
        assert await world.launch() == ["as usual", "-1"]
        assert await world.launch() == ["-1"]
        monkeypatch.setattr(discovery, "RETRY_S", 0.0)
        world.is_sound.touch()
        assert await world.launch() == ["as usual"]
        assert await world.launch() == ["as usual"]
        await world.launcher.close()

    uvloop.run(scenario())
    pids = [event[1] for event in events(tmp_path / "model") if event[0] == "start"]
    assert len(pids) == 5
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_runner_that_such_a_driver_ends_before_it_listens_is_started_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = DriverThatCrashes(tmp_path)
        world.ends_before_it_listens = True
        assert await world.launch() == ["as usual", "-1"]
        await world.launcher.close()

    uvloop.run(scenario())


def test_a_runner_that_ends_with_sound_drivers_is_an_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = DriverThatCrashes(tmp_path)
        world.is_sound.touch()
        world.ends_before_it_listens = True
        with pytest.raises(LoadError, match="signal SIGSEGV"):
            await world.launch()
        assert world.started == ["as usual"]
        await world.launcher.close()

    uvloop.run(scenario())


def test_with_sound_drivers_the_runner_is_the_one_that_was_started(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = DriverThatCrashes(tmp_path)
        world.is_sound.touch()
        assert await world.launch() == ["as usual"]
        await world.launcher.close()

    uvloop.run(scenario())


def test_who_loads_one_model_has_its_spare_tell_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    told = wire.Discovery(devices=[wire.Device(name="CPU", library="CPU", kind="cpu", free=1, total=2)])

    async def devices(self: Spare) -> wire.Discovery:
        return told

    async def search(*_: object, **__: object) -> wire.Discovery:
        return wire.Discovery(devices=[], error="a process was started")

    monkeypatch.setattr(Spare, "devices", devices)
    monkeypatch.setattr(discovery, "look", search)

    async def scenario() -> None:
        with_spare, without = for_one_model(), for_one_model(has_spare=False)
        assert with_spare.machine is not None
        assert without.machine is not None
        assert await with_spare.machine.look() == told
        assert without.spare is None
        assert (await without.machine.look()).error == "a process was started"

    asyncio.run(scenario())
