"""Render a conversation with a Jinja chat template.

Messages are those of the native API: role and content, and where they apply thinking, tool_calls, tool_name and
tool_call_id. They reach the template in the shape that Hugging Face documents for chat templates.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from puna.errors import TemplateError
from puna.prompt import jinja
from puna.prompt.jinja import TemplateRefusedError

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""For vocabularies that have ``<|im_start|>`` and files that have no template."""

PLAIN = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""For files without a template whose vocabulary says nothing: ``role: content``, a blank line after each turn."""


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    bos_token: str,
    eos_token: str,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **kwargs: Any,
) -> str:
    """Render *messages*; further keywords become variables of the template.

    A template that refuses a system message, or leaves its text out, is rendered again with that text in front of the
    first user message.
    Errors: TemplateError naming the line, or with the template's own words.
    """
    variables = {
        "tools": [dict(tool) for tool in tools] if tools else None,
        "documents": None,
        "bos_token": bos_token,
        "eos_token": eos_token,
        "add_generation_prompt": add_generation_prompt,
        **kwargs,
    }
    plain = [_template_message(message) for message in messages]
    merged = merge_system(plain)

    def rendered(conversation: list[dict[str, Any]]) -> str:
        return _render(template, conversation, variables)

    if merged is None:
        return rendered(plain)
    try:
        prompt = rendered(plain)
    except TemplateRefusedError:
        try:
            return rendered(merged)
        except TemplateError:
            pass
        raise
    wanted = [str(message["content"]).strip() for message in plain if message["role"] == "system"]
    if all(text in prompt for text in wanted):
        return prompt
    try:
        second = rendered(merged)
    except TemplateError:
        return prompt
    return second if all(text in second for text in wanted) else prompt


def _render(template: str, conversation: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
    try:
        return jinja.render(template, {"messages": conversation, **variables})
    except TemplateRefusedError:
        raise
    except TemplateError as error:
        for other in _in_other_shapes(conversation, variables):
            try:
                return jinja.render(template, other)
            except TemplateError:
                pass
        raise error


def _in_other_shapes(conversation: list[dict[str, Any]], variables: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What older templates take for granted: that there is a list of tools, and that arguments of calls are JSON text."""
    if not variables["tools"]:
        yield {"messages": conversation, **variables, "tools": []}
    if any(message.get("tool_calls") for message in conversation):
        yield {"messages": [_with_text_arguments(message) for message in conversation], **variables}


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def merge_system(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """The conversation with all system texts in front of the first user message.

    None when there is no system text, when it is in parts, or when no user message with text can carry it.
    """
    others: list[dict[str, Any]] = []
    system: list[str] = []
    for message in messages:
        if message["role"] != "system":
            others.append(dict(message))
        elif not isinstance(message["content"], str):
            return None
        elif message["content"].strip():
            system.append(message["content"])
    first = next((m for m in others if m["role"] == "user" and isinstance(m["content"], str)), None)
    if not system or first is None:
        return None
    first["content"] = "\n\n".join([*system, first["content"]])
    return others


def _template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Only what is there appears: templates ask whether a key is defined."""
    content = message.get("content")
    out: dict[str, Any] = {"role": str(message.get("role", "")), "content": "" if content is None else content}
    if message.get("thinking"):
        out["thinking"] = out["reasoning_content"] = message["thinking"]
    if message.get("tool_calls"):
        out["tool_calls"] = [_template_call(call) for call in message["tool_calls"]]
    if message.get("tool_name"):
        out["name"] = message["tool_name"]
    for key in ("name", "tool_call_id", "reasoning_content"):
        if message.get(key):
            out[key] = message[key]
    return out


def _template_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    function["arguments"] = parsed_arguments(function.get("arguments"))
    return {**call, "type": call.get("type", "function"), "function": function}


def parsed_arguments(arguments: Any) -> Any:
    """A tool call's arguments as an object, also where they come as JSON text."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
