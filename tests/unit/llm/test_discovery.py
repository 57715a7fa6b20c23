from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import uvloop

from puna import wire
from puna.host import Memory
from puna.llm import discovery
from puna.llm.discovery import Machine, described, look, look_once, parse, without_doubles
from tests import clock
from tests.patience import PATIENCE_S
from tests.unit.llm.fake_machine import gpu


def program(text: str) -> list[str]:
    return [sys.executable, "-S", "-E", "-c", text]


def found(**fields: Any) -> str:
    return json.dumps({"devices": [], **fields})


def test_this_machine() -> None:
    """The real process: a CPU with memory, whatever else there is."""
    seen = look_once()
    assert seen.error == ""
    cpu = next(device for device in seen.devices if device.kind == "cpu")
    assert cpu.library == "CPU"
    assert cpu.total > 0
    assert 1 <= seen.threads <= seen.physical_cores * 2


def test_filters_reach_the_process_and_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "")
    assert look_once().filters == {"CUDA_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("import os; os.abort()", "the search for devices ended with signal 6"),
        ("import os; os.kill(os.getpid(), 11)", "ended with signal 11"),
        ("import sys; sys.exit('no such driver')", "ended with status 1: no such driver"),
        ("print('{')", "ended with status 0"),
        ("pass", "ended with status 0"),
        ("print('[1]')", "ended with status 0"),
        (f"import os; print({found()!r}, flush=True); os.abort()", "signal 6"),
    ],
)
def test_a_process_that_ends_otherwise_is_told(text: str, error: str) -> None:
    for seen in (look_once(program(text)), uvloop.run(look(program(text)))):
        assert seen.devices == []
        assert error in seen.error


def test_drivers_may_print() -> None:
    text = f"print('ggml_cuda_init: found 1 CUDA devices'); print({found(threads=3)!r}); print()"
    assert look_once(program(text)).threads == 3


def test_a_program_that_is_not_there_is_told() -> None:
    nobody = ["/no/such/program"]
    for seen in (look_once(nobody), uvloop.run(look(nobody))):
        assert "could not be started" in seen.error


def left(mark: Path) -> list[psutil.Process]:
    """Processes of this one that have *mark* in their commands; other tests may have their own."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            found += [child] if any(str(mark) in word for word in child.cmdline()) else []
    return found


def test_a_driver_that_hangs_is_left_and_its_process_ended(tmp_path: Path) -> None:
    async def scenario() -> wire.Discovery:
        return await look(program(f"import time; time.sleep(3600)  # {tmp_path}"), timeout_s=1.0)

    begin = time.monotonic()
    seen = uvloop.run(scenario())
    assert time.monotonic() - begin < PATIENCE_S
    assert "no answer within 1 s" in seen.error
    assert not left(tmp_path)


def test_who_no_longer_wants_to_know_leaves_no_process(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    text = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(3600)"

    async def scenario() -> None:
        task = asyncio.create_task(look(program(text)))
        while not (note.exists() and note.read_text()):
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait({task})

    uvloop.run(scenario())
    assert not psutil.pid_exists(int(note.read_text()))


@pytest.mark.parametrize("n_turns", range(6))
def test_nor_who_left_before_it_was_started(n_turns: int, tmp_path: Path) -> None:
    """The process is there some turns of the loop before the one who starts it is told."""

    async def scenario() -> None:
        task = asyncio.create_task(look(program(f"import time; time.sleep(3600)  # {tmp_path}")))
        for _ in range(n_turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()

    uvloop.run(scenario())
    assert not left(tmp_path)


def counting(folder: Path, text: str) -> list[str]:
    """Notes each time it is run."""
    return program(f"open({str(folder / 'runs')!r}, 'a').write('x'); {text}")


def runs(folder: Path) -> int:
    return len((folder / "runs").read_text())


def test_devices_are_searched_for_once_and_gpus_asked_again(tmp_path: Path) -> None:
    one = {"name": "CUDA0", "library": "CUDA", "kind": "gpu", "free": 5, "total": 10}

    async def scenario() -> None:
        machine = Machine(counting(tmp_path, f"print({found(devices=[one])!r})"))
        assert machine.gpus is None
        await asyncio.gather(*(machine.look() for _ in range(5)))
        assert [device.name for device in (await machine.look()).devices] == ["CUDA0"]
        assert runs(tmp_path) == 1
        assert await machine.refresh()
        assert runs(tmp_path) == 2

    uvloop.run(scenario())


def test_without_gpus_there_is_nothing_to_ask_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        machine = Machine(counting(tmp_path, f"print({found()!r})"))
        for _ in range(3):
            assert await machine.refresh()
        assert runs(tmp_path) == 1

    uvloop.run(scenario())


def test_a_gpu_that_does_not_answer_later_is_still_there(tmp_path: Path) -> None:
    one = {"name": "CUDA0", "library": "CUDA", "kind": "gpu", "free": 5, "total": 10}
    text = f"import os\nif len(open({str(tmp_path / 'runs')!r}).read()) > 1: os.abort()\nprint({found(devices=[one])!r})"

    async def scenario() -> None:
        machine = Machine(program(f"open({str(tmp_path / 'runs')!r}, 'a').write('x')\n{text}"))
        await machine.look()
        assert not await machine.refresh()
        assert [device.name for device in machine.gpus or []] == ["CUDA0"]

    uvloop.run(scenario())


def test_what_was_found_is_searched_for_anew_when_it_is_doubted(tmp_path: Path) -> None:
    async def scenario() -> None:
        machine = Machine(counting(tmp_path, f"print({found()!r})"))
        await machine.look()
        machine.forget()
        assert machine.gpus is None
        await machine.look()
        assert runs(tmp_path) == 2

    uvloop.run(scenario())


def test_a_failed_search_is_repeated_but_not_for_every_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        machine = Machine(counting(tmp_path, "import os; os.abort()"))
        monkeypatch.setattr(discovery, "RETRY_S", 3600.0)
        for _ in range(3):
            await machine.look()
        assert runs(tmp_path) == 2  # the second without drivers
        assert not machine.environ  # they are not to blame
        monkeypatch.setattr(discovery, "RETRY_S", 0.0)
        await machine.look()
        assert runs(tmp_path) == 4

    uvloop.run(scenario())


def test_a_failed_search_is_repeated_as_soon_as_its_time_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    n_searches = 0

    async def fails(*_: object, **__: object) -> wire.Discovery:
        nonlocal n_searches
        n_searches += 1
        return wire.Discovery(devices=[], error="no driver")

    async def scenario() -> None:
        machine = Machine()
        for wait_s, n_wanted in ((0.0, 2), (discovery.RETRY_S - 1, 2), (1.0, 4)):  # twice each time: once without drivers
            await asyncio.sleep(wait_s)
            await machine.look()
            assert n_searches == n_wanted

    monkeypatch.setattr(discovery, "look", fails)
    clock.run(scenario())


def test_a_driver_that_ends_every_process_is_kept_from_runners_until_it_is_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the machine is known all the same, and what the user has hidden is told as before."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(discovery, "RETRY_S", 0.0)
    sound = tmp_path / "sound"
    filters = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}
    text = (
        f"import os\nhidden = os.environ['CUDA_VISIBLE_DEVICES'] == '-1' and 'GGML_DISABLE_VULKAN' in os.environ\n"
        f"hidden or os.path.exists({str(sound)!r}) or os.abort()\nprint({found(threads=3, filters=filters)!r})"
    )

    async def scenario() -> None:
        machine = Machine(program(text))
        seen = await machine.look()
        assert "signal 6" in seen.error
        assert (seen.threads, seen.filters) == (3, {"CUDA_VISIBLE_DEVICES": "0"})
        assert machine.environ == discovery.WITHOUT_DRIVERS
        assert machine.gpus == []
        sound.touch()
        assert (await machine.look()).error == ""
        assert not machine.environ

    uvloop.run(scenario())


def test_hardware_that_two_libraries_drive_is_one_device() -> None:
    def at(name: str, library: str, place: str) -> wire.Device:
        return wire.Device(name=name, library=library, kind="gpu", free=1, total=1, id=place)

    devices = [at("V0", "Vulkan", "0:1"), at("V1", "Vulkan", "0:2"), at("C0", "CUDA", "0:1"), at("X", "X", ""), at("Y", "X", "")]
    assert [device.name for device in without_doubles(devices)] == ["V1", "C0", "X", "Y"]


def test_the_line_in_the_log() -> None:
    machine = Memory(8 << 30, 6 << 30, 0)
    seen = wire.Discovery(
        devices=[gpu("CUDA0", 24 << 30, free=20 << 30), gpu("I", 4 << 30, is_integrated=True)],
        filters={"CUDA_VISIBLE_DEVICES": "0"},
        physical_cores=4,
        threads=3,
    )
    line = described(seen, machine)
    assert line.startswith("4 cores, 3 threads, 6.0 of 8.0 GiB free; CUDA0:")
    assert "by CUDA, 20.0 of 24.0 GiB free; I (integrated)" in line
    assert line.endswith('chosen by {"CUDA_VISIBLE_DEVICES": "0"}')


def test_the_line_in_the_log_has_what_the_driver_said() -> None:
    known = msgspec.structs.replace(gpu("CUDA0", 24 << 30), description="A card", capability="8.9", driver="12.4")
    line = described(wire.Discovery(devices=[known]), Memory(8 << 30, 6 << 30, 0))
    assert "CUDA0: A card by CUDA, compute 8.9, driver 12.4, 24.0 of 24.0 GiB free" in line


def test_a_failure_s_text_is_short() -> None:
    assert len(parse(1, b"", b"x" * 100_000).error) < 700


def test_workers_are_asked_again_before_each_load_also_where_none_was_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where none was there. One that is lost is told once, and again when it was there meanwhile."""
    note = tmp_path / "found"
    command = program(f"print(open({str(note)!r}).read())")
    worker = {"name": "RPC0[box:1]", "library": "RPC", "kind": "rpc", "free": 1, "total": 2}
    gone = found(workers=["box:1"], lost=["box:1 is gone"])
    there = found(workers=["box:1"], devices=[worker])

    async def scenario() -> list[list[str]]:
        machine, seen = Machine(command), []
        for text in (gone, gone, there, gone):
            note.write_text(text)
            assert await machine.refresh()
            seen.append([device.name for device in machine.gpus or []])
        assert machine.lost == ["box:1 is gone"]
        return seen

    assert uvloop.run(scenario()) == [[], [], ["RPC0[box:1]"], []]
    assert caplog.text.count("box:1 is gone") == 2


def test_a_library_without_rpc_devices_says_what_to_do() -> None:
    """The prebuilt one: the server goes on, and its log names the command."""
    environ = {**os.environ, "PUNA_LIBRARY": "prebuilt", "PUNA_RPC": "127.0.0.1:1"}
    done = subprocess.run(discovery.COMMAND, env=environ, capture_output=True, check=True, timeout=PATIENCE_S)
    seen = parse(0, done.stdout, b"")
    (lost,) = seen.lost
    assert lost.startswith("PUNA_RPC has no effect: the tensor library (xllamacpp==")
    assert lost.endswith("was built without RPC devices: `puna native build` compiles one that has them")
    assert [device.kind for device in seen.devices if device.kind == "rpc"] == []


def test_a_worker_needs_a_library_with_rpc_devices() -> None:
    environ = {**os.environ, "PUNA_LIBRARY": "prebuilt"}
    command = [sys.executable, "-m", "puna", "rpc-worker", "--port", "0"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert "was built without RPC devices: `puna native build`" in done.stderr
    assert "Traceback" not in done.stderr
