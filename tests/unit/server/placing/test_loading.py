"""Loads over HTTP, with runners that follow a script: what a client sees of those that stall, fail or lack memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from puna.llm.runner import Runner
from tests.patience import PATIENCE_S
from tests.unit.llm.fake_machine import gpu
from tests.unit.server.live import Live

GIB = 1 << 30


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    with Live(tmp_path, max_loaded_models=2).running() as running:
        yield running


def load(live: Live, model: str, **fields: Any) -> httpx.Response:
    return live.post("/api/generate", {"model": model, **fields})


def loaded(live: Live) -> dict[str, tuple[int, int]]:
    models = live.client.get("/api/ps").json()["models"]
    return {model["name"].removesuffix(":latest"): (model["size"], model["size_vram"]) for model in models}


def within(live: Live, load_timeout: float) -> None:
    """From now on."""
    live.scheduler.admission.settings = replace(live.settings, load_timeout=load_timeout)


def test_a_load_without_progress_fails_and_the_next_one_starts_afresh(live: Live) -> None:
    script = live.add("m", stall=True)
    within(live, 1.0)
    response = load(live, "m")
    assert response.status_code == 500
    assert "timed out waiting for the runner to " in response.json()["error"]
    assert loaded(live) == {}
    script.write_text("{}")
    within(live, PATIENCE_S)
    assert load(live, "m").json()["done_reason"] == "load"


def test_a_load_that_takes_longer_but_moves_on_is_waited_for(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """However short a pause it may make between two looks; its memory it may take as slowly as it wants."""
    wait = Runner.wait_until_ready
    monkeypatch.setattr(Runner, "wait_until_ready", lambda runner, _: wait(runner, 0.0))
    script = live.add("m", load_asks=50)
    assert load(live, "m").json()["done_reason"] == "load"
    assert loaded(live)["m"]
    assert [event[1]["operation"] for event in live.events(script) if event[0] == "/load"][-1] == "commit"


def test_a_model_too_large_for_the_host_is_never_tried(live: Live) -> None:
    script = live.add("m", needs=9 * GIB)
    live.machine.free = 8 * GIB
    response = load(live, "m")
    assert response.status_code == 500
    assert "requires more system memory (9.0 GiB) than is available (8.0 GiB)" in response.json()["error"]
    operations = {event[1]["operation"] for event in live.events(script) if event[0] == "/load"}
    assert operations == {"fit"}


def test_one_that_does_not_fit_beside_another_takes_its_place(live: Live) -> None:
    for name in ("a", "b"):
        live.add(name, needs=5 * GIB)
    live.machine.free = 8 * GIB
    for name in ("a", "b", "a"):
        assert load(live, name).status_code == 200
        assert loaded(live) == {name: (5 * GIB, 0)}


def test_pins_come_and_go_with_requests(live: Live) -> None:
    for name in ("a", "b", "c"):
        live.add(name)
    for name in ("a", "b"):
        load(live, name, keep_alive=-1)
    refused = load(live, "c")
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert "models that were asked to stay" in refused.json()["error"]
    assert load(live, "a", keep_alive=0).json()["done_reason"] == "unload"  # puna stop
    assert load(live, "c").status_code == 200
    assert set(loaded(live)) == {"b", "c"}


def test_the_part_on_gpus_is_shown(live: Live) -> None:
    live.machine.devices = [gpu("CUDA0", 4 * GIB)]
    live.add("m", needs=8 * GIB, layers=15)
    for num_gpu, on_gpu in ((0, 0), (4, 2 * GIB), (-1, 2 * GIB), (16, 8 * GIB)):
        assert load(live, "m", options={"num_gpu": num_gpu}).status_code == 200
        size, size_vram = loaded(live)["m"]
        assert size == 8 * GIB
        assert size_vram == pytest.approx(on_gpu, abs=100)
