"""Requests of the Anthropic-compatible API, and their translation to native ones.

What a model here cannot do with (metadata, cache control, tools that run at the vendor's) is ignored, as clients expect.

Source: Anthropic's Messages API; product description, "POST /v1/messages".
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Container, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from puna.api.go_json import Request
from puna.api.watched import ANYTHING, Watched

_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "max"}


class Message(Request):
    role: str = ""
    content: Any = None


class Thinking(Request):
    type: str = ""
    budget_tokens: Annotated[int, Field(ge=0)] | None = None


class OutputConfig(Request):
    effort: str = ""
    format: dict[str, Any] | None = None


class ToolChoice(Request):
    type: str = ""
    name: str = ""


class CountRequest(Watched):
    """What a prompt is made of."""

    asks_nothing: ClassVar[Mapping[str, Container[Any]]] = {
        "metadata": ANYTHING,  # for the vendor's books, as the next
        "service_tier": ANYTHING,
        "cache_control": ANYTHING,  # what repeats is found in the cache without being told
    }

    model: str = ""
    messages: list[Message] = Field(default_factory=list)
    system: Any = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: ToolChoice = ToolChoice()
    thinking: Thinking = Thinking()
    output_config: OutputConfig = OutputConfig()

    def check(self) -> None:
        """Errors: ValueError for what is missing."""
        if not self.model:
            raise ValueError("model is required")
        if not self.messages:
            raise ValueError("messages is required")

    @property
    def forced_tool(self) -> str | None:
        """The tool that must be called, nothing for any of them; None when none must."""
        return {"any": "", "tool": self.tool_choice.name}.get(self.tool_choice.type)

    @property
    def options(self) -> dict[str, Any]:
        return {}


class MessagesRequest(CountRequest):
    max_tokens: int = 0
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] = Field(default_factory=list)

    def check(self) -> None:
        if not self.model:
            raise ValueError("model is required")
        if self.max_tokens <= 0:
            raise ValueError("max_tokens is required and must be positive")
        super().check()

    @property
    def options(self) -> dict[str, Any]:
        given = {
            "num_predict": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences or None,
            "think_budget": self.thinking.budget_tokens if self.thinking.type == "enabled" else None,
        }
        return {name: value for name, value in given.items() if value is not None}


def native_chat(request: CountRequest) -> dict[str, Any]:
    """As a request of the native API, without what depends on the model.

    Errors: ValueError saying what cannot be understood.
    """
    request.check()
    tools = [] if request.tool_choice.type == "none" else _tools(request.tools)
    schema = (request.output_config.format or {}).get("schema")
    return {
        "model": request.model,
        "messages": [*_system(request.system), *_messages(request.messages)],
        "tools": tools,
        "options": request.options,
        "think": _think(request),
        "format": schema,
    }


def _think(request: CountRequest) -> bool | str | None:
    known = {"enabled": True, "disabled": False}.get(request.thinking.type)
    return _EFFORTS.get(request.output_config.effort) if known is None else known


def _system(system: Any) -> list[dict[str, Any]]:
    match system:
        case None | "" | []:
            return []
        case str():
            return [{"role": "system", "content": system}]
        case list():
            return [{"role": "system", "content": "".join(_text(block) for block in system)}]
    raise ValueError("system must be a string or a list of text blocks")


def _text(block: Any) -> str:
    match block:
        case {"type": "text", "text": str(text)}:
            return text
    return ""


def _tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for tool in tools:
        name, schema = tool.get("name"), tool.get("input_schema")
        if schema is None and str(tool.get("type") or "custom") != "custom":
            continue  # runs on the vendor's servers
        if not isinstance(name, str) or not name:
            raise ValueError("tools: name is required")
        if not isinstance(schema, dict):
            raise ValueError(f'invalid input_schema for tool "{name}": it must be an object')
        function = {"name": name, "description": tool.get("description") or "", "parameters": schema}
        found.append({"type": "function", "function": function})
    return found


def _messages(messages: list[Message]) -> list[dict[str, Any]]:
    """In the order they came, each tool result before the text of its message."""
    found: list[dict[str, Any]] = []
    tool_names: dict[str, str] = {}
    for message in messages:
        if isinstance(message.content, str):
            found.append({"role": message.role, "content": message.content})
        elif isinstance(message.content, list):
            found += _from_blocks(message.role, message.content, tool_names)
        else:
            raise ValueError("messages: content must be a string or a list of blocks")
    return found


def _from_blocks(role: str, blocks: list[Any], tool_names: dict[str, str]) -> list[dict[str, Any]]:
    said: dict[str, Any] = {"role": role, "content": ""}
    results: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            said["content"] += _text(block)
        elif kind == "image":
            said.setdefault("images", []).append(_image(block))
        elif kind == "tool_use":
            call = _call(block)
            tool_names[call["id"]] = call["function"]["name"]
            said.setdefault("tool_calls", []).append(call)
        elif kind == "tool_result":
            results.append(_result(block, tool_names))
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            said["thinking"] = block["thinking"]
    is_empty = not any(said.get(name) for name in ("content", "images", "tool_calls", "thinking"))
    return results if results and is_empty else [*results, said]


def _call(block: dict[str, Any]) -> dict[str, Any]:
    given, arguments = {name: block.get(name) for name in ("id", "name")}, block.get("input")
    for name, value in given.items():
        if not isinstance(value, str) or not value:
            raise ValueError(f"tool_use block missing required '{name}' field")
    function = {"name": given["name"], "arguments": arguments if isinstance(arguments, dict) else {}}
    return {"id": given["id"], "function": function}


def _result(block: dict[str, Any], tool_names: dict[str, str]) -> dict[str, Any]:
    call_id = str(block.get("tool_use_id") or "")
    content = block.get("content")
    found: dict[str, Any] = {"role": "tool", "content": "", "tool_call_id": call_id, "tool_name": tool_names.get(call_id, "")}
    if isinstance(content, str):
        found["content"] = content
    elif isinstance(content, list):
        found["content"] = "".join(_text(part) for part in content)
        images = [_image(part) for part in content if isinstance(part, dict) and part.get("type") == "image"]
        found |= {"images": images} if images else {}
    return found


def _image(block: dict[str, Any]) -> str:
    match block.get("source"):
        case {"type": "base64", "data": str(data)}:
            try:
                base64.b64decode(data, validate=True)
            except binascii.Error as error:
                raise ValueError(f"invalid base64 image data: {error}") from error
            return data
        case {"type": str(kind)} if kind != "base64":
            raise ValueError(f"invalid image source type: {kind}. Only base64 images are supported.")
    raise ValueError("invalid image source")
