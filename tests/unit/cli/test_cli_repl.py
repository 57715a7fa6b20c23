"""The interactive session on a pseudo-terminal, against the fake server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S
from tests.unit.api.fake_server import FakeServer
from tests.unit.cli.pty_driver import Screen, terminal

PROMPT = ">>> "
ENTER, CTRL_C, CTRL_D, CTRL_J = "\r", "\x03", "\x04", "\n"


@pytest.fixture
def env(fake: FakeServer, environment: dict[str, str]) -> dict[str, str]:
    return {**environment, "OLLAMA_HOST": fake.address.url}


@pytest.fixture
def repl(env: dict[str, str], tmp_path: Path) -> Iterator[Screen]:
    with terminal("run", "echo", env=env, cwd=tmp_path) as screen:
        screen.wait_for(PROMPT)
        yield screen


def said(fake: FakeServer) -> list[str]:
    """What was asked last, the whole conversation."""
    return [message["content"] for message in fake.bodies("/api/chat")[-1]["messages"]]


def test_a_conversation(repl: Screen, fake: FakeServer) -> None:
    assert [path for path, _ in fake.requests] == ["/api/show", "/api/generate"]
    repl.wait_for("Send a message (/? for help)")
    repl.send("hello" + ENTER)
    repl.wait_for("You said: hello")
    repl.wait_for(PROMPT)
    repl.send("again" + ENTER)
    repl.wait_for("You said: again")
    assert said(fake) == ["hello", "You said: hello", "again"]
    repl.wait_for(PROMPT)
    repl.send("/bye" + ENTER)
    assert repl.wait_for_end()[1] == 0


def test_several_lines(repl: Screen, fake: FakeServer) -> None:
    repl.send('"""first' + ENTER)
    repl.wait_for("... ")
    repl.send('second"""' + ENTER)
    repl.wait_for("You said: first\nsecond")
    assert said(fake) == ["first\nsecond"]
    repl.wait_for(PROMPT)
    repl.send("a" + CTRL_J + "b" + ENTER)
    repl.wait_for("You said: a\nb")
    repl.wait_for(PROMPT)
    repl.send("\x1b[200~pasted\r\ntext\x1b[201~" + ENTER)
    repl.wait_for("You said: pasted\ntext")
    repl.wait_for(PROMPT)


def test_options_of_the_command_line_hold_for_the_session(env: dict[str, str], tmp_path: Path, fake: FakeServer) -> None:
    with terminal("run", "-o", "seed=7", "echo", env=env, cwd=tmp_path) as repl:
        repl.wait_for(PROMPT)
        repl.send("hi" + ENTER)
        repl.wait_for("You said: hi")
    assert fake.bodies("/api/chat")[0]["options"] == {"seed": 7}


def test_ctrl_d_leaves(repl: Screen) -> None:
    repl.wait_for("Send a message (/? for help)")
    repl.send(CTRL_D)
    assert repl.wait_for_end()[1] == 0
    assert repl.lines[-1] == ">>>"  # what was only a hint does not stay on the screen


def test_ctrl_c_at_the_prompt_drops_the_line(repl: Screen, fake: FakeServer) -> None:
    repl.send("never sent" + CTRL_C)
    repl.wait_for("Use Ctrl + d or /bye to exit.")
    repl.wait_for(PROMPT)
    repl.send("sent" + ENTER)
    repl.wait_for("You said: sent")
    assert said(fake) == ["sent"]


def test_ctrl_c_stops_an_answer_and_keeps_the_session(env: dict[str, str], tmp_path: Path, fake: FakeServer) -> None:
    with terminal("run", "endless", env=env, cwd=tmp_path) as repl:
        repl.wait_for(PROMPT)
        repl.send("go" + ENTER)
        repl.wait_for("You said: go....")
        repl.send(CTRL_C)
        assert fake.cancelled.wait(PATIENCE_S)
        repl.wait_for(PROMPT)
        repl.send("/load echo" + ENTER)
        repl.wait_for("Loading model 'echo'")
        repl.wait_for(PROMPT)
        repl.send("still here" + ENTER)
        repl.wait_for("You said: still here")
        repl.wait_for(PROMPT)
        repl.send("/bye" + ENTER)
        assert repl.wait_for_end()[1] == 0


def test_what_is_typed_ahead_is_neither_shown_in_the_answer_nor_lost(
    env: dict[str, str], tmp_path: Path, fake: FakeServer
) -> None:
    with terminal("run", "slow", env=env, cwd=tmp_path) as repl:
        repl.wait_for(PROMPT)
        repl.send("go" + ENTER)
        repl.wait_for("You said: go..")
        repl.send("/set verbose" + ENTER)
        assert "/set" not in repl.wait_for(".\n")
        repl.wait_for("Set 'verbose' mode.")


def test_an_error_is_told_and_the_question_forgotten(env: dict[str, str], tmp_path: Path, fake: FakeServer) -> None:
    with terminal("run", "broken", env=env, cwd=tmp_path) as repl:
        repl.wait_for(PROMPT)
        repl.send("hi" + ENTER)
        repl.wait_for("Error: the model fell over")
        repl.wait_for(PROMPT)
        repl.send("there" + ENTER)
        repl.wait_for("Error: the model fell over")
        assert said(fake) == ["there"]


def test_words_are_wrapped_and_timings_told(env: dict[str, str], tmp_path: Path) -> None:
    with terminal("run", "--verbose", "wordy", "x", env=env, cwd=tmp_path) as screen:
        shown, status = screen.wait_for_end()
    lines = shown.splitlines()
    assert status == 0
    assert [line.rstrip() for line in lines[:4]] == [" ".join(["word"] * n) for n in (16, 16, 16, 12)]
    assert "eval rate:            50.00 tokens/s" in lines


def test_history_survives_the_session(env: dict[str, str], tmp_path: Path) -> None:
    with terminal("run", "echo", env=env, cwd=tmp_path) as repl:
        repl.wait_for(PROMPT)
        repl.send("remember me" + ENTER)
        repl.wait_for("You said: remember me")
        repl.wait_for(PROMPT)
        repl.send(CTRL_D)
        repl.wait_for_end()
    assert (tmp_path / ".ollama" / "history").read_text() == "remember me\n"
    with terminal("run", "echo", env=env, cwd=tmp_path) as repl:
        repl.wait_for("Send a message")
        repl.send("\x10" + ENTER)
        repl.wait_for("You said: remember me")


def test_no_history(env: dict[str, str], tmp_path: Path) -> None:
    with terminal("run", "echo", env={**env, "OLLAMA_NOHISTORY": "1"}, cwd=tmp_path) as repl:
        repl.wait_for(PROMPT)
        repl.send("secret" + ENTER)
        repl.wait_for("You said: secret")
    assert not (tmp_path / ".ollama").exists()


def test_embedding_models_do_not_talk(env: dict[str, str], tmp_path: Path) -> None:
    with terminal("run", "embedder", env=env, cwd=tmp_path) as screen:
        shown, status = screen.wait_for_end()
    assert status == 1
    assert 'Error: embedding models require input text. Usage: puna run embedder "your text here"' in shown
