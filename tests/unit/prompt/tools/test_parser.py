from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.api import go_json
from puna.prompt.output import Call, Part, joined
from puna.prompt.tools.calls import Tools
from puna.prompt.tools.marks import marks_in
from puna.prompt.tools.parser import ToolParser

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    },
    {"type": "function", "function": {"name": "get_time"}},
    {"type": "function", "function": {"name": "ns.find"}},
]
OSLO = Call("weather", {"city": "Oslo"})
TIME = Call("get_time", {})
ALL_MARKS = " ".join(
    [
        "<tool_call>",
        "<TOOLCALL>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        "<|tool_call|>",
        "<|tool_call_start|>",
        "<|START_ACTION|>",
        "functools[",
        "<｜tool▁calls▁begin｜>",
        "<|tool_calls_section_begin|>",
        "<tool_calls>",
        "<function_calls>",
    ]
)


def parsed(text: str, cuts: list[int], template: str = ALL_MARKS) -> list[Part]:
    parser = ToolParser(marks_in("", template), Tools(TOOLS))
    bounds = [0, *sorted({min(cut, len(text)) for cut in cuts}), len(text)]
    parts = [part for begin, end in itertools.pairwise(bounds) for part in parser.feed(text[begin:end])]
    return joined(parts + parser.finish())


HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
CASES: list[tuple[str, list[Part]]] = [
    ("", []),
    ("Hello, {world}", ["Hello, {world}"]),
    (" Hello", [" Hello"]),
    (HERMES, [OSLO]),
    (f"Let me see.\n{HERMES}", ["Let me see.\n", OSLO]),
    (f"{HERMES}\n{HERMES}\n", [OSLO, OSLO]),
    (f"{HERMES}\nThat was it.", [OSLO, "\nThat was it."]),
    ('<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}</tool_call>', [OSLO]),  # a bracket is missing
    ('<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}}</tool_call>', [OSLO]),  # one too many
    ('<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}', [OSLO]),  # the closing mark is missing
    ('<tool_call>{"name": "weather", "arguments": {"city": "Oslo', [OSLO]),  # cut off
    ('<tool_call>{"name": "weather", "arguments": {"city": "a</tool_call>b"}}</tool_call>', [Call("weather", {"city": "a</tool_call>b"})]),  # noqa: E501
    ("<tool_call>{'name': 'weather', 'arguments': {'city': 'Oslo'}}</tool_call>", [OSLO]),
    ('<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}</tool_call>', [OSLO]),
    ('<tool_call>{"name": "get_time", "arguments": null}</tool_call>', [TIME]),
    ('<tool_call>{"name": "get_time"}</tool_call>', [TIME]),
    ('<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', ['<tool_call>{"name": "unknown", "arguments": {}}</tool_call>']),  # noqa: E501
    ("<tool_call>nothing</tool_call> more", ["<tool_call>nothing</tool_call> more"]),
    ("a <tool_c", ["a <tool_c"]),
    ("a <tool_chest> b", ["a <tool_chest> b"]),
    ("<<tool_call>{}", ["<<tool_call>{}"]),
    (HERMES.replace("</tool_call>", "<tool_call>") + '{"name": "get_time"}</tool_call>', [OSLO, TIME]),
    ("<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
     [Call("weather", {"city": "Oslo", "days": 3})]),
    ("<function=weather><parameter=city>12</parameter></function>", [Call("weather", {"city": "12"})]),
    ('<function=weather>{"city": "Oslo"}</function>', [OSLO]),
    ('<function_calls><invoke name="weather"><parameter name="city">Oslo</parameter></invoke></function_calls>', [OSLO]),
    ("<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>", [OSLO]),
    ('[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "get_time", "arguments": {}}]', [OSLO, TIME]),
    ('[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]get_time[ARGS]{}', [OSLO, TIME]),
    ('[TOOL_CALLS]weather[CALL_ID]a1[ARGS]{"city": "Oslo"} done', [OSLO, " done"]),
    ('<|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}', [OSLO]),
    ('<|python_tag|>weather.call(city="Oslo")', [OSLO]),
    ("<|python_tag|>print(1)", ["<|python_tag|>print(1)"]),
    ('{"name": "weather", "parameters": {"city": "Oslo"}}', [OSLO]),
    ('{"name": "weather", "parameters": {"city": "Oslo"}}; {"name": "get_time", "parameters": {}}', [OSLO, TIME]),
    ('[{"name": "weather", "arguments": {"city": "Oslo"}}]', [OSLO]),
    ('{"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}', [OSLO]),
    ('{"tool_calls": [{"function": {"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}}]}', [OSLO]),
    ('{"weather": {"city": "Oslo"}}', [OSLO]),
    ('```json\n{"name": "weather", "arguments": {"city": "Oslo"}}\n```', [OSLO]),
    ('```python\nprint({"name": "weather"})\n```', ['```python\nprint({"name": "weather"})\n```']),
    ('{"name": "Ann", "age": 5}\nThat is it.', ['{"name": "Ann", "age": 5}\nThat is it.']),
    ('{"name": "weather", "note": "no call"}', ['{"name": "weather", "note": "no call"}']),
    ("[1] is a footnote, isn't it", ["[1] is a footnote, isn't it"]),
    ("[Don't] {x}", ["[Don't] {x}"]),
    ('Text {"name": "weather", "parameters": {}}', ['Text {"name": "weather", "parameters": {}}']),
    ("[weather(city='Oslo'), get_time()]", [OSLO, TIME]),
    ("[weather('Oslo', 3)]", [Call("weather", {"city": "Oslo", "days": 3})]),
    ("[weather(city=open('x'))]", ["[weather(city=open('x'))]"]),
    ("<|tool_call_start|>[weather(city=\"Oslo\"), ns.find(x=[1, {'a': None}])]<|tool_call_end|>", [OSLO, Call("ns.find", {"x": [1, {"a": None}]})]),  # noqa: E501
    ('<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo"}}]<|/tool_call|>', [OSLO]),
    ('functools[{"name": "weather", "arguments": {"city": "Oslo"}}]', [OSLO]),
    ('<|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Oslo"}}\n]<|END_ACTION|>', [OSLO]),  # noqa: E501
    ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Oslo"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', [OSLO]),  # noqa: E501
    ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>', [OSLO, TIME]),  # noqa: E501
    ('<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>', [OSLO]),  # noqa: E501
    ('<TOOLCALL>[{"name": "weather", "arguments": {"city": "Oslo"}}]</TOOLCALL>', [OSLO]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), CASES)
@settings(max_examples=25)
@given(cuts=st.lists(st.integers(0, 160), max_size=12))
def test_the_parts_are_the_same_however_the_text_is_cut(text: str, expected: list[Part], cuts: list[int]) -> None:
    assert parsed(text, cuts) == expected
    assert parsed(text, list(range(len(text)))) == expected


FRAGMENTS = st.sampled_from(
    [part for text, _ in CASES for part in (text, text[: len(text) // 2], text[len(text) // 2 :])]
    + ['{"', "}", "[", "]", "<tool_call>", "</tool_call>", "'", '"', "\\", "\\ud800", "1e999", "9" * 25, "((((", "\0", "```", ";"]
)


@given(text=st.lists(FRAGMENTS, max_size=6).map("".join), cuts=st.lists(st.integers(0, 300), max_size=8))
def test_whatever_a_model_writes_it_is_text_or_calls_that_json_can_hold(text: str, cuts: list[int]) -> None:
    parts = parsed(text, cuts)
    assert parts == parsed(text, [])
    for part in parts:
        if isinstance(part, Call):
            assert json.loads(go_json.dumps(part.arguments)) == part.arguments
    if not any(isinstance(part, Call) for part in parts):
        assert "".join(part for part in parts if isinstance(part, str)) == text


@pytest.mark.parametrize(
    "nested", ["[" * 100_000, '{"a":' * 5000, "[weather(" * 5000, "<tool_call>" * 2000, "<tool_call>[" + "-" * 9999 + "1]"]
)
def test_deep_nesting_is_text(nested: str) -> None:
    assert parsed(nested, []) == [nested]


def test_text_is_passed_on_at_once() -> None:
    parser = ToolParser(marks_in("", ""), Tools(TOOLS))
    assert parser.feed("Hi <to") == ["Hi "]
    assert parser.feed("p> there") == ["<top> there"]
    assert parser.feed(HERMES) == [OSLO]


GO = '{{ range .Messages }}{{ if .ToolCalls }}<<call>>{{ range .ToolCalls }}{"name": "{{ .Function.Name }}"}{{ end }}<</call>>{{ end }}{{ end }}'  # noqa: E501


def test_marks_come_from_the_template() -> None:
    assert "[TOOL_CALLS]" in {mark.begin for mark in marks_in("{{ if .ToolCalls }}[TOOL_CALLS] [{{ range .ToolCalls }}{", "")}
    assert "<<call>>" in {mark.begin for mark in marks_in(GO, "")}
    assert "[TOOL_CALLS]" not in {mark.begin for mark in marks_in("", "{{ messages }}")}
    parser = ToolParser(marks_in(GO, ""), Tools(TOOLS))
    assert parser.feed('x <<call>>{"name": "weather", "arguments": {"city": "Oslo"}}') == ["x ", OSLO]


@pytest.mark.parametrize(
    "described", [{}, {"function": 5}, {"function": {"name": 5}}, {"function": {"name": "f", "parameters": [1]}}]
)
def test_malformed_tools_do_no_harm(described: dict[str, Any]) -> None:
    parser = ToolParser(marks_in("", ""), Tools([described]))
    assert joined(parser.feed("Hello") + parser.finish()) == ["Hello"]
