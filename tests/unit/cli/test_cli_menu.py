"""Bare ``puna``: a menu on a terminal, the help text elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.api.fake_server import TAGS, FakeServer
from tests.unit.cli.conftest import Cli
from tests.unit.cli.pty_driver import Screen, terminal

ENTER, CTRL_C, ESCAPE, UP, DOWN = "\r", "\x03", "\x1b", "\x1b[A", "\x1b[B"
PROMPT = ">>> "
TITLE = "What shall it be?"


@pytest.fixture
def env(fake: FakeServer, environment: dict[str, str]) -> dict[str, str]:
    return {**environment, "OLLAMA_HOST": fake.address.url}


@pytest.fixture
def menu(env: dict[str, str], tmp_path: Path) -> Iterator[Screen]:
    with terminal(env=env, cwd=tmp_path) as screen:
        screen.wait_for(TITLE)
        yield screen


def test_models_and_what_else_there_is_to_do(menu: Screen) -> None:
    shown = menu.wait_until_shown("  Leave")
    assert shown[0].startswith(TITLE)
    assert [line.split("   ")[0] for line in shown[1:]] == [
        "❯ Chat with echo:latest",
        "  Chat with thinker:1b",
        "  Chat with smollm2:135m",
        "  Chat with another model",
        "  Show the commands",
        "  Leave",
    ]
    assert "91 MB" in shown[1]
    assert "4.7 GB" in shown[2]


def test_a_model_is_picked_with_the_arrows(menu: Screen, fake: FakeServer) -> None:
    menu.send(DOWN + ENTER)
    menu.wait_for(PROMPT)
    menu.send("hi" + ENTER)
    menu.wait_for("You said: hi")
    menu.wait_for(PROMPT)
    assert fake.bodies("/api/chat")[0]["model"] == "thinker:1b"
    assert TITLE not in "\n".join(menu.lines)
    menu.send("/bye" + ENTER)
    assert menu.wait_for_end()[1] == 0


def test_the_first_is_picked_by_enter_and_the_list_goes_round(menu: Screen) -> None:
    menu.send(UP)
    menu.wait_until_shown("❯ Leave")
    menu.send(ENTER)
    assert menu.wait_for_end()[1] == 0


def test_another_model_is_pulled_first(menu: Screen, fake: FakeServer) -> None:
    menu.send(DOWN * 3 + ENTER)
    menu.wait_for("Name of a model, or its source: ")
    menu.send("newcomer" + ENTER)
    menu.wait_for("success")
    menu.wait_for(PROMPT)
    assert [body["model"] for body in fake.bodies("/api/pull")] == ["newcomer"]


@pytest.mark.parametrize("keys", [CTRL_C, ESCAPE, "q", "\x04"])
def test_leaving(menu: Screen, fake: FakeServer, keys: str) -> None:
    menu.send(keys)
    assert menu.wait_for_end()[1] == 0
    assert not fake.requests


def test_the_commands_can_be_shown(menu: Screen) -> None:
    menu.send(UP + UP + ENTER)
    shown, status = menu.wait_for_end()
    assert status == 0
    assert "Commands:" in shown


def test_an_empty_store_begins_with_the_starter(env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TAGS, "models", [])
    with terminal(env=env, cwd=tmp_path) as screen:
        screen.wait_for(TITLE)
        assert screen.wait_until_shown("  Leave")[1].startswith("❯ Chat with smollm2:135m")
        screen.send(ENTER)
        screen.wait_for("success")
        screen.wait_for(PROMPT)


def test_what_makes_no_conversation_is_not_offered(env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [{"name": "embedder:latest", "capabilities": ["embedding"]}, {"name": "talker:1b", "capabilities": ["completion"]}]
    monkeypatch.setitem(TAGS, "models", models)
    with terminal(env=env, cwd=tmp_path) as screen:
        screen.wait_for(TITLE)
        shown = "\n".join(screen.wait_until_shown("  Leave"))
    assert "talker:1b" in shown
    assert "embedder" not in shown


def test_a_long_list_scrolls_on_a_small_screen(
    env: dict[str, str], tmp_path: Path, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TAGS, "models", [{"name": f"model-{i}:latest"} for i in range(50)])
    with terminal(env=env, cwd=tmp_path, columns=40, lines=8) as screen:
        screen.wait_for(TITLE)
        screen.send(DOWN * 30)
        screen.wait_for("❯ Chat with model-30:latest")
        assert len(screen.lines) <= 8
        screen.send(ENTER)
        screen.wait_for(PROMPT)
    assert fake.bodies("/api/show")[0]["model"] == "model-30:latest"


def test_a_dumb_terminal_takes_numbers(env: dict[str, str], tmp_path: Path, fake: FakeServer) -> None:
    with terminal(env={**env, "TERM": "dumb"}, cwd=tmp_path) as screen:
        screen.wait_for("2  Chat with thinker:1b")
        screen.wait_for("Number: ")
        screen.send("77\r")
        screen.wait_for("Number: ")
        screen.send("1\r")
        screen.wait_for(PROMPT)
        assert "\x1b" not in screen.raw
    assert fake.bodies("/api/show")[0]["model"] == "echo:latest"


def test_elsewhere_the_help_is_printed(puna: Cli, fake: FakeServer) -> None:
    done = puna()
    assert done.returncode == 2
    assert "Usage: puna [OPTIONS] COMMAND" in done.stdout + done.stderr
    assert "Run large language models" in done.stdout + done.stderr
    assert not fake.requests


def test_a_terminal_on_one_side_only_is_none(env: dict[str, str], tmp_path: Path) -> None:
    script = ["-c", "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-m', 'puna'], stdin=-3).returncode)"]
    with terminal(env=env, cwd=tmp_path, script=script) as screen:
        shown, status = screen.wait_for_end()
    assert status == 2
    assert "Usage: puna" in shown
