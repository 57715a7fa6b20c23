"""The picture of the engine: numbers of every loaded model, and of single requests for those who may see them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, NoReturn

import pytest

from puna.llm.runner import Runner
from puna.server.apis import engine
from tests.unit.server.apis.test_native import HI
from tests.unit.server.live import Live

OCCUPANCY = {
    "computed": 120,
    "sequences": [{"sequence": 1, "tokens": 90, "last_used": 4, "node": 1, "state": "running", "prompt": 80, "generated": 10}],
    "prefixes": [
        {"parent": -1, "begin": 0, "end": 40, "sequences": 2},
        {"parent": 0, "begin": 40, "end": 90, "sequences": 1},
    ],
    "host_cache": [{"tokens": 70, "bytes": 7000}],
    "n_left_out": 3,
}


def picture(live: Live, **headers: str) -> dict[str, Any]:
    response = live.client.get("/api/engine", headers={name.replace("_", "-"): value for name, value in headers.items()})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_an_idle_server_has_memory_and_no_models(tmp_path: Path) -> None:
    with Live(tmp_path).running() as live:
        found = picture(live)
    assert found["models"] == []
    assert found["waiting"] == 0
    assert [device["name"] for device in found["devices"]] == ["host"]
    assert 0 < found["devices"][0]["free"] <= found["devices"][0]["total"]


def test_a_loaded_model_tells_what_it_does_and_holds(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.add("hello", cache_cells=400, cache_used=90, host_cache_bytes=7000, host_cache_entries=1, occupancy=OCCUPANCY)
    with live.running():
        live.post("/api/chat", {"model": "hello", "messages": HI, "stream": False})
        first = picture(live)
        second = picture(live)
    [model] = first["models"]
    assert (model["name"], model["state"], model["engine"]) == ("hello:latest", "ready", "puna")
    assert model["memory"] == [{"device": "CPU", "is_gpu": False, "weights": 1230, "cache": 0, "graph": 0}]
    assert model["health"]["cache_cells"] == 400
    assert model["health"]["host_cache_bytes"] == 7000
    assert model["occupancy"] == OCCUPANCY
    assert second["now"] > first["now"]


def test_a_runner_that_hangs_keeps_nobody_from_looking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(_: Runner) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(engine, "RUNNER_TIMEOUT_S", 0.05)
    live = Live(tmp_path)
    live.add("hello", cache_cells=400, occupancy=OCCUPANCY)
    with live.running():
        live.post("/api/chat", {"model": "hello", "messages": HI, "stream": False})
        monkeypatch.setattr(Runner, "occupancy", hang)
        [model] = picture(live)["models"]
    assert (model["name"], model["health"], model["occupancy"]) == ("hello:latest", None, None)


def test_keys_see_sums_and_only_those_for_management_single_requests(tmp_path: Path) -> None:
    live = Live(tmp_path, api_keys=("admin", "app inference"))
    live.add("hello", cache_cells=400, occupancy=OCCUPANCY)
    with live.running():
        assert live.client.get("/api/engine").status_code == 401
        body = {"model": "hello", "messages": HI, "stream": False}
        live.post("/api/chat", body, headers={"authorization": "Bearer app"})
        [of_app] = picture(live, authorization="Bearer app")["models"]
        [of_admin] = picture(live, authorization="Bearer admin")["models"]
    assert of_admin["occupancy"] == OCCUPANCY
    assert of_app["occupancy"] is None
    assert of_app["health"]["cache_cells"] == 400
