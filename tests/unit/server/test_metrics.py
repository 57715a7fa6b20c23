from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from puna.server import labels
from tests.patience import PATIENCE_S, wait_until
from tests.tiny import write_llama
from tests.unit.server.apis.test_native import HI
from tests.unit.server.live import Live


def samples(live: Live) -> dict[str, float]:
    response = live.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = [line for line in response.text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_what_is_counted(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.add("hello", cached_count=2)
    live.add("broken", fail_at_piece=1)
    live.add("slow", n_pieces=1000, piece_delay_s=0.02)
    with live.running():
        assert samples(live)["puna_models_loaded"] == 0
        for path in ("/api/chat", "/v1/chat/completions", "/v1/responses"):
            assert live.post(path, {"model": "hello", "messages": HI, "input": "Hi"}).status_code == 200
        live.post("/v1/messages", {"model": "hello", "messages": HI, "max_tokens": 9})
        live.post("/api/chat", {"model": "broken", "messages": HI})
        with live.client.stream("POST", "/api/chat", json={"model": "slow", "messages": HI}) as response:
            lines = response.iter_lines()  # a name of its own: collected, it would close the connection
            next(lines)
        cancelled = 'puna_requests_total{model="slow:latest",outcome="cancelled"}'
        wait_until(lambda: samples(live).get(cancelled) == 1.0)
        found = samples(live)
        of_hello = {name: value for name, value in found.items() if 'model="hello:latest"' in name}
        assert of_hello['puna_requests_total{model="hello:latest",outcome="ok"}'] == 4
        assert found['puna_requests_total{model="broken:latest",outcome="error"}'] == 1
        for name, expected in {
            "puna_prompt_tokens_total": 12,
            "puna_prompt_tokens_cached_total": 8,
            "puna_generated_tokens_total": 16,
            "puna_time_to_first_token_seconds_count": 4,
            "puna_inter_token_seconds_count": 8,
            "puna_queue_seconds_count": 4,
            "puna_request_duration_seconds_count": 4,
            "puna_requests_running": 0,
            "puna_requests_waiting": 0,
        }.items():
            assert of_hello[f'{name}{{model="hello:latest"}}'] == expected, name
        assert found["puna_models_loaded"] >= 1
        assert found['puna_model_memory_bytes{device="CPU",model="hello:latest"}'] == 1230
        assert found['puna_requests_running{model="slow:latest"}'] == 0


def test_a_request_in_flight_is_seen(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.add("slow", n_pieces=1000, piece_delay_s=0.02)
    with live.running():
        with live.client.stream("POST", "/api/chat", json={"model": "slow", "messages": HI}) as response:
            lines = response.iter_lines()  # a name of its own: collected, it would close the connection
            next(lines)
            with httpx.Client(base_url=live.url, timeout=PATIENCE_S) as other:
                text = other.get("/metrics").text
            assert re.search(r'^puna_requests_running\{model="slow:latest"\} 1\.0$', text, re.MULTILINE)
        wait_until(lambda: samples(live)['puna_requests_running{model="slow:latest"}'] == 0)


def test_names_that_nobody_stored_make_no_series(shared: Live) -> None:
    shared.post("/api/chat", {"model": "made-up", "messages": HI})
    assert "made-up" not in shared.client.get("/metrics").text


def test_the_cache_and_the_queue_of_each_runner_are_seen(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.add("hello", cache_cells=400, cache_used=30, host_cache_bytes=1000, host_cache_entries=2, thinking_count=3)
    with live.running():
        live.post("/api/chat", {"model": "hello", "messages": HI, "stream": False})
        found = samples(live)
        assert found['puna_cache_cells{model="hello:latest"}'] == 400
        assert found['puna_cache_cells_used{model="hello:latest"}'] == 30
        assert found['puna_host_cache_bytes{model="hello:latest"}'] == 1000
        assert found['puna_host_cache_entries{model="hello:latest"}'] == 2
        assert found['puna_runner_requests_active{model="hello:latest"}'] == 0
        assert found['puna_runner_requests_waiting{model="hello:latest"}'] == 0
        assert found['puna_runner_steps_total{model="hello:latest"}'] >= 0
        assert found['puna_thinking_tokens_total{model="hello:latest"}'] == 3
        assert found["process_resident_memory_bytes"] > 1e6


def test_labels_hold_no_paths_and_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "MAX_LABELS", 3)
    live = Live(tmp_path)
    for number in range(5):
        live.add(f"model{number}")
    files = [write_llama(tmp_path / f"{name}.gguf", n_layers=1, metadata={"general.tag": name}) for name in ("one", "two")]
    for file in files:
        live.follow(file)
    with live.running():
        for model in [*(f"model{number}" for number in range(5)), *map(str, files)]:
            assert live.post("/api/generate", {"model": model, "prompt": "Hi", "stream": False}).status_code == 200
        found = samples(live)
        assert str(tmp_path) not in live.client.get("/metrics").text
    counted = {name: n for name, n in found.items() if name.startswith("puna_generated_tokens_total")}
    assert counted == {
        **{f'puna_generated_tokens_total{{model="model{number}:latest"}}': 4 for number in range(3)},
        'puna_generated_tokens_total{model="(other)"}': 8,
        'puna_generated_tokens_total{model="(file)"}': 8,
    }
