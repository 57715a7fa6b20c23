"""A conversation whose last message is the assistant's is continued: the prompt ends with that text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from puna.errors import BadRequest
from puna.prompt.ending import Ending, answer_prefix_of, ending_of
from puna.prompt.exchange import PromptRequest, Source
from puna.prompt.output import Thinking, joined
from puna.prompt.output_format import OutputFormat
from puna.prompt.render import render
from puna.prompt.thinking import Tags
from tests.unit.prompt import chat_templates as t
from tests.unit.prompt.test_families import HARMONY

THINKS_FIRST = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] | trim }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)
"""As DeepSeek-R1's: thoughts are cut from what was said, and an answer begins with one."""

CLOSES_GO = "{{ range .Messages }}<{{ .Role }}>{{ .Content }}<end>{{ end }}<assistant>"
REFUSES = "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}" + t.CHATML_JINJA
SHOUTS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | upper }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)

BEGUN: dict[str, Any] = {"role": "assistant", "content": "The sky is "}
TEMPLATES = {
    "chatml": (Source("", t.CHATML_JINJA), "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nThe sky is "),
    "none": (Source(has_im_start=True), "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nThe sky is "),
    "plain": (Source(), "user: Hi\n\nassistant: The sky is "),
    "llama3": (Source("", t.LLAMA3_JINJA), "<|start_header_id|>assistant<|end_header_id|>\n\nThe sky is "),
    "gemma": (Source("", t.GEMMA_JINJA), "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nThe sky is "),
    "mistral": (Source("", t.MISTRAL_JINJA), "[INST] Hi [/INST]The sky is "),
    "harmony": (Source("", HARMONY), "<|start|>assistant<|channel|>final<|message|>The sky is "),
    "go": (Source(t.CHATML_GO), "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nThe sky is "),
    "go by turns": (Source(t.CHATML_TURN_GO), "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nThe sky is "),
    "go that closes": (
        Source("{{ range .Messages }}<{{ .Role }}>{{ .Content }}<end>{{ end }}<assistant>"),
        "<assistant>The sky is ",
    ),
    "cuts thoughts": (Source("", THINKS_FIRST), "<user>Hi<end><assistant>The sky is "),
    "refuses": (Source("", REFUSES), "<|im_start|>assistant\nThe sky is "),
    "rewrites": (Source("", SHOUTS), "<user>HI<assistant>The sky is "),
}


def prompt(source: Source, messages: list[dict[str, Any]], **more: Any) -> str:
    ending = more.pop("ending", None) or ending_of(messages)
    return render(PromptRequest(source, messages, ending=ending, **more)).text


@pytest.mark.parametrize(("source", "end"), TEMPLATES.values(), ids=TEMPLATES)
def test_the_prompt_ends_with_what_was_said(source: Source, end: str) -> None:
    found = prompt(source, [t.USER, BEGUN])
    assert found.endswith(end)
    assert found.count("The sky is") == 1


@pytest.mark.parametrize(("source", "end"), TEMPLATES.values(), ids=TEMPLATES)
@given(text=st.text(min_size=1))
def test_whatever_was_said(source: Source, end: str, text: str) -> None:
    found = prompt(source, [t.USER, {"role": "assistant", "content": text}])
    assert found.endswith(text.lstrip())


def test_a_thought_that_the_template_opens_is_closed() -> None:
    said = {"role": "assistant", "content": "<think>x</think>So", "thinking": ""}
    assert prompt(Source("", THINKS_FIRST), [t.USER, said]).endswith("<think>\n\n</think>\n\n<think>x</think>So")
    refuses = "{% if not add_generation_prompt %}{{ raise_exception('no') }}{% endif %}{{ '<think>\\n' }}"
    assert prompt(Source("", refuses), [t.USER, {**BEGUN, "thinking": "Blue?"}]) == "<think>\nBlue?\n</think>\n\nThe sky is "


def test_a_thought_is_continued_too() -> None:
    thought = {"role": "assistant", "content": "", "thinking": "Let me"}
    assert prompt(Source("", THINKS_FIRST), [t.USER, thought]) == "<user>Hi<end><assistant><think>\nLet me"
    assert prompt(Source("", t.CHATML_JINJA), [t.USER, thought]).endswith("<|im_start|>assistant\n<think>\nLet me")
    assert prompt(Source("", HARMONY), [t.USER, thought]).endswith("<|start|>assistant<|channel|>analysis<|message|>Let me")


def test_an_empty_answer_is_a_new_one() -> None:
    empty = {"role": "assistant", "content": ""}
    assert prompt(Source("", t.CHATML_JINJA), [t.USER, empty]) == prompt(Source("", t.CHATML_JINJA), [t.USER])


def test_a_call_is_not_continued() -> None:
    assert ending_of([t.USER, t.CALL]) is Ending.ANSWER
    assert ending_of([t.USER, t.CALL, t.RESULT]) is Ending.ANSWER


@pytest.mark.parametrize(
    ("begins", "continues", "ending"),
    [
        (None, None, Ending.CONTINUE),
        (True, None, Ending.ANSWER),
        (False, None, Ending.NOTHING),
        (None, True, Ending.CONTINUE),
        (False, True, Ending.CONTINUE),
        (None, False, Ending.ANSWER),
        (False, False, Ending.NOTHING),
        (True, False, Ending.ANSWER),
    ],
)
def test_what_a_client_may_ask_for(begins: bool | None, continues: bool | None, ending: Ending) -> None:
    assert ending_of([t.USER, BEGUN], add_generation_prompt=begins, continue_final_message=continues) is ending


def test_what_nobody_can_ask_for() -> None:
    with pytest.raises(BadRequest, match="exclude each other"):
        ending_of([t.USER, BEGUN], add_generation_prompt=True, continue_final_message=True)
    for messages in ([], [t.USER, t.CALL]):
        with pytest.raises(BadRequest, match="no message"):
            ending_of(messages, continue_final_message=True)
    for ending in (Ending.NOTHING, Ending.ANSWER):
        with pytest.raises(BadRequest, match="add_generation_prompt"):
            prompt(Source(t.CHATML_TURN_GO), [t.USER, BEGUN], ending=ending)


def test_a_users_message_can_be_continued_and_an_answer_closed() -> None:
    source = Source("", t.CHATML_JINJA)
    assert prompt(source, [{"role": "user", "content": "How are"}], ending=Ending.CONTINUE).endswith("<|im_start|>user\nHow are")
    assert prompt(source, [t.USER], ending=Ending.NOTHING).endswith("Hi<|im_end|>\n")
    assert prompt(source, [t.USER, BEGUN], ending=Ending.ANSWER).endswith("The sky is <|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("last", "output", "expected"),
    [
        (BEGUN, " blue<think>", [" blue<think>"]),
        ({"role": "assistant", "content": "<think>Let"}, " me</think>\nBlue", [Thinking(" me"), "Blue"]),
        ({"role": "assistant", "content": "", "thinking": "Let"}, " me</think>Blue", [Thinking(" me"), "Blue"]),
        ({"role": "assistant", "content": "<think>x</think>So"}, " blue", [" blue"]),
    ],
)
def test_what_follows_is_read_as_what_was_begun(last: dict[str, Any], output: str, expected: list[Any]) -> None:
    begun = answer_prefix_of([t.USER, last], Ending.CONTINUE, Tags())
    for cut in range(len(output)):
        parser = OutputFormat.of("", "<think>").parser("<think>", think=True, tools=[], answer_prefix=begun)
        assert parser is not None
        assert joined([*parser.feed(output[:cut]), *parser.feed(output[cut:]), *parser.finish()]) == expected
