"""The parsers that a Modelfile may name: each reads its family's thoughts and calls, however the output was cut."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from puna.prompt.families.registry import FAMILIES
from puna.prompt.output import Call, Part, Thinking, joined
from puna.prompt.parsers import PARSERS
from tests.growth import LIMIT, growth
from tests.unit.prompt.chat_templates import USER
from tests.unit.prompt.test_renderers import CALLS, prompt

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "array", "items": {"type": "integer"}},
    "exact": {"type": "boolean"},
    "at": {"type": "object"},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": PROPERTIES}}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
OSLO = Call("weather", {"city": 'O"s}lo', "days": [1, 2], "exact": True})
NOW = Call("now", {})

_JSON = '<tool_call>\n{"name": "weather", "arguments": {"city": "O\\"s}lo", "days": [1, 2], "exact": true}}\n</tool_call>'
_JSON_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
_TAGS = (
    '<tool_call>\n<function=weather>\n<parameter=city>\nO"s}lo\n</parameter>\n<parameter=days>\n[1, 2]\n</parameter>\n'
    "<parameter=exact>\nTrue\n</parameter>\n</function>\n</tool_call>"
)
_TAGS_NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
_GLM = (
    '<tool_call>weather<arg_key>city</arg_key><arg_value>O"s}lo</arg_value><arg_key>days</arg_key><arg_value>[1, 2]</arg_value>'
    "<arg_key>exact</arg_key><arg_value>true</arg_value></tool_call>"
)
_ARGUMENTS = '{"city": "O\\"s}lo", "days": [1, 2], "exact": true}'
_DEEPSEEK = f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{_ARGUMENTS}<｜tool▁call▁end｜>"
_DEEPSEEK_NOW = "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
_COGITO = (
    f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{_ARGUMENTS}\n```<｜tool▁call▁end｜>\n"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
_PYTHON = 'weather(city="O\\"s}lo", days=[1, 2], exact=True)'
_HARMONY = (
    "<|channel|>analysis<|message|>Rain?<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json"
    f"<|message|>{_ARGUMENTS}<|call|><|start|>assistant<|channel|>commentary to=functions.now<|message|>{{}}<|call|>"
)
_GEMMA4 = '<|tool_call>call:weather{city:<|"|>O"s}lo<|"|>,days:[1,2],exact:true}<tool_call|><|tool_call>call:now{}<tool_call|>'
_FUNCTIONGEMMA = (
    '<start_function_call>call:weather{city:<escape>O"s}lo<escape>,days:[1,2],exact:true}<end_function_call>'
    "<start_function_call>call:now{}<end_function_call>"
)

OUTPUTS: dict[str, tuple[str, list[Part]]] = {
    "passthrough": (f"<think>x</think>{_JSON}", [f"<think>x</think>{_JSON}"]),
    "harmony": (_HARMONY, [Thinking("Rain?"), OSLO, NOW]),
    "qwen3": (f"<think>\nRain?\n</think>\n\nSo.\n{_JSON}\n{_JSON_NOW}", [Thinking("Rain?\n"), "So.\n", OSLO, NOW]),
    "qwen3-thinking": (f"Rain?\n</think>\n\n{_JSON}", [Thinking("Rain?\n"), OSLO]),
    "qwen3.5": (f"Rain?\n</think>\n\nSo.\n\n{_TAGS}\n{_TAGS_NOW}", [Thinking("Rain?\n"), "So.\n\n", OSLO, NOW]),
    "qwen3-coder": (f"So.\n{_TAGS}\n{_TAGS_NOW}", ["So.\n", OSLO, NOW]),
    "qwen3-vl-instruct": (f"So.\n{_JSON}\n{_JSON_NOW}", ["So.\n", OSLO, NOW]),
    "qwen3-vl-thinking": (f"Rain?\n</think>\n\nSo.\n{_JSON}", [Thinking("Rain?\n"), "So.\n", OSLO]),
    "ministral": (f"So.[TOOL_CALLS]weather[ARGS]{_ARGUMENTS}[TOOL_CALLS]now[ARGS]{{}}", ["So.", OSLO, NOW]),
    "cogito": (f"Rain?\n</think>\nSo.{_COGITO}", [Thinking("Rain?\n"), "So.", OSLO, NOW]),
    "deepseek3": (f"Rain?</think>So.{_DEEPSEEK}{_DEEPSEEK_NOW}", [Thinking("Rain?"), "So.", OSLO, NOW]),
    "olmo3": (f"So.<function_calls>{_PYTHON}\nnow()</function_calls>", ["So.", OSLO, NOW]),
    "olmo3-think": ("Rain?\n</think>\n\nSo.", [Thinking("Rain?\n"), "So."]),
    "nemotron-3-nano": (f"Rain?\n</think>\nSo.\n{_TAGS}\n{_TAGS_NOW}\n", [Thinking("Rain?\n"), "So.\n", OSLO, NOW]),
    "functiongemma": (f"So.{_FUNCTIONGEMMA}", ["So.", OSLO, NOW]),
    "glm-4.7": (f"Rain?</think>So.{_GLM}<tool_call>now</tool_call>", [Thinking("Rain?"), "So.", OSLO, NOW]),
    "gemma4": (f"<|channel>thought\nRain?\n<channel|>So.{_GEMMA4}", [Thinking("Rain?\n"), "So.", OSLO, NOW]),
    "gemma4-no-thinking": (f"<|channel>thought\n<channel|>So.{_GEMMA4}", ["So.", OSLO, NOW]),
    "lfm2": (f"<|tool_call_start|>[{_PYTHON}, now()]<|tool_call_end|>So.", [OSLO, NOW, "So."]),
    "lfm2-thinking": (
        f"<think>Rain?</think>\n<|tool_call_start|>[{_PYTHON}]<|tool_call_end|>So.",
        [Thinking("Rain?"), OSLO, "So."],
    ),
}
OPEN = {"qwen3-thinking", "qwen3.5", "qwen3-vl-thinking", "cogito", "deepseek3", "olmo3-think", "nemotron-3-nano", "glm-4.7"}
"""Those whose prompts have begun the thought."""


def parsed(name: str, text: str, cuts: list[int], *, think: bool | None = None) -> list[Part]:
    output = PARSERS[name]
    given = "<|start|>assistant" if name == "harmony" else "<think>\n" if name in OPEN else ""
    parser = output.parser(given, think=output.can_think if think is None else think, tools=TOOLS)
    if parser is None:
        return [text]
    bounds = [0, *sorted({min(cut, len(text)) for cut in cuts}), len(text)]
    parts = [part for begin, end in itertools.pairwise(bounds) for part in parser.feed(text[begin:end])]
    return joined([*parts, *parser.finish()])


def test_every_parser_has_an_example() -> None:
    assert OUTPUTS.keys() == PARSERS.keys()


@pytest.mark.parametrize("name", PARSERS)
def test_character_by_character(name: str) -> None:
    text, expected = OUTPUTS[name]
    assert parsed(name, text, []) == expected
    assert parsed(name, text, list(range(len(text)))) == expected


@pytest.mark.parametrize("name", PARSERS)
@given(data=st.data())
def test_the_parts_are_the_same_however_the_output_was_cut(name: str, data: st.DataObject) -> None:
    """Also of outputs that are none of the family's."""
    own = [OUTPUTS[name][0][begin : begin + 12] for begin in range(0, len(OUTPUTS[name][0]), 6)]
    text = data.draw(st.lists(st.sampled_from(own) | st.text(max_size=4), max_size=14).map("".join))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=10))
    think = data.draw(st.booleans())
    assert parsed(name, text, cuts, think=think) == parsed(name, text, [], think=think)


@pytest.mark.parametrize("name", PARSERS)
def test_time_grows_as_the_output_does(name: str) -> None:
    text = OUTPUTS[name][0]
    assert growth(lambda n: text * n, lambda whole: parsed(name, whole, []), 12) < LIMIT


@pytest.mark.parametrize("unit", ["call:now{", "call:weather{a:{", 'call:now{a:<|"|>', "call:now{a:[", "call:", '<|"|>', "{a:1,"])
def test_notation(unit: str) -> None:
    def work(text: str) -> object:
        return parsed("gemma4", f"<|tool_call>call:now{{{text}<tool_call|>", [])

    assert growth(lambda n: unit * n, work, 300) < LIMIT


@pytest.mark.parametrize(
    ("inner", "arguments"),
    [
        ("", {}),
        ('city:<|"|>a, {b}: "c"<|"|>', {"city": 'a, {b}: "c"'}),
        ("n:1,x:-2.5e3,t:true,f:false,z:null", {"n": 1, "x": -2500.0, "t": True, "f": False, "z": None}),
        ('at:{<|"|>a<|"|>:{b:[1,{c:2}]},d:[]}', {"at": {"a": {"b": [1, {"c": 2}]}, "d": []}}),
        ("city: Oslo ", {"city": "Oslo"}),
        ("days:[1,2,],", {"days": [1, 2]}),
    ],
)
def test_values_of_the_notation(inner: str, arguments: dict[str, Any]) -> None:
    assert parsed("gemma4", f"<|tool_call>call:weather{{{inner}}}<tool_call|>", []) == [Call("weather", arguments)]


@pytest.mark.parametrize("inner", ["city", "city:", 'city:<|"|>x', ":1", "a:[1", "a:{b:1", "a:" + "[" * 1000])
def test_what_is_no_call_is_text(inner: str) -> None:
    text = f"<|tool_call>call:weather{{{inner}<tool_call|>"
    assert parsed("gemma4", text, []) == [text]


def test_thoughts_that_nobody_asked_for_are_no_part_of_the_answer() -> None:
    assert parsed("gemma4", "<|channel>thought\nRain?\n<channel|>So.", [], think=False) == ["So."]
    assert PARSERS["gemma4"].needs_control_tokens(think=False, tools=False)
    assert not PARSERS["passthrough"].needs_control_tokens(think=True, tools=True)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.has_tools])
def test_what_a_renderer_writes_its_parser_reads(name: str) -> None:
    """The last message's call, cut out of the prompt, is the call that was written."""
    before = prompt(name, [USER], TOOLS, think=False)
    whole = prompt(name, [USER, {**CALLS, "thinking": "", "content": ""}], TOOLS, think=False)
    written = whole[len(before) - 40 :] if not whole.startswith(before) else whole[len(before) :]
    parser = PARSERS[FAMILIES[name].parser].parser("", think=False, tools=TOOLS)
    assert parser is not None
    found = [part for part in [*parser.feed(written), *parser.finish()] if isinstance(part, Call)]
    wanted = [call["function"] for call in CALLS["tool_calls"]]
    assert [(call.name, call.arguments) for call in found] == [(call["name"], call["arguments"]) for call in wanted]
