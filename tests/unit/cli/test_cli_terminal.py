"""What a person sees: the screen of a terminal, of several kinds and sizes, against the fake server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S
from tests.unit.api.fake_server import FakeServer
from tests.unit.cli.pty_driver import Screen, drawn, terminal
from tests.unit.store.gguf_files import write_model

PROMPT = ">>> "
ENTER, CTRL_C, BACKSPACE, UP, DOWN, LEFT, HOME = "\r", "\x03", "\x7f", "\x1b[A", "\x1b[B", "\x1b[D", "\x1b[H"


@pytest.fixture
def env(fake: FakeServer, environment: dict[str, str]) -> dict[str, str]:
    return {**environment, "OLLAMA_HOST": fake.address.url}


@pytest.fixture
def repl(env: dict[str, str], tmp_path: Path) -> Iterator[Screen]:
    with terminal("run", "echo", env=env, cwd=tmp_path) as screen:
        screen.wait_for(PROMPT)
        yield screen


def asked(fake: FakeServer) -> list[str]:
    """What was said last to the model, of the person's part."""
    return [message["content"] for message in fake.bodies("/api/chat")[-1]["messages"] if message["role"] == "user"]


def test_an_answer_is_wrapped_to_the_size_that_the_terminal_has_now(
    env: dict[str, str], tmp_path: Path, fake: FakeServer
) -> None:
    with terminal("run", "pausing", env=env, cwd=tmp_path) as screen:
        screen.wait_for(PROMPT)
        words = " ".join(["word"] * 11)
        screen.send(words + ENTER)
        screen.wait_for(f"You said: {words}")
        screen.resize(40, 24)
        fake.resumed.set()
        screen.wait_for(PROMPT)
        text = screen.raw[screen.raw.rindex("You said: word") :]
    shown = drawn(text, 80)
    assert max(map(len, shown[1:])) < 40, shown


def test_the_prompt_is_drawn_anew_when_the_size_changes(repl: Screen, fake: FakeServer) -> None:
    repl.send("some words that fill a line")
    repl.wait_until_shown(">>> some words that fill a line")
    repl.resize(20, 24)
    repl.wait_until_shown(">>> some words that")
    repl.resize(100, 30)
    repl.send(" and more" + ENTER)
    repl.wait_for("You said: some words that fill a line and more")
    assert asked(fake) == ["some words that fill a line and more"]


def test_wide_characters_are_edited_and_wrapped_by_their_width(repl: Screen, fake: FakeServer) -> None:
    repl.send("日本語x" + LEFT + LEFT + BACKSPACE + "国" + ENTER)
    repl.wait_for("You said: 日国語x")
    repl.wait_for(PROMPT)
    text = "漢字" * 30
    repl.send(text + ENTER)
    repl.wait_for("You said: ")
    repl.wait_for(PROMPT)
    assert asked(fake) == ["日国語x", text]
    answer = repl.lines[repl.lines.index(next(line for line in repl.lines if line.startswith("You said: 漢"))) :][:2]
    assert "".join(line.replace(" ", "") for line in answer) == "Yousaid:" + text
    assert all(len(line) <= 80 for line in answer)


def test_history_goes_up_and_down(repl: Screen, fake: FakeServer) -> None:
    for text in ("first", "second"):
        repl.send(text + ENTER)
        repl.wait_for(f"You said: {text}")
        repl.wait_for(PROMPT)
    repl.send(UP + UP + ENTER)
    repl.wait_for("You said: first")
    repl.wait_for(PROMPT)
    repl.send(UP + UP + DOWN + ENTER)
    repl.wait_for("You said: first")
    assert asked(fake)[-2:] == ["first", "first"]


def test_a_paste_waits_for_enter_whatever_is_in_it(repl: Screen, fake: FakeServer) -> None:
    pasted = "def f():\n\treturn 1\n\n/bye\n"
    repl.send(f"\x1b[200~{pasted}\x1b[201~")
    repl.wait_for("/bye")
    assert not fake.bodies("/api/chat")
    repl.send(ENTER)
    repl.wait_for("You said: ")
    assert asked(fake) == [pasted.strip()]


def test_a_pasted_quotation_is_one_entry(repl: Screen, fake: FakeServer) -> None:
    repl.send('\x1b[200~"""one\ntwo"""\x1b[201~' + ENTER)
    repl.wait_for("You said: one")
    assert asked(fake) == ["one\ntwo"]


def test_ctrl_c_twice_at_the_prompt_leaves(repl: Screen) -> None:
    repl.send(CTRL_C)
    repl.wait_for("Use Ctrl + d or /bye to exit.")
    repl.wait_for(PROMPT)
    repl.send(CTRL_C)
    assert repl.wait_for_end()[1] == 0


def test_ctrl_c_and_again_after_something_else_does_not_leave(repl: Screen, fake: FakeServer) -> None:
    repl.send(CTRL_C)
    repl.wait_for("to exit.")
    repl.wait_for(PROMPT)
    repl.send("a thought" + CTRL_C)
    repl.wait_for("to exit.")
    repl.wait_for(PROMPT)
    repl.send("still" + ENTER)
    repl.wait_for("You said: still")
    repl.wait_for(PROMPT)
    repl.send(CTRL_C)
    repl.wait_for("to exit.")
    repl.wait_for(PROMPT)
    assert asked(fake) == ["still"]


def test_ctrl_c_during_an_answer_keeps_the_session_and_another_leaves(
    env: dict[str, str], tmp_path: Path, fake: FakeServer
) -> None:
    with terminal("run", "endless", env=env, cwd=tmp_path) as repl:
        repl.wait_for(PROMPT)
        repl.send("go" + ENTER)
        repl.wait_for("You said: go....")
        repl.send(CTRL_C)
        assert fake.cancelled.wait(PATIENCE_S)
        repl.wait_for(PROMPT)
        repl.send(CTRL_C)
        assert repl.wait_for_end()[1] == 0


@pytest.mark.parametrize("arguments", [["run", "thinker"], ["pull", "newcomer"], ["list"], ["--help"]])
def test_no_colour_where_none_is_wanted(env: dict[str, str], tmp_path: Path, arguments: list[str]) -> None:
    seen: set[str] = set()
    with terminal(*arguments, env={**env, "NO_COLOR": "1", "TERM": "xterm-256color"}, cwd=tmp_path) as screen:
        if arguments[0] == "run":
            screen.wait_for(PROMPT)
            screen.send("hi" + ENTER)
            screen.wait_for("You said: hi")
            screen.wait_for(PROMPT)
            screen.wait_until_shown(">>> Send a message (/? for help)")
            seen |= screen.colours
            screen.send("/bye" + ENTER)
        assert screen.wait_for_end()[1] == 0
        seen |= screen.colours
        assert not seen
        assert not coloured(screen.raw)


def coloured(raw: str) -> list[str]:
    """The escape sequences that set a colour, also such as was painted over since."""
    found = re.findall(r"\x1b\[([0-9;]*)m", raw)
    return [codes for codes in found if any(code[:1] in ("3", "4", "9") and len(code) > 1 for code in codes.split(";"))]


def test_thinking_is_grey_where_colours_are_wanted(env: dict[str, str], tmp_path: Path) -> None:
    with terminal("run", "thinker", "hi", env=env, cwd=tmp_path) as screen:
        screen.wait_for_end()
        assert screen.colours


@pytest.mark.parametrize("arguments", [["run", "thinker", "hi"], ["run", "wordy", "x"], ["pull", "newcomer"], ["create", "new"]])
def test_a_dumb_terminal_gets_text_and_nothing_else(env: dict[str, str], tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "Modelfile").write_text("FROM echo\n")
    with terminal(*arguments, env={**env, "TERM": "dumb"}, cwd=tmp_path) as screen:
        assert screen.wait_for_end()[1] == 0
        assert "\x1b" not in screen.raw


def test_a_conversation_on_a_dumb_terminal(env: dict[str, str], tmp_path: Path, fake: FakeServer) -> None:
    with terminal("run", "echo", env={**env, "TERM": "dumb"}, cwd=tmp_path) as repl:
        repl.wait_for(PROMPT)
        repl.send("hello" + ENTER)
        repl.wait_for("You said: hello")
        repl.wait_for(PROMPT)
        repl.send("/bye" + ENTER)
        assert repl.wait_for_end()[1] == 0
        assert "\x1b" not in repl.raw
    assert asked(fake) == ["hello"]


def test_a_pull_draws_bars_and_leaves_the_last_state(env: dict[str, str], tmp_path: Path) -> None:
    with terminal("pull", "newcomer", env=env, cwd=tmp_path) as screen:
        assert screen.wait_for_end()[1] == 0
        shown = screen.lines
    assert shown[0] == "pulling manifest"
    assert any(line.startswith("pulling 0123456789ab") and "100%" in line and "━" in line for line in shown)
    assert "success" in shown


def test_a_creation_draws_bars(env: dict[str, str], tmp_path: Path, fake: FakeServer) -> None:
    write_model(tmp_path / "tiny.gguf")
    (tmp_path / "Modelfile").write_text("FROM ./tiny.gguf\n")
    with terminal("create", "new", env=env, cwd=tmp_path) as screen:
        shown, status = screen.wait_for_end()
    assert status == 0, shown
    assert any(line.startswith("hashing tiny.gguf") and "100%" in line for line in screen.lines), screen.lines
    assert len(fake.blobs) == 1


def test_interrupting_a_pull_says_so_with_the_status_of_interrupts(env: dict[str, str], tmp_path: Path) -> None:
    with terminal("pull", "stuck", env=env, cwd=tmp_path) as screen:
        screen.wait_for("pulling manifest")
        screen.send(CTRL_C)
        shown, status = screen.wait_for_end()
    assert status == 130
    assert "Traceback" not in shown
