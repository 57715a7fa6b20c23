"""What reaches a terminal or a pipe, without a server."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.patience import PATIENCE_S

from puna.cli import progress
from puna.cli.answer import AnswerWriter, timings
from puna.cli.table import table
from puna.cli.terminal import printable, text_width
from puna.cli.think import parse_think
from puna.cli.word_wrap import WordWrap
from puna.errors import BadRequest


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen(output: str) -> list[str]:
    """The lines a terminal shows after *output*; the wrap moves its cursor only to take back the end of a line."""
    lines = [""]
    for token in re.findall(r"\x1b\[\d+D\x1b\[K|.|\n", output):
        if token == "\n":
            lines.append("")
        elif token.startswith("\x1b"):
            left = text_width(lines[-1]) - int(token[2 : token.index("D")])
            while text_width(lines[-1]) > left:
                lines[-1] = lines[-1][:-1]
        else:
            lines[-1] += token
    return lines


def wrapped(pieces: list[str], width: int) -> list[str]:
    wrap = WordWrap(lambda: width)
    return screen("".join(wrap.feed(piece) for piece in pieces))


def test_words_move_to_the_next_line_whole() -> None:
    assert wrapped(["The quick bro", "wn fox jum", "ps"], 16) == ["The quick brown", "fox jumps"]
    assert wrapped(list("The quick brown fox jumps"), 16) == ["The quick brown", "fox jumps"]


def test_a_word_longer_than_the_line_is_cut() -> None:
    assert wrapped(["abcdefghijkl"], 6) == ["abcde", "fghij", "kl"]


def test_east_asian_text_breaks_anywhere_by_its_width() -> None:
    assert wrapped(["日本語の文章"], 7) == ["日本語", "の文章"]


def test_line_ends_of_the_text_stay() -> None:
    assert wrapped(["a\n\nb\tc"], 40) == ["a", "", "b        c"]


@given(st.lists(st.text(alphabet="ab 語\n", max_size=12)), st.integers(4, 30))
def test_wrapping_keeps_the_text_and_the_width(pieces: list[str], width: int) -> None:
    shown = wrapped(pieces, width)
    assert all(text_width(line) < width for line in shown)
    assert "".join("".join(shown).split()) == "".join("".join(pieces).split())


def test_escape_sequences_do_not_reach_a_terminal() -> None:
    assert printable("a\x1b[31mb\x07\x9bc\r\n\td") == "a[31mbc\n\td"
    out = Terminal()
    writer = AnswerWriter(out)
    writer.content("x\x1b]0;title\x07y")
    assert out.getvalue() == "x]0;titley"


def test_pipes_get_the_text_as_it_is() -> None:
    out = io.StringIO()
    writer = AnswerWriter(out)
    writer.content("x\x1b[31my")
    writer.finish()
    assert out.getvalue() == "x\x1b[31my\n"


def test_thinking_is_grey_on_a_terminal() -> None:
    out = Terminal()
    writer = AnswerWriter(out, word_wrap=False)
    writer.thinking("hm\n")
    writer.content("yes")
    writer.finish()
    grey = "\x1b[90m{}\x1b[0m".format
    assert out.getvalue() == grey("Thinking...\n") + grey("hm\n") + grey("...done thinking.\n\n") + "yes\n\n"


def test_thinking_without_an_answer_is_closed() -> None:
    out = io.StringIO()
    writer = AnswerWriter(out)
    writer.thinking("hm")
    writer.finish()
    assert out.getvalue() == "Thinking...\nhm\n...done thinking.\n\n"


def test_calls_of_tools_are_told() -> None:
    out = io.StringIO()
    AnswerWriter(out).tool_calls([{"function": {"name": "f", "arguments": {"a": 1}}}])
    assert out.getvalue() == "  Model called a non-existent function 'f()' with arguments: {\"a\": 1}\n"


def test_timings_leave_out_what_is_zero() -> None:
    assert timings({"total_duration": 5_000_000, "eval_count": 0}) == "total duration:       5ms\n"
    assert timings({}) == ""


def test_tables_align_wide_characters_and_end_without_spaces() -> None:
    assert table([("a", "b"), ("日本", "c"), ("x", "")], indent=" ") == " a       b\n 日本    c\n x\n"


def test_bars_are_drawn_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    err = Terminal()
    monkeypatch.setattr(sys, "stderr", err)
    progress.follow(
        [
            {"status": "pulling [manifest]"},
            {"status": "pulling 0123456789ab", "digest": "sha256:0123456789ab"},
            {"status": "pulling 0123456789ab", "total": 2_000_000, "completed": 1_000_000},
            {"status": "pulling 0123456789ab", "total": 2_000_000, "completed": 2_000_000},
            {"status": "success"},
        ]
    )
    shown = err.getvalue()
    assert "pulling [manifest]" in shown
    assert re.search(r"pulling 0123456789ab.*100% ━+ 2 MB/2 MB", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown))
    assert shown.count("success") == 1


@pytest.mark.parametrize("status", ["pulling 0123456789ab", "hashing " + "a-long-name-" * 9 + ".gguf", "写入" * 40])
@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_a_bar_fits_its_line(status: str, width: int) -> None:
    """What is least needed goes first; how far it is stays."""
    line = progress.fitted(status, 1_500_000_000, 3_000_000_000, 50_000_000.0, 30.0, width)
    assert text_width(line) <= width
    assert " 50%" in line
    if width >= 80:
        assert all(part in line for part in ("50 MB/s", "00:30", "━╌"))
    assert progress.fitted("x", 1, 2, 0.0, 0.0, 80).endswith("1 B/2 B")


def test_lines_tell_rate_and_time_left_once_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere than on a terminal: one line for each tenth of a layer."""
    now = 100.0
    err = io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def events() -> Iterator[dict[str, Any]]:
        nonlocal now
        for megabyte in range(101):
            yield {
                "status": "pulling 0123456789ab",
                "digest": "sha256:x",
                "total": 100_000_000,
                "completed": megabyte * 1_000_000,
            }
            now += 0.2

    progress.follow(events())
    lines = err.getvalue().splitlines()
    assert len(lines) == 11
    assert lines[0] == "pulling 0123456789ab: 0% (0 B of 100 MB)"
    assert lines[5] == "pulling 0123456789ab: 50% (50 MB of 100 MB, 5 MB/s, 10 seconds left)"
    assert lines[10] == "pulling 0123456789ab: 100% (100 MB of 100 MB, 5 MB/s)"


def test_a_short_wait_shows_no_spinner(monkeypatch: pytest.MonkeyPatch) -> None:
    err = Terminal()
    monkeypatch.setattr(sys, "stderr", err)
    with progress.Spinner("loading"):
        pass
    assert err.getvalue() == ""


def test_a_long_wait_shows_one_and_takes_it_away(monkeypatch: pytest.MonkeyPatch) -> None:
    err = Terminal()
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(progress, "_SPINNER_DELAY_S", 0.0)
    with progress.Spinner("loading") as spinner:
        spinner._timer.join(PATIENCE_S)
    assert "loading" in err.getvalue()
    assert err.getvalue().endswith("\x1b[2K")  # the line is erased


@pytest.mark.parametrize(("text", "value"), [("", True), ("true", True), ("false", False), ("max", "max")])
def test_think(text: str, value: bool | str) -> None:
    assert parse_think(text) == value


def test_think_is_checked() -> None:
    with pytest.raises(BadRequest, match="invalid value for --think"):
        parse_think("no")
