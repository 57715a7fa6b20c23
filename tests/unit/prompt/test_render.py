"""Golden prompts through Go templates, and the choice between the languages."""

from __future__ import annotations

from typing import Any

import pytest

from puna.errors import BadRequest, TemplateError
from puna.prompt.ending import Ending, ending_of
from puna.prompt.exchange import PromptRequest, Rendered, Source
from puna.prompt.render import render
from tests.unit.prompt import chat_templates as t

GOLDEN: dict[str, tuple[str, str]] = {
    "chatml": (
        t.CHATML_GO,
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "chatml by turns": (
        t.CHATML_TURN_GO,
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "llama3 by turns": (
        t.LLAMA3_TURN_GO,
        "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nWhy?"
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral": (t.MISTRAL_GO, "[INST] Hi[/INST] Hello</s>[INST] Be brief.\n\nWhy?[/INST] "),
}


def made(source: Source, messages: list[dict[str, Any]], ending: Ending | None = None, **options: Any) -> Rendered:
    return render(PromptRequest(source, messages, ending=ending or ending_of(messages), **options))


def go(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return made(Source(template), messages, **options).text


def jinja(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return made(Source("", template), messages, **options).text


@pytest.mark.parametrize(("template", "prompt"), GOLDEN.values(), ids=GOLDEN.keys())
def test_golden_conversations(template: str, prompt: str) -> None:
    assert go(template, t.CONVERSATION) == prompt


def test_tools_calls_and_results() -> None:
    assert go(t.MISTRAL_GO, [t.CALL, t.RESULT, t.USER], tools=[t.WEATHER]) == (
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"at":"noon","city":"Oslo"}}]</s>'
        '[TOOL_RESULTS] {"content": rain}[/TOOL_RESULTS]'
        '[AVAILABLE_TOOLS] [{"type":"function","function":{"name":"weather","description":"Now \\u0026 \\u003chere\\u003e",'
        '"parameters":{"type":"object","required":["city"],"properties":{"at":{"type":"string"},"city":{"type":"string"}}}}}]'
        "[/AVAILABLE_TOOLS][INST] Hi[/INST] "
    )


def test_fields_of_tools_and_messages() -> None:
    template = (
        "{{ range .Tools }}{{ .Type }} {{ .Function.Name }}({{ range $n, $p := .Function.Parameters.Properties }}"
        "{{ $n }}: {{ $p.Type }} {{ toTypeScriptType $p }} {{ $p.ToTypeScriptType }},{{ end }}) "
        "{{ .Function.Parameters.Required }}{{ end }}"
        "{{ range .Messages }}[{{ .Role }} {{ .ToolName }} {{ .ToolCallID }} {{ .Thinking }} {{ len .Images }}"
        "{{ range .ToolCalls }} {{ .ID }} {{ .Function.Index }} {{ json .Function.Arguments }}{{ end }}]{{ end }}"
    )
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "x", "images": ["aGk="]},
        {"role": "assistant", "thinking": "hm", "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": '{"a":1}'}}]},
        {"role": "tool", "tool_name": "f", "tool_call_id": "c1", "content": "y"},
    ]
    assert go(template, messages, tools=[t.WEATHER]) == (
        "function weather(at: string string string,city: string string string,) [city]"
        '[user    1][assistant   hm 0 c1 0 {"a":1}][tool f c1  0]'
    )


def test_messages_as_json() -> None:
    template = "{{ range .Messages }}{{ json . }}{{ end }}"
    assert go(template, [t.USER, t.RESULT]) == (
        '{"role":"user","content":"Hi"}{"role":"tool","content":"rain","tool_name":"weather"}'
    )


def test_neighbours_of_one_role_are_joined_but_tool_results_are_not() -> None:
    template = "{{ range .Messages }}({{ .Role }} {{ .Content }}){{ end }}"
    messages = [t.USER, t.AGAIN, t.RESULT, t.RESULT]
    assert go(template, messages) == "(user Hi\n\nWhy?)(tool rain)(tool rain)"


def test_assistants_with_tool_calls_are_not_joined() -> None:
    """Joining keeps only the first message's calls, and the model would not see what it had asked for."""
    template = "{{ range .Messages }}({{ .Content }}{{ range .ToolCalls }}!{{ end }}){{ end }}"
    assert go(template, [t.ASSISTANT, t.CALL]) == "(Hello)(!)"


def test_system_texts_are_collected() -> None:
    template = "{{ .System }}|{{ range .Messages }}{{ .Role }} {{ end }}"
    late = {"role": "system", "content": "In French."}
    assert go(template, [t.SYSTEM, t.USER, late]) == "Be brief.\n\nIn French.|system user system "


def test_an_answer_that_has_begun_is_continued() -> None:
    assert go(t.CHATML_TURN_GO, [t.USER, t.ASSISTANT]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello"
    assert go(t.CHATML_GO, [t.USER, t.ASSISTANT]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello"


def test_a_template_without_response_gets_one() -> None:
    assert go("[{{ .Prompt }}]", [t.USER, t.ASSISTANT, t.AGAIN]) == "[Hi]Hello[Why?]"


@pytest.mark.parametrize(
    ("think", "expected"),
    [(None, "false  false"), (False, "false  true"), (True, "true medium true"), ("high", "true high true")],
)
def test_think_variables_of_go_templates(think: Any, expected: str) -> None:
    template = "{{ .Think }} {{ .ThinkLevel }} {{ .IsThinkSet }}"
    assert go(template + "{{ range .Messages }}{{ end }}", [t.USER], think=think) == expected
    assert go(template + "{{ .Response }}", [t.USER], think=think) == expected


@pytest.mark.parametrize(
    ("think", "expected"),
    [(None, "unset unset unset"), (False, "False False unset"), (True, "True True unset"), ("high", "True True high")],
)
def test_think_variables_of_jinja_templates(think: Any, expected: str) -> None:
    template = (
        "{{ enable_thinking | default('unset') }} {{ thinking | default('unset') }} {{ reasoning_effort | default('unset') }}"
    )
    assert jinja(template, [t.USER], think=think) == expected


def test_go_comes_before_jinja() -> None:
    assert made(Source("go {{ .Prompt }}", "jinja {{ messages[0].content }}"), [t.USER]).text == "go Hi"


@pytest.mark.parametrize(
    ("jinja_template", "has_im_start", "prompt"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", True, "<s>Hi</s>"),
        ("", True, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        ("", False, "user: Hi\n\nassistant:"),
    ],
)
def test_what_a_file_offers(jinja_template: str, has_im_start: bool, prompt: str) -> None:
    source = Source("", jinja_template, "", "<s>", "</s>", has_im_start)
    assert made(source, [t.USER]).text == prompt


def infill(source: Source) -> str:
    return render(PromptRequest(source, prefix="def f(", suffix="return 1")).text


def test_infill() -> None:
    assert infill(Source(t.INFILL_GO)) == "<PRE> def f( <SUF>return 1 <MID>"
    assert go(t.INFILL_GO, [{"role": "user", "content": "def f("}]) == "def f("


@pytest.mark.parametrize("source", [Source("{{ .Prompt }}"), Source("", "{{ messages }}"), Source()], ids=["go", "jinja", "none"])
def test_infill_without_a_place_for_the_suffix(source: Source) -> None:
    with pytest.raises(BadRequest, match="does not support insert"):
        infill(source)


@pytest.mark.parametrize("source", [Source("\n{{ if }}"), Source("", "\n{% if %}")], ids=["go", "jinja"])
def test_malformed_templates_are_refused(source: Source) -> None:
    with pytest.raises(TemplateError, match="line 2"):
        made(source, [t.USER])
