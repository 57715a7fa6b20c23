"""The renderers that a Modelfile may name: golden prompts, and what all of them promise.

The renderers of Cogito, DeepSeek V3.1 (without tools), Nemotron 3 Nano and Gemma 4 (text alone) were compared with the published
templates, through Jinja, over 800 random conversations. The goldens of the others, and of DeepSeek's tools, are written from what
is known of these templates and of Ollama's renderers; no template was rendered for them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from puna.errors import BadRequest
from puna.prompt.ending import Ending, ending_of
from puna.prompt.exchange import PromptRequest, Source
from puna.prompt.families.registry import FAMILIES
from puna.prompt.parsers import PARSERS
from puna.prompt.render import render
from tests.unit.prompt import chat_templates as t

GOLDENS = Path(__file__).parent / "goldens"
ARGUMENTS = {"city": "Oslo", "days": [1, 2], "exact": True}
CALLS: dict[str, Any] = {
    "role": "assistant",
    "content": "Let me see.",
    "thinking": "Rain?",
    "tool_calls": [
        {"id": "c1", "function": {"name": "weather", "arguments": ARGUMENTS}},
        {"id": "c2", "function": {"name": "weather", "arguments": {}}},
    ],
}
RESULTS = [
    {"role": "tool", "tool_name": "weather", "tool_call_id": "c1", "content": "rain"},
    {"role": "tool", "tool_name": "weather", "tool_call_id": "c2", "content": "sun"},
]
OLD_THOUGHT = {**t.ASSISTANT, "thinking": "Greet."}
BEGUN: dict[str, Any] = {"role": "assistant", "content": "The sky is"}
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]], bool]] = {
    "tools": ([t.SYSTEM, t.USER, CALLS, *RESULTS], [t.WEATHER], True),
    "called": ([t.USER, CALLS, *RESULTS, OLD_THOUGHT, t.AGAIN], [t.WEATHER], False),
    "plain": ([t.USER, OLD_THOUGHT, t.AGAIN], [], True),
    "begun": ([t.SYSTEM, t.USER, BEGUN], [], False),
}


def prompt(name: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, think: bool) -> str:
    asked = think if FAMILIES[name].can_think else None
    return render(PromptRequest(Source(renderer=name), messages, tools, asked, ending_of(messages))).text


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_golden_prompts(name: str, conversation: str) -> None:
    messages, tools, think = CONVERSATIONS[conversation]
    with (GOLDENS / f"{name}.{conversation}.txt").open(newline="") as file:
        assert prompt(name, messages, tools, think=think) == file.read()


def test_every_golden_is_of_a_renderer() -> None:
    assert {path.name for path in GOLDENS.iterdir()} == {f"{name}.{one}.txt" for name in FAMILIES for one in CONVERSATIONS}


@pytest.mark.parametrize("name", FAMILIES)
@given(text=st.text(min_size=1).filter(lambda text: text.strip()))
def test_an_answer_that_was_begun_is_continued(name: str, text: str) -> None:
    assert prompt(name, [t.USER, {"role": "assistant", "content": text}], [], think=False).endswith(text.lstrip())


ROLES = st.sampled_from(["system", "user", "assistant", "tool", "developer"])
TEXTS = st.text(max_size=12)
MESSAGES = st.fixed_dictionaries(
    {"role": ROLES, "content": TEXTS},
    optional={
        "thinking": TEXTS,
        "tool_name": TEXTS,
        "tool_call_id": TEXTS,
        "tool_calls": st.lists(
            st.fixed_dictionaries(
                {"id": TEXTS, "function": st.fixed_dictionaries({"name": TEXTS, "arguments": st.dictionaries(TEXTS, TEXTS)})}
            ),
            max_size=2,
        ),
    },
)


@pytest.mark.parametrize("name", FAMILIES)
@given(messages=st.lists(MESSAGES, max_size=5), think=st.booleans(), ending=st.sampled_from([Ending.ANSWER, Ending.NOTHING]))
def test_no_conversation_is_an_error(name: str, messages: list[dict[str, Any]], think: bool, ending: Ending) -> None:
    request = PromptRequest(Source(renderer=name), messages, [t.WEATHER], think, ending)
    assert isinstance(render(request).text, str)


@pytest.mark.parametrize("name", FAMILIES)
def test_tools_reach_the_prompt_where_the_family_knows_them(name: str) -> None:
    assert ("weather" in prompt(name, [t.USER], [t.WEATHER], think=False)) is FAMILIES[name].has_tools
    assert FAMILIES[name].parser in PARSERS


def test_an_unknown_renderer_is_named() -> None:
    with pytest.raises(BadRequest, match='unknown renderer "nobody"'):
        render(PromptRequest(Source(renderer="nobody"), [t.USER]))


def test_a_suffix_has_no_place() -> None:
    with pytest.raises(BadRequest, match="does not support insert"):
        render(PromptRequest(Source(renderer="qwen3-coder"), prefix="a", suffix="b"))


@pytest.mark.parametrize("name", ["gemma4", "functiongemma"])
def test_results_belong_to_the_call_they_name(name: str) -> None:
    calls = [{"id": i, "function": {"name": f"f_{i}", "arguments": {}}} for i in ("a", "b")]
    turned = [{"role": "tool", "tool_call_id": i, "content": i} for i in ("b", "a")]
    found = prompt(name, [t.USER, {"role": "assistant", "content": "", "tool_calls": calls}, *turned], [], think=False)
    assert -1 < found.find("response:f_b") < found.find("response:f_a")
