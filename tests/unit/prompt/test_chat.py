"""Golden prompts of well-known chat formats through their Jinja templates."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from puna.errors import TemplateError
from puna.prompt.chat import CHATML, PLAIN, merge_system, render_chat
from tests.unit.prompt import chat_templates as t

GOLDEN: dict[str, tuple[str, str]] = {
    "chatml": (
        t.CHATML_JINJA,
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "llama3": (
        t.LLAMA3_JINJA,
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral": (t.MISTRAL_JINJA, "<s>[INST] Be brief.\n\nHi [/INST]Hello</s>[INST] Why? [/INST]"),
    "gemma": (
        t.GEMMA_JINJA,
        "<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
        "<start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n",
    ),
    "phi-3": (
        t.PHI3_JINJA,
        "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nHello<|end|>\n<|user|>\nWhy?<|end|>\n<|assistant|>\n",
    ),
    "zephyr": (
        t.ZEPHYR_JINJA,
        "<|system|>\nBe brief.</s>\n<|user|>\nHi</s>\n<|assistant|>\nHello</s>\n<|user|>\nWhy?</s>\n<|assistant|>\n",
    ),
    "built-in chatml": (
        CHATML,
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "built-in plain": (PLAIN, "system: Be brief.\n\nuser: Hi\n\nassistant: Hello\n\nuser: Why?\n\nassistant:"),
}


def rendered(template: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    return render_chat(template, messages, bos_token="<s>", eos_token="</s>", **kwargs)


@pytest.mark.parametrize(("template", "prompt"), GOLDEN.values(), ids=GOLDEN.keys())
def test_golden_conversations(template: str, prompt: str) -> None:
    assert rendered(template, t.CONVERSATION) == prompt


def test_without_generation_prompt() -> None:
    assert rendered(t.PHI3_JINJA, [t.USER], add_generation_prompt=False) == "<|user|>\nHi<|end|>\n</s>"


def test_a_refusal_that_is_not_about_the_system_text() -> None:
    with pytest.raises(TemplateError, match="refuses these messages: Conversation roles must alternate"):
        rendered(t.MISTRAL_JINJA, [t.USER, t.USER])


def test_the_first_refusal_is_reported_when_merging_does_not_help() -> None:
    template = "{{ raise_exception('no ' + messages[0].role) }}"
    with pytest.raises(TemplateError, match="no system"):
        rendered(template, [t.SYSTEM, t.USER])


def test_system_text_that_the_template_forgets_is_merged() -> None:
    template = "{% for m in messages if m.role != 'system' %}{{ m.role }}={{ m.content }};{% endfor %}"
    assert rendered(template, [t.SYSTEM, t.USER]) == "user=Be brief.\n\nHi;"


def test_system_text_without_a_user_message_stays_where_it_is() -> None:
    assert rendered(PLAIN, [t.SYSTEM]) == "system: Be brief.\n\nassistant:"


def test_merging_collects_all_system_text() -> None:
    late = {"role": "system", "content": "In French."}
    merged = merge_system([t.SYSTEM, t.USER, late])
    assert merged == [{"role": "user", "content": "Be brief.\n\nIn French.\n\nHi"}]
    assert t.USER["content"] == "Hi"
    assert merge_system([t.USER]) is None
    assert merge_system([{"role": "system", "content": [{"type": "text", "text": "x"}]}, t.USER]) is None


def test_tools_calls_and_results() -> None:
    prompt = rendered(t.TOOLS_JINJA, [t.USER, t.CALL, t.RESULT], tools=[t.WEATHER])
    assert prompt.startswith(
        '<|im_start|>system\n{"type": "function", "function": {"name": "weather", "description": "Now & <here>"'
    )
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Oslo", "at": "noon"}}</tool_call><|im_end|>' in prompt
    assert prompt.endswith("<|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\n")


def test_arguments_as_json_text_become_an_object() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}
    assert '"arguments": {"a": 1}}' in rendered(t.TOOLS_JINJA, [t.USER, call])


def test_thinking_reaches_the_template() -> None:
    message = {"role": "assistant", "content": "4", "thinking": "2 and 2"}
    assert "<think>2 and 2</think>4" in rendered(t.TOOLS_JINJA, [t.USER, message])
    assert rendered(t.TOOLS_JINJA, [t.USER], enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert rendered(t.TOOLS_JINJA, [t.USER]).endswith("<|im_start|>assistant\n")


def test_no_content_is_empty_content() -> None:
    assert rendered(PLAIN, [{"role": "user", "content": None}]) == "user: \n\nassistant:"


def test_content_in_parts_is_left_to_the_template() -> None:
    template = "{% for part in messages[0].content %}{{ part.type }}:{{ part.text }}{% endfor %}"
    assert rendered(template, [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]) == "text:Hi"


LIKE_LLAMA = (
    "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}Today Date: {{ date_string }}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
"""As Llama 3.3's: it takes the date from whoever renders it, and else writes one of 2024."""

LIKE_FIREFUNCTION = (
    "{% for m in messages %}{{ (m.role | upper) ~ ': ' ~ m.content }}{% endfor %} Today is {{ datetime }}. "
    "{% if functions %}{{ '[' ~ functions | trim ~ ']' }}{% else %}none{% endif %}"
)
"""As firefunction-v2's: tools come as text under another name, and so does the moment."""

LIKE_R1_DISTILL = (
    "{% set ns = namespace(first=true) %}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<U>' + m['content'] }}{% endif %}"
    "{% if m['role'] == 'assistant' and m['tool_calls'] %}{% for tool in m['tool_calls'] %}"
    "{{ '<A><call>' + tool['type'] + '<sep>' + tool['function']['name'] + '\\n' + tool['function']['arguments'] + '</call>' }}"
    "{% endfor %}<end>{% endif %}"
    "{% if m['role'] == 'assistant' and m['content'] is not none %}{{ '<A>' + m['content'] + '<end>' }}{% endif %}"
    "{% if m['role'] == 'tool' %}{{ '<out>' + m['content'] + '</out>' }}{% endif %}{% endfor %}"
)
"""As the distillations of DeepSeek-R1: arguments are text, and a call alone has no text at all."""


def test_today_for_templates_that_ask_whoever_renders_them() -> None:
    today = datetime.now().strftime("%d %b %Y")
    assert rendered(LIKE_LLAMA, [{"role": "user", "content": ""}]) == f"Today Date: {today}"
    now = "{{ strftime_now('%d %b %Y') if strftime_now is defined else 'never' }}"
    assert rendered(now, [{"role": "user", "content": ""}]) == today


def test_tools_for_templates_that_call_them_functions() -> None:
    prompt = rendered(LIKE_FIREFUNCTION, [{"role": "user", "content": "Hi"}], tools=[t.WEATHER])
    moment, _, functions = prompt.removeprefix("USER: Hi Today is ").partition(". ")
    assert datetime.strptime(moment, "%b %d %Y %H:%M:%S GMT").year >= 2024
    assert json.loads(functions.removeprefix("[").removesuffix("]")) == [t.WEATHER]
    assert rendered(LIKE_FIREFUNCTION, [{"role": "user", "content": "Hi"}]).endswith("none")


def test_calls_for_templates_that_want_them_as_text_and_alone() -> None:
    prompt = rendered(LIKE_R1_DISTILL, [t.USER, t.CALL, t.RESULT], tools=[t.WEATHER])
    call = '<A><call>function<sep>weather\n{"city": "Oslo", "at": "noon"}</call><end>'
    assert prompt == f"<U>Hi{call}<out>rain</out>"
    said = {**t.CALL, "content": "Let me see."}
    assert rendered(LIKE_R1_DISTILL, [said]).endswith(f"{call}<A>Let me see.<end>")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("", '{"b": "é<", "a": [1, {}]}'),
        ("indent=2", '{\n  "b": "é<",\n  "a": [\n    1,\n    {}\n  ]\n}'),
        ("ensure_ascii=True", '{"b": "\\u00e9<", "a": [1, {}]}'),
        ("sort_keys=True", '{"a": [1, {}], "b": "é<"}'),
        ("separators=(',', ':')", '{"b":"é<","a":[1,{}]}'),
    ],
)
def test_json_as_the_hub_writes_it(options: str, text: str) -> None:
    template = "{{ documents_ | tojson(" + options + ") }}"
    assert rendered(template, [t.USER], documents_={"b": "é<", "a": [1, {}]}) == text
