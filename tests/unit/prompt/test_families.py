"""Golden prompts of further families, with their tools and thoughts; the templates are written for these tests, each in
the format its family was trained on.
"""

from __future__ import annotations

from typing import Any

import pytest

from puna.prompt.exchange import PromptRequest, Source
from puna.prompt.output_format import OutputFormat
from puna.prompt.render import render
from puna.prompt.thinking import Tags
from tests.unit.prompt import chat_templates as t

THOUGHT = {"role": "assistant", "content": "4", "thinking": "2 and 2"}

QWEN3 = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last_query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is defined and loop.index0 > ns.last_query %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
            {{- tool_call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

DEEPSEEK = """
{%- set ns = namespace(system='', is_first=true) %}
{%- for message in messages if message['role'] == 'system' %}{%- set ns.system = ns.system + message['content'] %}{%- endfor %}
{{- bos_token + ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '<｜User｜>' + message['content'] }}{%- endif %}
    {%- if message['role'] == 'assistant' and message['tool_calls'] %}
        {{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
        {%- for call in message['tool_calls'] %}
            {{- '<｜tool▁call▁begin｜>' + call['type'] + '<｜tool▁sep｜>' + call['function']['name'] + '\\n```json\\n' }}
            {{- call['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif message['role'] == 'assistant' %}
        {%- set content = message['content'].split('</think>')[-1] if '</think>' in message['content'] else message['content'] %}
        {{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
    {%- elif message['role'] == 'tool' %}
        {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}"""

COMMAND_R = """{{ bos_token }}
{%- macro turn(role) %}<|START_OF_TURN_TOKEN|><|{{ role | upper }}_TOKEN|>{% endmacro %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{ turn('system') + message.content + '<|END_OF_TURN_TOKEN|>' }}
    {%- elif message.role == 'user' %}{{ turn('user') + message.content.strip() + '<|END_OF_TURN_TOKEN|>' }}
    {%- elif message.role == 'assistant' %}
        {{- turn('chatbot') }}
        {%- if message.tool_calls %}
            {{- '<|START_ACTION|>[' }}
            {%- for call in message.tool_calls %}
                {{- '{"tool_call_id": "' ~ loop.index0 ~ '", "tool_name": "' ~ call.function.name ~ '", "parameters": ' }}
                {{- call.function.arguments | tojson }}{{- '}' }}{%- if not loop.last %}, {% endif %}
            {%- endfor %}
            {{- ']<|END_ACTION|>' }}
        {%- else %}{{ message.content.strip() }}{% endif %}
        {{- '<|END_OF_TURN_TOKEN|>' }}
    {%- elif message.role == 'tool' %}
        {{- turn('system') + '<|START_TOOL_RESULT|>' + message.content + '<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ turn('chatbot') }}{% endif %}"""

GRANITE = """{%- for message in messages %}
    {{- '<|start_of_role|>' + ('tool_response' if message.role == 'tool' else message.role) + '<|end_of_role|>' }}
    {%- if message.tool_calls %}
        {{- '<|tool_call|>[' }}
        {%- for call in message.tool_calls %}{{- call.function | tojson }}{%- endfor %}
        {{- ']' }}
    {%- endif %}
    {{- message.content + '<|end_of_text|>\\n' }}
    {%- if loop.first and tools %}
        {{- '<|start_of_role|>tools<|end_of_role|>' + (tools | tojson(indent=4)) + '<|end_of_text|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_of_role|>assistant' + (' {"thinking": true}' if thinking else '') + '<|end_of_role|>' }}
{%- endif %}"""

HARMONY = """{{- '<|start|>system<|message|>Reasoning: ' + reasoning_effort | default('medium') + '\\n' }}
{{- '# Valid channels: analysis, commentary, final.<|end|>' }}
{%- set developer = messages | selectattr('role', 'eq', 'system') | map(attribute='content') | join('\\n') %}
{%- if developer or tools %}
    {{- '<|start|>developer<|message|>' }}
    {%- if developer %}{{- '# Instructions\\n\\n' + developer }}{%- endif %}
    {%- if tools %}
        {{- '# Tools\\n\\nnamespace functions {\\n' }}
        {%- for tool in tools %}
            {{- 'type ' + tool.function.name + ' = (_: {' }}
            {%- for name, kind in tool.function.parameters.properties.items() %}
                {{- name + ('' if name in tool.function.parameters.required else '?') + ': ' + kind.type + ',' }}
            {%- endfor %}
            {{- '}) => any;\\n' }}
        {%- endfor %}
        {{- '}' }}
    {%- endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- for message in messages if message.role != 'system' %}
    {%- if message.role == 'user' %}{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.' + message.name + ' to=assistant<|channel|>commentary<|message|>' + message.content | tojson }}
        {{- '<|end|>' }}
    {%- else %}
        {%- if message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '<|start|>assistant to=functions.' + call.function.name + '<|channel|>commentary json<|message|>' }}
            {{- call.function.arguments | tojson + '<|call|>' }}
        {%- endfor %}
        {%- if message.content %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

ARGUMENTS = '{"city": "Oslo", "at": "noon"}'
HARMONY_HEAD = "<|start|>system<|message|>Reasoning: {}\n# Valid channels: analysis, commentary, final.<|end|>"

CONVERSATIONS: dict[str, tuple[str, str]] = {
    "qwen3": (
        QWEN3,
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "deepseek": (
        DEEPSEEK,
        "<s>Be brief.<｜User｜>Hi<｜Assistant｜>Hello<｜end▁of▁sentence｜><｜User｜>Why?<｜Assistant｜><think>\n",
    ),
    "command-r": (
        COMMAND_R,
        "<s><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be brief.<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hi<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>Hello<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Why?<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    ),
    "granite": (
        GRANITE,
        "<|start_of_role|>system<|end_of_role|>Be brief.<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>Hi<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>Hello<|end_of_text|>\n"
        "<|start_of_role|>user<|end_of_role|>Why?<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
    ),
    "gpt-oss": (
        HARMONY,
        HARMONY_HEAD.format("medium") + "<|start|>developer<|message|># Instructions\n\nBe brief.<|end|>"
        "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>Hello<|end|>"
        "<|start|>user<|message|>Why?<|end|><|start|>assistant",
    ),
}

# After a call of the weather tool and its result.
TOOL_TURNS: dict[str, tuple[str, str]] = {
    "qwen3": (
        QWEN3,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    ),
    "deepseek": (  # takes arguments for text, and gets them so
        DEEPSEEK,
        "<｜User｜>Hi<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        f"```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
        "<｜tool▁output▁begin｜>rain<｜tool▁output▁end｜><｜Assistant｜><think>\n",
    ),
    "command-r": (
        COMMAND_R,
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_ACTION|>"
        f'[{{"tool_call_id": "0", "tool_name": "weather", "parameters": {ARGUMENTS}}}]<|END_ACTION|><|END_OF_TURN_TOKEN|>'
        "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>rain<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    ),
    "granite": (
        GRANITE,
        "<|start_of_role|>assistant<|end_of_role|><|tool_call|>"
        f'[{{"name": "weather", "arguments": {ARGUMENTS}}}]<|end_of_text|>\n'
        "<|start_of_role|>tool_response<|end_of_role|>rain<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
    ),
    "gpt-oss": (
        HARMONY,
        "<|start|>user<|message|>Hi<|end|><|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
        f'{ARGUMENTS}<|call|><|start|>functions.weather to=assistant<|channel|>commentary<|message|>"rain"<|end|>'
        "<|start|>assistant",
    ),
}


def prompt(template: str, messages: list[dict[str, Any]], **more: Any) -> str:
    return render(PromptRequest(Source("", template, "", "<s>", "</s>"), messages, **more)).text


@pytest.mark.parametrize(("template", "expected"), CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_conversations(template: str, expected: str) -> None:
    assert prompt(template, t.CONVERSATION) == expected


@pytest.mark.parametrize(("template", "expected"), TOOL_TURNS.values(), ids=TOOL_TURNS)
def test_calls_and_results(template: str, expected: str) -> None:
    assert prompt(template, [t.USER, t.CALL, t.RESULT], tools=[t.WEATHER]).endswith(expected)


def test_tools_are_offered_in_the_familys_words() -> None:
    offered = '{"type": "function", "function": {"name": "weather", "description": "Now & <here>", "parameters": '
    assert prompt(QWEN3, [t.SYSTEM, t.USER], tools=[t.WEATHER]).startswith(f"<|im_start|>system\nBe brief.\n\n<tools>\n{offered}")
    granite = prompt(GRANITE, [t.SYSTEM, t.USER], tools=[t.WEATHER])
    assert '<|start_of_role|>tools<|end_of_role|>[\n    {\n        "type": "function",' in granite
    assert "namespace functions {\ntype weather = (_: {city: string,at?: string,}) => any;\n}" in prompt(
        HARMONY, [t.USER], tools=[t.WEATHER]
    )


@pytest.mark.parametrize(
    ("template", "think", "end"),
    [
        (QWEN3, None, "<|im_start|>assistant\n"),
        (QWEN3, True, "<|im_start|>assistant\n"),
        (QWEN3, False, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        (GRANITE, True, '<|start_of_role|>assistant {"thinking": true}<|end_of_role|>'),
        (GRANITE, False, "<|start_of_role|>assistant<|end_of_role|>"),
    ],
)
def test_thinking_is_switched_in_the_familys_words(template: str, think: bool | None, end: str) -> None:
    assert prompt(template, [t.USER], think=think).endswith(end)


def test_levels_of_thinking() -> None:
    for think, level in ((None, "medium"), (True, "medium"), ("low", "low"), ("high", "high")):
        assert prompt(HARMONY, [t.USER], think=think).startswith(HARMONY_HEAD.format(level))


def test_old_thoughts_are_dropped_and_new_ones_kept() -> None:
    """Each template does it in its own way; what matters is that the thought reaches it."""
    result = {"role": "tool", "tool_name": "weather", "content": "rain"}
    assert "2 and 2" not in prompt(QWEN3, [t.USER, THOUGHT, t.AGAIN])
    assert "<think>\n2 and 2\n</think>\n\n4" in prompt(QWEN3, [t.USER, THOUGHT, result])
    assert "<|channel|>analysis<|message|>2 and 2<|end|>" in prompt(HARMONY, [t.USER, THOUGHT, t.AGAIN])
    old = {"role": "assistant", "content": "<think>2 and 2</think>4"}
    assert prompt(DEEPSEEK, [t.USER, old, t.AGAIN]).endswith(
        "<｜Assistant｜>4<｜end▁of▁sentence｜><｜User｜>Why?<｜Assistant｜><think>\n"
    )


@pytest.mark.parametrize(
    ("template", "tags", "is_harmony"),
    [
        (QWEN3, Tags("<think>", "</think>"), False),
        (DEEPSEEK, Tags("<think>", "</think>"), False),
        ("{{ '[THINK]' + messages[0].thinking + '[/THINK]' }}", Tags("[THINK]", "[/THINK]"), False),
        (HARMONY, Tags("<think>", "</think>"), True),
    ],
)
def test_how_the_output_is_read_follows_from_the_template(template: str, tags: Tags, is_harmony: bool) -> None:
    output = OutputFormat.of("", template)
    assert (output.tags, output.is_harmony) == (tags, is_harmony)


def test_a_template_that_takes_tools_for_granted_gets_an_empty_list() -> None:
    template = "{% for tool in tools %}<{{ tool.function.name }}>{% endfor %}{{ messages[0].content }}"
    assert prompt(template, [t.USER]) == "Hi"
    assert prompt(template, [t.USER], tools=[t.WEATHER]) == "<weather>Hi"
