from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from puna.prompt.harmony import HarmonyParser, is_harmony, is_within_message
from puna.prompt.output import Call, Part, Thinking, joined
from puna.prompt.tools.calls import Tools

TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "weather"}}]
PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
OSLO = Call("weather", {"city": "Oslo"})


def parsed(text: str, cuts: list[int], prompt: str = PROMPT, *, think: bool = True) -> list[Part]:
    parser = HarmonyParser(prompt, Tools(TOOLS), shows_thinking=think)
    bounds = [0, *sorted({min(cut, len(text)) for cut in cuts}), len(text)]
    parts = [part for begin, end in itertools.pairwise(bounds) for part in parser.feed(text[begin:end])]
    return joined(parts + parser.finish())


ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|>"
CASES: list[tuple[str, str, list[Part]]] = [
    (PROMPT, "", []),
    (PROMPT, f"{ANALYSIS}<|start|>assistant<|channel|>final<|message|>Hello", [Thinking("Hm."), "Hello"]),
    (PROMPT, "<|channel|>final<|message|>a <b> <|c", ["a <b> <|c"]),
    (
        PROMPT,
        f'{ANALYSIS}<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{{"city": "Oslo"}}',
        [Thinking("Hm."), OSLO],
    ),
    (PROMPT, ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>', [OSLO]),
    (
        PROMPT,
        '<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.weather<|channel|>commentary'
        '<|message|>{"city": "Oslo"}<|call|>',
        ["I look.", OSLO],
    ),
    (PROMPT, "<|channel|>commentary to=functions.weather<|message|>not json<|call|>", ["not json"]),
    (PROMPT, "<|channel|>commentary to=functions.other<|message|>{}<|call|>", ["{}"]),
    (PROMPT, "Plain words.", ["Plain words."]),
    (PROMPT, "asparagus", ["asparagus"]),
    (PROMPT, "<|channel|>analysis", []),
    (PROMPT + "<|channel|>final<|message|>He", "llo", ["llo"]),
    ("", "Hello", ["Hello"]),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "text", "expected"), CASES)
@settings(max_examples=25)
@given(cuts=st.lists(st.integers(0, 160), max_size=12))
def test_the_parts_are_the_same_however_the_text_is_cut(prompt: str, text: str, expected: list[Part], cuts: list[int]) -> None:
    assert parsed(text, cuts, prompt) == expected
    assert parsed(text, list(range(len(text))), prompt) == expected


def test_thoughts_can_be_left_out() -> None:
    assert parsed(f"{ANALYSIS}<|start|>assistant<|channel|>final<|message|>Hi", [], think=False) == ["Hi"]


FRAGMENTS = st.sampled_from(
    ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "analysis", "final", " to=functions.weather", "assistant", "{", '"', "x", "<|", " "]  # noqa: E501
)  # fmt: skip


@example(text="<|<|message|>", cuts=[3])
@example(text="assis<|message|>x", cuts=[6])
@given(text=st.lists(FRAGMENTS, max_size=12).map("".join), cuts=st.lists(st.integers(0, 120), max_size=8))
def test_no_output_is_an_error(text: str, cuts: list[int]) -> None:
    assert parsed(text, cuts) == parsed(text, [])


def test_templates_that_speak_harmony() -> None:
    assert is_harmony("<|start|>{{ role }}<|channel|>final<|message|>")
    assert not is_harmony("<|start|>{{ role }}<|message|>")


@pytest.mark.parametrize(
    ("prompt", "is_within"),
    [
        ("<|start|>user<|message|>Hi<|end|><|start|>assistant", False),
        ("<|start|>assistant<|channel|>final", False),
        ("<|start|>assistant<|channel|>final<|message|>", True),
        ("<|start|>assistant<|channel|>final<|message|>The sky is", True),
        ("", False),
    ],
)
def test_whether_a_prompt_has_begun_a_message(prompt: str, is_within: bool) -> None:
    """A grammar is about the message: its header must not be written twice."""
    assert is_within_message(prompt) is is_within
