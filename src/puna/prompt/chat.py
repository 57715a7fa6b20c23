"""Render a conversation with a Jinja chat template.

Messages are those of the native API: role and content, and where they apply thinking, tool_calls, tool_name, tool_call_id, and
images, which are what stands for them in the content. They reach the template in the shape that Hugging Face documents for chat
templates.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from puna.errors import TemplateError
from puna.prompt import jinja
from puna.prompt.jinja import TemplateRefusedError
from puna.prompt.template_text import jinja_words

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
        **_asked_for(template, tools or ()),
        **kwargs,
    }
    markers = [marker for message in messages for marker in message.get("images") or ()]
    plain = [_template_message(message) for message in joined_images(messages)]
    merged = merge_system(plain)

    def rendered(conversation: list[dict[str, Any]]) -> str:
        return _render(template, conversation, variables, markers)

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
    expected = [str(message["content"]).strip() for message in plain if message["role"] == "system"]
    if all(text in prompt for text in expected):
        return prompt
    try:
        second = rendered(merged)
    except TemplateError:
        return prompt
    return second if all(text in second for text in expected) else prompt


def _asked_for(template: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What some templates take from whoever renders them: today's date by two names, and the tools by another.

    Llama 3's write a date of 2024 where there is no date_string; Firefunction's want functions as text.
    """
    words, now = jinja_words(template), datetime.now()
    found: dict[str, Any] = {}
    if "date_string" in words:
        found["date_string"] = now.strftime("%d %b %Y")
    if "datetime" in words:
        found["datetime"] = now.astimezone(UTC).strftime("%b %d %Y %H:%M:%S GMT")
    if "functions" in words and "tools" not in words:
        found["functions"] = json.dumps(list(tools), indent=2, ensure_ascii=False) if tools else ""
    return found


def joined_images(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The conversation without messages that hold an image and nothing else: those join their neighbour of the same role.

    Clients that send a message in parts have each as one of its own, and templates want roles to take turns.
    """
    found: list[Mapping[str, Any]] = []
    before: Mapping[str, Any] = {}
    for message in messages:
        if found and before.get("role") == message.get("role") and (_is_image(before) or _is_image(message)):
            last = found[-1]
            images = [*(last.get("images") or ()), *(message.get("images") or ())]
            found[-1] = {**last, **message, "content": f"{last['content']}{message['content']}", "images": images}
        else:
            found.append(message)
        before = message
    return found


def _is_image(message: Mapping[str, Any]) -> bool:
    images = message.get("images") or ()
    return bool(images) and message.get("content") == "".join(images)


def _render(template: str, conversation: list[dict[str, Any]], variables: Mapping[str, Any], markers: Sequence[str] = ()) -> str:
    """The prompt from the first shape that the template takes and in which it shows all tool calls and images; else the first."""
    failure: TemplateError | None = None
    incomplete: str | None = None
    for shape in _shapes(conversation, variables, without_text=_asks_for_none(template), has_images=bool(markers)):
        try:
            prompt = jinja.render(template, shape)
        except TemplateRefusedError:
            if failure is None and incomplete is None:
                raise
        except TemplateError as error:
            failure = failure or error
        else:
            if _shows_calls(prompt, conversation) and all(marker in prompt for marker in markers):
                return prompt
            incomplete = prompt if incomplete is None else incomplete
    if incomplete is not None:
        return incomplete
    assert failure is not None
    raise failure


def _shapes(
    conversation: list[dict[str, Any]], variables: Mapping[str, Any], *, without_text: bool, has_images: bool
) -> Iterator[dict[str, Any]]:
    """As Hugging Face documents them, then what older templates take for granted.

    That there is a list of tools, that arguments of calls are JSON text, and that a message with calls has no text at all. Some
    that know images take contents in parts alone.
    """
    if without_text:
        conversation = [_without_empty_text(message) for message in conversation]
    yield {"messages": conversation, **variables}
    if not variables["tools"]:
        yield {"messages": conversation, **variables, "tools": []}
    if has_images:
        yield {"messages": [{**message, "content": _in_parts(message["content"])} for message in conversation], **variables}
    if any(message.get("tool_calls") for message in conversation):
        as_text = [_with_text_arguments(message) for message in conversation]
        yield {"messages": as_text, **variables}
        if not without_text:
            yield {"messages": [_without_empty_text(message) for message in conversation], **variables}
            yield {"messages": [_without_empty_text(message) for message in as_text], **variables}


def _in_parts(content: Any) -> Any:
    """What stands for an image is text: what the family's own words for one are is not the template's business here."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _asks_for_none(template: str) -> bool:
    """Whether it tells a message without text from one with an empty text: a call alone is then the former."""
    names = ("['content']", '["content"]', ".content", " content")
    return any(f"{name} is {word}" in template for name in names for word in ("none", "not none"))


def _shows_calls(prompt: str, conversation: list[dict[str, Any]]) -> bool:
    calls = (call for message in conversation for call in message.get("tool_calls", ()))
    return all(name in prompt for name in {str(call["function"].get("name", "")) for call in calls})


def _without_empty_text(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": None} if message.get("tool_calls") and not message["content"] else message


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
