from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from puna.prompt.output import Thinking
from puna.prompt.thinking import Tags, ThinkingParser
from tests.unit.server.apis.test_native import HI, lines
from tests.unit.server.apis.test_openai import events
from tests.unit.server.live import Live


def parsed(text: str, cuts: list[int], prompt: str = "") -> tuple[str, str]:
    """Feed *text* in pieces; returns the thoughts and the answer."""
    parser = ThinkingParser(Tags(), prompt)
    bounds = [0, *sorted({min(cut, len(text)) for cut in cuts}), len(text)]
    parts = [part for begin, end in itertools.pairwise(bounds) for part in parser.feed(text[begin:end])]
    parts += parser.finish()
    assert all(part not in ("", Thinking("")) for part in parts)
    thoughts = "".join(part.text for part in parts if isinstance(part, Thinking))
    return thoughts, "".join(part for part in parts if isinstance(part, str))


CASES = [
    ("", "", "", ""),
    ("Hello", "", "", "Hello"),
    ("<think>why</think>because", "", "why", "because"),
    ("\n <think>\nwhy\n</think>\n\nbecause\n", "", "why\n", "because\n"),
    ("Hm <think>why</think>", "", "", "Hm <think>why</think>"),
    ("<think>never ends", "", "never ends", ""),
    ("<think>almost</thin", "", "almost</thin", ""),
    ("<think>a</thin b</think>c", "", "a</thin b", "c"),
    ("<thi", "", "", "<thi"),
    ("<think></think>c", "", "", "c"),
    ("  indented", "", "", "  indented"),
    ("why</think>because", "user\n<think>\n", "why", "because"),
    ("<think>a</think>b<think>c</think>", "", "a", "b<think>c</think>"),
]


@pytest.mark.parametrize(("text", "prompt", "thought", "answer"), CASES)
@given(cuts=st.lists(st.integers(0, 40)))
def test_the_parts_are_the_same_however_the_text_is_cut(
    text: str, prompt: str, thought: str, answer: str, cuts: list[int]
) -> None:
    assert parsed(text, cuts, prompt) == (thought, answer)


THINKS = "{{ range .Messages }}{{ if .Thinking }}<hm>{{ .Thinking }}</hm>{{ end }}[{{ .Content }}]{{ end }}"


def test_thinking_in_every_api(empty: Live) -> None:
    empty.add("thinker", template=THINKS, pieces=["<h", "m>w", "hy</", "hm> be", "cause"])
    with empty.running():
        *pieces, final = lines(empty.post("/api/chat", {"model": "thinker", "messages": HI}))
        assert [piece["message"] for piece in pieces] == [
            {"role": "assistant", "content": "", "thinking": "w"},
            {"role": "assistant", "content": "", "thinking": "hy"},
            {"role": "assistant", "content": "be"},
            {"role": "assistant", "content": "cause"},
        ]
        assert final["message"] == {"role": "assistant", "content": ""}
        whole = empty.post("/api/generate", {"model": "thinker", "prompt": "x", "stream": False, "think": "low"}).json()
        assert (whole["thinking"], whole["response"]) == ("why", "because")
        off = empty.post("/api/generate", {"model": "thinker", "prompt": "x", "stream": False, "think": False}).json()
        assert off["response"] == "<hm>why</hm> because"
        assert "thinking" not in off
        reply = empty.post("/v1/chat/completions", {"model": "thinker", "messages": HI}).json()
        assert reply["choices"][0]["message"] == {"role": "assistant", "content": "because", "reasoning": "why"}
        *chunks, _ = events(empty.post("/v1/chat/completions", {"model": "thinker", "messages": HI, "stream": True}))
        assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
            {"role": "assistant", "reasoning": "w"},
            {"reasoning": "hy"},
            {"content": "be"},
            {"content": "cause"},
            {},
        ]
        text = empty.post("/v1/completions", {"model": "thinker", "prompt": "x"}).json()["choices"][0]["text"]
        assert text == "because"
