"""Drivers that end the runner's process while it loads: the model is loaded without their GPUs, and others spared the same."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from puna.llm import quarantine
from tests.unit.llm.fake_machine import gpu
from tests.unit.llm.scripted import requests_to
from tests.unit.server.live import Live

GIB = 1 << 30
ERROR = "CUDA error: no kernel image is available for execution on the device"
CRASHES: dict[str, Any] = {"needs": GIB, "layers": 3, "crash_on": {"CUDA0": signal.SIGABRT}, "stderr": ERROR}


@pytest.fixture
def place(tmp_path: Path) -> Live:
    """With one GPU of each of two libraries, the better one first."""
    live = Live(tmp_path)
    live.machine.devices = [gpu("CUDA0", 16 * GIB), gpu("Vulkan1", 8 * GIB, library="Vulkan")]
    return live


def ask(live: Live, name: str, *, status: int = 200, **options: Any) -> str:
    response = live.post("/api/generate", {"model": name, "prompt": "hi", "stream": False, "options": options})
    assert response.status_code == status, response.text
    return str(response.json()["response" if status == 200 else "error"])


def commits(script: Path) -> list[list[str]]:
    """The devices that layers went to, of each load that came so far."""
    requests = [request for request in requests_to(script, "/load") if request["operation"] == "commit"]
    return [[part["device"] for part in request["options"]["gpu_layers"]] for request in requests]


def starts(live: Live, script: Path) -> int:
    return sum(event[0] == "start" for event in live.events(script))


@pytest.mark.parametrize("crash_at", ["fit", "commit", "reading"])
@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV])
def test_a_model_is_loaded_without_the_gpus_that_crash(
    place: Live, caplog: pytest.LogCaptureFixture, crash_at: str, number: int
) -> None:
    script = place.add("m", **CRASHES | {"crash_at": crash_at, "crash_on": {"CUDA0": number}})
    with place.running():
        assert ask(place, "m") == "Hello world"
        (model,) = place.client.get("/api/ps").json()["models"]
    assert commits(script)[-1] == ["Vulkan1"]
    assert model["size_vram"] > 0
    assert starts(place, script) == 2
    (warning,) = [record.message for record in caplog.records if "crashed its runner" in record.message]
    assert "on CUDA0 has crashed its runner, it is loaded without GPUs of CUDA" in warning
    assert ERROR in warning
    assert "GPUs of CUDA are left alone for 10 minutes" in caplog.text


def test_where_every_library_crashes_the_model_is_on_the_cpu(place: Live) -> None:
    script = place.add("m", **CRASHES | {"crash_on": {"CUDA0": signal.SIGABRT, "Vulkan1": signal.SIGSEGV}})
    with place.running():
        assert ask(place, "m") == "Hello world"
    assert commits(script) == [[]]
    assert starts(place, script) == 3


def test_the_next_loads_leave_the_library_alone_for_a_while(place: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = place.add("first", **CRASHES), place.add("second", **CRASHES)
    third = place.add("third", needs=GIB, layers=3)
    with place.running():
        ask(place, "first")
        ask(place, "second")
        assert (starts(place, first), starts(place, second)) == (2, 1)
        assert commits(second) == [["Vulkan1"]]
        admission = place.scheduler.admission
        now = admission.quarantine.clock() + quarantine.QUARANTINE_S
        monkeypatch.setattr(admission.quarantine, "clock", lambda: now)
        ask(place, "third")
        assert commits(third) == [["CUDA0"]]


def test_layers_that_were_asked_for_are_tried_and_the_error_says_where(place: Live) -> None:
    script, sound = place.add("m", **CRASHES), place.add("sound", needs=GIB, layers=3)
    with place.running():
        error = ask(place, "m", num_gpu=3, status=500)
        assert error == (
            f"model runner has unexpectedly stopped (signal SIGABRT): {ERROR} "
            "(while layers were loaded onto CUDA0; num_gpu 0 loads none)"
        )
        assert starts(place, script) == 1
        assert ask(place, "m", num_gpu=0) == "Hello world"
        place.scheduler.admission.quarantine.add(["CUDA"])
        ask(place, "sound", num_gpu=4)
        assert commits(sound) == [["CUDA0"]]
        assert not place.scheduler.admission.quarantine.libraries()  # what has loaded a model is trusted again


def test_a_process_that_others_end_says_nothing_of_gpus(place: Live) -> None:
    """The system's killer for want of memory, above all: it must not cost the next loads their GPUs."""
    script = place.add("m", **CRASHES | {"crash_on": {"CUDA0": signal.SIGKILL}})
    with place.running():
        assert "signal SIGKILL" in ask(place, "m", status=500)
        assert not place.scheduler.admission.quarantine.libraries()
    assert starts(place, script) == 1


def test_a_model_that_crashes_without_gpus_too_blames_none(place: Live) -> None:
    """Then it is the file, or the code: other models go on using GPUs."""
    everywhere = CRASHES | {"crash_on": dict.fromkeys(("CUDA0", "Vulkan1"), signal.SIGABRT)}
    script, sound = place.add("m", **everywhere), place.add("sound", needs=GIB, layers=3)
    place.machine.free = GIB // 2  # too little for the CPU
    with place.running():
        assert "requires more system memory" in ask(place, "m", status=500)
        ask(place, "sound")
    assert starts(place, script) == 3
    assert commits(sound) == [["CUDA0"]]


def test_the_main_gpu_keeps_its_number_while_others_are_left_alone(place: Live) -> None:
    script = place.add("m", needs=GIB, layers=3)
    place.machine.devices.append(gpu("Vulkan2", 8 * GIB, library="Vulkan"))
    with place.running():
        place.scheduler.admission.quarantine.add(["CUDA"])
        ask(place, "m", main_gpu=2)
        assert commits(script) == [["Vulkan2"]]
        ask(place, "m", main_gpu=0)
        assert commits(script)[1] in (["Vulkan1"], ["Vulkan2"])


@pytest.mark.parametrize(("knows_gpus", "doubted"), [(True, 0), (False, 1)])
def test_a_driver_that_breaks_later_is_searched_for_anew(
    place: Live, monkeypatch: pytest.MonkeyPatch, knows_gpus: bool, doubted: int
) -> None:
    """It no longer tells its free memory, and ends a runner that has nothing on its GPU."""
    place.add("m", exit_at_load=3)
    place.machine.knows_gpus = knows_gpus
    doubts: list[None] = []
    monkeypatch.setattr(place.machine, "forget", lambda: doubts.append(None))
    with place.running():
        assert "exit status 3" in ask(place, "m", status=500)
    assert len(doubts) == doubted


def test_a_model_whose_first_request_crashes_on_a_gpu_is_loaded_without_it(place: Live, caplog: pytest.LogCaptureFixture) -> None:
    """Code that the GPU cannot run is met only when something is computed. Other models are not concerned."""
    script, sound = place.add("m", **CRASHES | {"crash_at": "completion"}), place.add("sound", needs=GIB, layers=3)
    with place.running():
        assert f"signal SIGABRT): {ERROR}" in ask(place, "m", status=500)
        assert ask(place, "m") == "Hello world"
        assert commits(script) == [["CUDA0"], ["Vulkan1"]]
        ask(place, "sound")
        assert commits(sound) == [["CUDA0"]]
        assert "SIGABRT" in ask(place, "m", num_gpu=2, status=500)
    assert "has crashed on CUDA0 before it had answered anything: for 10 minutes it is loaded without GPUs of CUDA" in caplog.text


def test_a_runner_that_has_answered_before_it_crashes_says_nothing_of_gpus(place: Live) -> None:
    """What has computed once computes again: it was the request."""
    script = place.add("m", **CRASHES | {"crash_at": "completion", "crash_after": 1})
    with place.running():
        assert ask(place, "m") == "Hello world"
        assert "SIGABRT" in ask(place, "m", status=500)
        assert ask(place, "m") == "Hello world"
    assert commits(script) == [["CUDA0"], ["CUDA0"]]
