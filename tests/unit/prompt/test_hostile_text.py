"""Text from files, models and clients is read in time that grows as the text does, whatever it holds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from puna.errors import FileFormatError, PunaError
from puna.prompt import go_chat, go_syntax, jinja
from puna.prompt.ending import Ending
from puna.prompt.families.registry import FAMILIES
from puna.prompt.go_functions import NAMES
from puna.prompt.harmony import HarmonyParser
from puna.prompt.limits import Budget
from puna.prompt.output import Parser, joined
from puna.prompt.template_text import around_thinking, before_calls, go_fields, go_segments, jinja_words
from puna.prompt.thinking import Tags, ThinkingParser
from puna.prompt.tools.calls import Tools, find_calls
from puna.prompt.tools.marks import marks_in
from puna.prompt.tools.parser import ToolParser
from puna.settings import parse_duration
from puna.store.models import modelfile, parameters
from tests.growth import LIMIT, growth

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}}
]
FORGET: list[Any] = [go_segments, go_fields, jinja_words]


def _template(source: str) -> None:
    for remembered in FORGET:
        remembered.cache_clear()
    go_fields(source)
    jinja_words(source)
    around_thinking(source)
    before_calls(source)


@pytest.mark.parametrize(
    "unit",
    [
        "{%", "{{", "{#", "{{/*", "{{ /* */ ", "{{ '", '{{ "\\', "{{ `", "}}", "{{.Thinking}}", "}} x {{.Thinking}} ", "{{ x",
        "{{if .ToolCalls}}", "{{if .ToolCalls}} x ", "{% if '", "{{ a }}", "{{- /* */ -}}",
    ],
)  # fmt: skip
def test_templates(unit: str) -> None:
    assert growth(lambda n: unit * (n // len(unit)), _template, 16_000) < LIMIT


@pytest.mark.parametrize(
    "text",
    [
        "{{" * 6000, "{%" * 6000, "{{$a:=1}}" * 2, "{{ if .A }}" * 2, "{{/*" * 2, '{{ "' * 2,
    ],
)  # fmt: skip
def test_templates_of_go_parsed(text: str) -> None:
    def parse(source: str) -> None:
        with contextlib.suppress(PunaError):
            go_syntax.parse(source, NAMES)

    assert growth(lambda n: text * (n // len(text)), parse, 12_000) < LIMIT


def test_variables_of_go_templates() -> None:
    def make(n: int) -> str:
        return "".join(f"{{{{$v{i} := 1}}}}" for i in range(n)) + "{{$v0}}" * n

    assert growth(make, lambda source: go_syntax.parse(source, NAMES), 800) < LIMIT


@pytest.mark.parametrize(
    "unit",
    [
        "<arg_key>", "f<arg_key>a</arg_key>", "<arg_key>a</arg_key><arg_value>", "<function=f>", "<function=", "<function name=",
        "<function=f><parameter=a", "<function=f><parameter=", "<parameter= ", "<invoke name=", "f(((", "f(a=(1),", "f(a='", "a",
        "a.", "a {", '{"name": "f", "arguments": {', '{"name":"f","arguments":{}}\\"', "[", "((", "<|", "<|a", '"""',  "'''",
        '["""',
        "\\", "[CALL_ID]", "```a", "f{", " ", "f(a=", "f(a=[1],b=", "f<arg_key>", "1", "f(a=1", "<", "< ",
    ],
)  # fmt: skip
@pytest.mark.parametrize("start", ["", "f(a=[", "<function=f>"])
def test_calls(start: str, unit: str) -> None:
    tools = Tools(TOOLS)
    assert growth(lambda n: start + unit * (n // len(unit)), lambda text: find_calls(text, tools), 5_000) < LIMIT


def _whole(make: Callable[[], Parser]) -> Callable[[str], object]:
    def work(text: str) -> object:
        parser = make()
        return [*parser.feed(text), *parser.finish()]

    return work


def _in_pieces(make: Callable[[], Parser]) -> Callable[[str], object]:
    def work(text: str) -> object:
        parser = make()
        parts = [part for begin in range(0, len(text), 4) for part in parser.feed(text[begin : begin + 4])]
        return joined([*parts, *parser.finish()])

    return work


def _tool_parser() -> Parser:
    return ToolParser(marks_in("", "<tool_call> [TOOL_CALLS] <|python_tag|>"), Tools(TOOLS))


def _thinking_parser() -> Parser:
    return ThinkingParser(Tags(), "")


def _harmony_parser() -> Parser:
    return HarmonyParser("<|start|>assistant", Tools(TOOLS), shows_thinking=True)


@pytest.mark.parametrize("cut", [_whole, _in_pieces])
@pytest.mark.parametrize(
    "unit",
    [
        "<tool_call>", '<tool_call>{"name":"f","arguments":{}}\\"</tool_call>', '<tool_call>{"name":"f"}"</tool_call>',
        "<tool_ca", "[TOOL_CALLS]", "[TOOL_CALLS]f{", " ", "{", "x", '<tool_call>{"', "</tool_call>", "\n",
    ],
)  # fmt: skip
def test_tool_parser(unit: str, cut: Callable[[Callable[[], Parser]], Callable[[str], object]]) -> None:
    assert growth(lambda n: unit * (n // len(unit)), cut(_tool_parser), 3_000) < LIMIT


@pytest.mark.parametrize("cut", [_whole, _in_pieces])
@pytest.mark.parametrize("unit", [" ", "<think>", "<think", "</think>", "<think></think", "x"])
def test_thinking_parser(unit: str, cut: Callable[[Callable[[], Parser]], Callable[[str], object]]) -> None:
    assert growth(lambda n: unit * (n // len(unit)), cut(_thinking_parser), 12_000) < LIMIT


@pytest.mark.parametrize("cut", [_whole, _in_pieces])
@pytest.mark.parametrize(
    "start", ["", "<|channel|>", "<|channel|>final<|message|>", "<|channel|>commentary to=functions.f<|message|>"]
)
@pytest.mark.parametrize(
    "unit", [" ", "<|end|>", "<|channel|>", "<|start|>assistant", "<|", "x", " to=functions.f", "<|message|>"]
)
def test_harmony_parser(start: str, unit: str, cut: Callable[[Callable[[], Parser]], Callable[[str], object]]) -> None:
    assert growth(lambda n: start + unit * (n // len(unit)), cut(_harmony_parser), 3_000) < LIMIT


@pytest.mark.parametrize("unit", ["{", "{:", "{!", "{a:", "{{", "}", "{0!r:1"])
def test_formats_with_braces(unit: str) -> None:
    def work(text: str) -> None:
        with contextlib.suppress(Exception):
            jinja._check_braces(text)

    assert growth(lambda n: unit * (n // len(unit)), work, 20_000) < LIMIT


@pytest.mark.parametrize("unit", ["%", "%(", "%(a", "%#", "%0", "%(a)", "%.", "%%", "% "])
def test_formats_with_percents(unit: str) -> None:
    def work(text: str) -> None:
        with contextlib.suppress(Exception):
            jinja._check_percent(Budget(10**9), text, 1)

    assert growth(lambda n: unit * (n // len(unit)), work, 20_000) < LIMIT


@pytest.mark.parametrize("call", ["x.rfind(y)", "x.rindex(y)", "x.rsplit(y)", "x.rpartition(y)", "x.rsplit(sep=y)"])
def test_a_search_from_the_end_for_something_long_is_refused(call: str) -> None:
    variables = {"x": "a" * 100_000, "y": "b" + "a" * 50_000}
    with pytest.raises(PunaError, match="more than 256 characters"):
        jinja.render("{{ " + call + " }}", variables)


@pytest.mark.parametrize(
    "expression",
    ["'%(a)99999999d' % {'a': 1}", "'%((a))99999999d' % {'(a)': 1}", "'%.99999999f' % 1.5", "'{:99999999}'.format(1)"],
)
def test_a_width_that_would_fill_memory_is_refused(expression: str) -> None:
    with pytest.raises(PunaError, match="four digits"):
        jinja.render("{{ " + expression + " }}", {})


@pytest.mark.parametrize("unit", ["1", "1.", "1h", ".1", "1m1"])
def test_durations(unit: str) -> None:
    def work(text: str) -> None:
        for _ in range(50):
            with contextlib.suppress(ValueError):
                parse_duration(text)

    def made(n: int) -> str:
        return unit * (n // len(unit)) + "x"

    assert growth(made, work, 4_000) < LIMIT


@pytest.mark.parametrize("unit", ["1", "1.", "e1", "-"])
def test_parameters(unit: str) -> None:
    def work(text: str) -> None:
        with contextlib.suppress(PunaError):
            parameters.parse("temperature", text)

    assert growth(lambda n: unit * (n // len(unit)) + "x", work, 20_000) < LIMIT


@pytest.mark.parametrize("text", ['SYSTEM """\n', 'SYSTEM "x', "# x\n", 'SYSTEM """x\n"\n', "SYSTEM x\n"])
@pytest.mark.parametrize("line", ["\n", "x\n", '"\n', " \n"])
def test_modelfiles(text: str, line: str) -> None:
    def work(source: str) -> None:
        with contextlib.suppress(FileFormatError):
            modelfile.parse("FROM x\n" + source)

    assert growth(lambda n: text + line * n, work, 3_000) < LIMIT


def _conversation(n: int) -> list[dict[str, Any]]:
    calls = [{"id": f"c{i}", "function": {"name": "f", "arguments": {"a": "x"}}} for i in range(n)]
    results = [{"role": "tool", "tool_call_id": f"c{i}", "content": "y"} for i in range(n)]
    users = [{"role": "user", "content": "z" * 20} for _ in range(n)]
    return [*users, {"role": "assistant", "content": "", "tool_calls": calls}, *results, *users]


@pytest.mark.parametrize("name", FAMILIES)
def test_renderers_of_families(name: str) -> None:
    """They run in the server's own process."""

    def work(messages: list[dict[str, Any]]) -> object:
        return FAMILIES[name].render(messages, TOOLS, True, Ending.ANSWER)

    assert growth(_conversation, work, 300) < LIMIT


def test_neighbours_in_go_templates() -> None:
    template = go_chat.parse("{{ range .Messages }}{{ .Content }}{{ end }}")

    def make(n: int) -> list[dict[str, Any]]:
        return [{"role": "user", "content": "z" * 1000} for _ in range(n)]

    assert growth(make, lambda messages: go_chat.render_messages(template, messages), 400) < LIMIT
