from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from puna import host
from puna.api.options import Options
from puna.llm.load import HOST_CACHE_SHARE, MAX_N_BATCH, MAX_N_CTX, load_requirements
from puna.settings import Settings, load
from puna.wire import LoadOptions

SETTINGS = Settings(host_cache=0)


@pytest.mark.parametrize(
    ("options", "settings", "n_ctx_train", "expected"),
    [
        ({}, {}, None, LoadOptions()),
        ({}, {"context_length": 1000}, None, LoadOptions(n_ctx=1000)),
        ({"num_ctx": 2000}, {"context_length": 1000}, None, LoadOptions(n_ctx=2000)),
        ({"num_ctx": 2000}, {}, 1024, LoadOptions(n_ctx=1024)),
        ({}, {}, 1024, LoadOptions(n_ctx=1024)),
        ({"num_ctx": 1}, {}, None, LoadOptions(n_ctx=4, n_batch=4)),
        ({"num_ctx": 100}, {}, None, LoadOptions(n_ctx=100, n_batch=100)),
        ({"num_ctx": 0}, {}, None, LoadOptions()),
        ({"num_ctx": -5}, {}, None, LoadOptions(n_ctx=4, n_batch=4)),
        ({"num_batch": 64, "num_thread": 3, "use_mmap": False}, {}, None, LoadOptions(n_batch=64, n_threads=3, use_mmap=False)),
        ({"num_batch": 0, "num_thread": -1}, {}, None, LoadOptions()),
        ({}, {"num_parallel": 2, "kv_cache_type": "q8_0"}, None, LoadOptions(n_parallel=2, kv_cache_type="q8_0")),
        ({}, {"kv_cache_type": "f64"}, None, LoadOptions()),
        ({}, {"flash_attention": False}, None, LoadOptions(flash_attention=False)),
        ({}, {"flash_attention": False, "kv_cache_type": "q8_0"}, None, LoadOptions(flash_attention=False)),
    ],
)
def test_load_options(
    options: dict[str, Any],
    settings: dict[str, Any],
    n_ctx_train: int | None,
    expected: LoadOptions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "usable_cores", lambda: 6)
    wanted = load_requirements(Options(**options), replace(SETTINGS, **settings), n_ctx_train=n_ctx_train)
    assert wanted.options == msgspec.structs.replace(expected, models=str(SETTINGS.models))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_thread": 4096}, LoadOptions(n_threads=6)),
        ({"num_thread": 1 << 62}, LoadOptions(n_threads=6)),
        ({"num_thread": 5}, LoadOptions(n_threads=5)),
        ({"num_batch": 1 << 62, "num_ctx": 1 << 20}, LoadOptions(n_ctx=1 << 20, n_batch=MAX_N_BATCH)),
        ({"num_ctx": 1 << 62}, LoadOptions(n_ctx=MAX_N_CTX)),
    ],
)
def test_no_number_asks_for_more_than_does_good(
    options: dict[str, Any], expected: LoadOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "usable_cores", lambda: 6)
    wanted = load_requirements(Options(**options), SETTINGS)
    assert wanted.options == msgspec.structs.replace(expected, models=str(SETTINGS.models))
    assert wanted.is_served_by(load_requirements(Options(**options), SETTINGS).options)


def test_a_context_that_is_cut_is_told_about(caplog: pytest.LogCaptureFixture) -> None:
    load_requirements(Options(), SETTINGS, n_ctx_train=100)
    assert caplog.text == ""
    load_requirements(Options(num_ctx=1000), SETTINGS, n_ctx_train=100)
    assert "more than the model was trained for" in caplog.text


def test_a_runner_serves_only_models_with_the_same_adapters() -> None:
    one, two = Path("one"), Path("two")
    wanted = load_requirements(Options(), SETTINGS, adapters=[one, two])
    assert wanted.options.adapters == ["one", "two"]
    assert wanted.is_served_by(wanted.options)
    assert not wanted.is_served_by(LoadOptions())
    assert not wanted.is_served_by(LoadOptions(adapters=["two", "one"]))
    assert not load_requirements(Options(), SETTINGS).is_served_by(wanted.options)


def test_models_that_compute_one_sequence_at_a_time() -> None:
    assert load_requirements(Options(), SETTINGS, max_parallel=1).options.n_parallel == 1


def test_a_part_of_the_machine_s_memory_is_for_what_the_cache_has_no_place_for() -> None:
    default = load_requirements(Options(), Settings()).options.host_cache_bytes
    assert default == host.memory().total // HOST_CACHE_SHARE > 0
    wanted = load_requirements(Options(), Settings(host_cache=5 << 20))
    assert wanted.options.host_cache_bytes == 5 << 20
    assert wanted.is_served_by(LoadOptions()), "another bound is no reason to load again"


def test_a_runner_is_told_where_packed_weights_go() -> None:
    wanted = load_requirements(Options(), Settings(models=Path("/elsewhere")))
    assert wanted.options.models == "/elsewhere"
    assert wanted.is_served_by(LoadOptions())


@pytest.mark.parametrize(("text", "seconds"), [("", 0.15), ("80ms", 0.08), ("2", 2.0), ("0", 0.0), ("soon", 0.15)])
def test_how_long_answers_may_wait_beside_prompts_comes_from_the_environment(text: str, seconds: float) -> None:
    wanted = load_requirements(Options(), load({"PUNA_TOKEN_GAP": text}))
    assert wanted.options.token_gap_s == seconds
    assert wanted.is_served_by(LoadOptions(token_gap_s=9.0)), "another pace is no reason to load again"


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("0", 0), ("123", 123), ("512M", 512 << 20), ("2g", 2 << 30), ("1 GiB", None), ("1GiB", 1 << 30), ("-1", None)],
)
def test_bytes_in_the_environment(text: str, n_bytes: int | None) -> None:
    assert load({"PUNA_HOST_CACHE": text}).host_cache == n_bytes


@pytest.mark.parametrize(
    ("options", "loaded", "served"),
    [
        ({}, LoadOptions(), True),
        ({}, LoadOptions(n_ctx=8192, n_batch=32, n_threads=1, use_mmap=False), True),
        ({}, LoadOptions(n_ctx=2048), False),
        ({"num_ctx": 100}, LoadOptions(n_ctx=4096), True),
        ({"num_batch": 64}, LoadOptions(), False),
        ({"num_thread": 2}, LoadOptions(n_threads=2), True),
        ({"use_mmap": False}, LoadOptions(), False),
        ({"use_mmap": True}, LoadOptions(), True),
        ({"use_mmap": True}, LoadOptions(use_mmap=False), False),
        ({"use_mmap": False}, LoadOptions(use_mmap=False), True),
    ],
)
def test_what_a_loaded_runner_serves(options: dict[str, Any], loaded: LoadOptions, served: bool) -> None:
    assert load_requirements(Options(**options), SETTINGS).is_served_by(loaded) is served
