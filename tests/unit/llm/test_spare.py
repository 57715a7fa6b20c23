"""The spare runner: real processes that wait for their model, with an engine that computes nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from puna import wire
from puna.errors import LoadError
from puna.llm import spare as spare_module
from puna.llm.discovery import Machine
from puna.llm.early import begin
from puna.llm.runner import Runner
from puna.llm.spare import Spare
from tests.patience import PATIENCE_S, wait_until

ROOT = Path(__file__).resolve().parents[3]
RUNNER = ("env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.unit.runner.fake_engine")
MODEL = Path("any.gguf")


@asynccontextmanager
async def spare_of(*, command: tuple[str, ...] = (*RUNNER, "--spare"), **options: Any) -> AsyncIterator[Spare]:
    spare = Spare(command=command, command_for_model=lambda path: [*RUNNER, "--channel", "--model", str(path)], **options)
    try:
        yield spare
    finally:
        await spare.close()
        assert spare.pid == 0


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def answers(runner: Runner) -> bool:
    await runner.load(wire.LoadRequest(), PATIENCE_S)
    replies = [reply async for reply in runner.complete(wire.CompletionRequest(prompt="one two"))]
    return isinstance(replies[-1], wire.Done)


async def no_process_is_left(before: list[psutil.Process]) -> None:
    """But for those that were there *before*. One whose start was interrupted is killed at once, and reaped a moment later."""
    await until(lambda: set(psutil.Process().children()) <= set(before))


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid)


def test_a_load_takes_the_spare_and_another_comes_once_the_load_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_module, "REFILL_DELAY_S", 0.2)

    async def scenario() -> None:
        async with spare_of() as spare:
            spare.start()
            await until(lambda: spare.pid)
            first = spare.pid
            assert spare.private_bytes > 1 << 20
            runner = await spare.launch(MODEL)
            assert (runner.pid, spare.pid) == (first, 0)
            await asyncio.sleep(0.5)
            assert spare.pid == 0, "it would compete with the load, which has not begun"
            assert await answers(runner)
            await until(lambda: spare.pid)
            assert spare.pid != first
            await runner.close()

    uvloop.run(scenario())


def counting(folder: Path) -> list[str]:
    """A search for devices that notes each time it is run."""
    return [sys.executable, "-c", f"open({str(folder / 'runs')!r}, 'a').write('x'); print('{{\"devices\": []}}')"]


def test_a_spare_tells_the_devices_and_no_other_process_looks_for_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with spare_of(refill=False) as spare:
            machine = Machine(counting(tmp_path), ask=spare.devices)
            spare.start()
            looking = asyncio.create_task(machine.look())
            await asyncio.sleep(0)
            runner = await spare.launch(MODEL)  # it may be taken while it is asked
            found = await looking
            await runner.close()
            assert "cpu" in [device.kind for device in found.devices]
            assert found.physical_cores
            assert await machine.look() is found

    uvloop.run(scenario())
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("spare_command", [None, ("false",), (*RUNNER, "--spare")], ids=["none", "does not start", "dies"])
def test_where_no_spare_can_tell_a_search_is_started(spare_command: tuple[str, ...] | None, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with spare_of(refill=False, command=spare_command or ("true",)) as spare:
            machine = Machine(counting(tmp_path), ask=spare.devices)
            if spare_command:
                spare.start()
            if spare_command and len(spare_command) > 1:
                await until(lambda: spare.pid)
                os.kill(spare.pid, signal.SIGKILL)
            found = await machine.look()
            assert (found.devices, found.error) == ([], "")
            machine.forget()
            await machine.look()  # the spare is asked once

    uvloop.run(scenario())
    assert (tmp_path / "runs").read_text() == "xx"


def test_a_process_that_was_begun_before_the_event_loop_is_the_spare() -> None:
    begun = begin((*RUNNER, "--spare"))

    async def scenario() -> None:
        async with spare_of(command=("false",), refill=False, begun=begun) as spare:
            spare.start()
            await until(lambda: spare.pid)
            assert spare.pid == begun.process.pid
            runner = await spare.launch(MODEL)
            assert runner.pid == begun.process.pid
            assert await answers(runner)
            assert runner.is_alive
            await runner.close()
            assert not runner.is_alive
            assert not runner.has_crashed

    uvloop.run(scenario())
    assert begun.process.returncode == 0
    assert begun.process.stdout is not None
    assert begun.process.stdout.closed


def test_one_that_dies_is_told_as_any_other() -> None:
    async def scenario() -> None:
        runner = await Runner.adopt(begin((*RUNNER, "--spare")))
        os.kill(runner.pid, signal.SIGKILL)
        assert "SIGKILL" in await runner.ending()
        assert runner.has_crashed
        await runner.close()
        with pytest.raises(LoadError, match="exit status 7"):
            await Runner.adopt(begin((sys.executable, "-c", "raise SystemExit(7)")))

    uvloop.run(scenario())


def test_one_that_nobody_takes_ends_with_who_began_it() -> None:
    program = "from puna.llm.early import begin; print(begin().process.pid, flush=True)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    wait_until(lambda: is_gone(int(done.stdout)))


def test_the_next_spare_belongs_to_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it logs while it stands ready, for hours perhaps, is nothing of the request whose load took the last one."""
    monkeypatch.setattr(spare_module, "REFILL_DELAY_S", 0.0)
    request: ContextVar[str] = ContextVar("request", default="none")
    seen: list[str] = []
    start = Runner.start

    async def spy(command: Any, **options: Any) -> Runner:
        seen.append(request.get())
        return await start(command, **options)

    monkeypatch.setattr(Runner, "start", spy)

    async def scenario() -> None:
        async with spare_of() as spare:
            request.set("some request")
            runner = await spare.launch(MODEL)
            await runner.close()
            await until(lambda: spare.pid)

    uvloop.run(scenario())
    assert seen == ["some request", "none"]


def test_a_load_that_comes_early_takes_the_process_that_is_being_started() -> None:
    async def scenario() -> None:
        async with spare_of(refill=False) as spare:
            spare.start()
            runner = await spare.launch(MODEL)
            assert "--spare" in psutil.Process(runner.pid).cmdline()
            assert await answers(runner)
            other = await spare.launch(MODEL)  # there is none any more
            assert "--model" in psutil.Process(other.pid).cmdline()
            assert await answers(other)
            await runner.close()
            await other.close()
            assert spare.pid == 0

    uvloop.run(scenario())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "hangs"])
def test_a_spare_that_died_or_hangs_is_no_loss(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_module, "ANSWER_TIMEOUT_S", 0.5)

    async def scenario() -> None:
        async with spare_of(refill=False) as spare:
            spare.start()
            await until(lambda: spare.pid)
            pid = spare.pid
            os.kill(pid, number)
            runner = await spare.launch(MODEL)
            assert runner.pid != pid
            assert is_gone(pid)
            assert await answers(runner)
            await runner.close()

    uvloop.run(scenario())


def test_a_spare_that_cannot_be_started_is_no_loss() -> None:
    async def scenario() -> None:
        async with spare_of(command=(sys.executable, "-c", "raise SystemExit(3)")) as spare:
            spare.start()
            await asyncio.sleep(0.3)
            assert spare.pid == 0
            runner = await spare.launch(MODEL)
            assert await answers(runner)
            await runner.close()

    uvloop.run(scenario())


@pytest.mark.parametrize("wait_s", [0.0, 0.02, 1.0])
def test_closing_leaves_no_process(wait_s: float) -> None:
    """Whether it is being started or idle."""

    async def scenario() -> None:
        before = psutil.Process().children()
        async with spare_of() as spare:
            spare.start()
            await asyncio.sleep(wait_s)
        await no_process_is_left(before)
        with pytest.raises(LoadError, match="shutting down"):
            await spare.launch(MODEL)
        spare.start()
        assert spare.pid == 0

    uvloop.run(scenario())


def test_a_launch_that_is_cancelled_leaves_no_process() -> None:
    async def scenario() -> None:
        before = psutil.Process().children()
        for wait_s in (0.0, 0.05, 0.3):
            async with spare_of(refill=False) as spare:
                spare.start()
                launch = asyncio.create_task(spare.launch(MODEL))
                await asyncio.sleep(wait_s)
                launch.cancel()
                await asyncio.wait({launch})
                if not launch.cancelled():
                    await launch.result().close()
            await no_process_is_left(before)

    uvloop.run(scenario())


def test_the_next_spare_is_not_started_when_the_server_ends() -> None:
    async def scenario() -> None:
        async with spare_of() as spare:
            spare.start()
            runner = await spare.launch(MODEL)
            await runner.close()
        await asyncio.sleep(0)
        assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    uvloop.run(scenario())
