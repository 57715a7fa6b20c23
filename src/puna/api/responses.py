"""Requests of OpenAI's Responses API, and their translation to native ones. Nothing is stored between requests.

Source: OpenAI's API reference; product description, "POST /v1/responses".
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from typing import Any, ClassVar

from pydantic import Field

from puna.api.go_json import Request
from puna.api.openai import FOR_THE_BOOKS, Reasoning, forced_tool, image_data, think_of
from puna.api.watched import Watched


class TextOptions(Request):
    format: dict[str, Any] | None = None


class ResponsesRequest(Watched):
    asks_nothing: ClassVar[Mapping[str, Container[Any]]] = {
        **FOR_THE_BOOKS,
        "store": (False,),
        "parallel_tool_calls": (True,),
        "include": ([], ["reasoning.encrypted_content"]),  # thinking comes with that anyway
        "top_logprobs": (0,),
    }

    model: str = ""
    input: Any = None
    instructions: str = ""
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    reasoning: Reasoning = Reasoning()
    text: TextOptions = TextOptions()
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: Any = None
    stream: bool = False
    truncation: str = ""  # disabled: a conversation that is too long is an error; auto, and when nothing is message: it is cut
    background: bool = False
    previous_response_id: str = ""

    @property
    def options(self) -> dict[str, Any]:
        given = {
            "num_predict": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "think_budget": self.reasoning.max_tokens,
        }
        return {name: value for name, value in given.items() if value is not None}

    @property
    def forced_tool(self) -> str | None:
        return forced_tool(self.tool_choice)

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """As the native API has them; tools that would run on the vendor's servers are left out."""
        if self.tool_choice == "none":
            return []
        names = ("name", "description", "parameters")
        functions = [tool for tool in self.tools if tool.get("type") == "function"]
        return [{"type": "function", "function": {name: tool[name] for name in names if tool.get(name)}} for tool in functions]


def native_chat(request: ResponsesRequest) -> dict[str, Any]:
    """Errors: ValueError saying what cannot be understood."""
    if request.truncation not in ("", "auto", "disabled"):
        raise ValueError(f'truncation must be "auto" or "disabled", not "{request.truncation[:40]}"')
    if request.background:
        raise ValueError("background is not supported: responses are not stored")
    if request.previous_response_id:
        raise ValueError("previous_response_id is not supported: responses are not stored, send the whole conversation as input")
    return {
        "model": request.model,
        "messages": _messages(request),
        "tools": request.offered_tools,
        "options": request.options,
        "think": think_of(request.reasoning.effort),
        "format": _format(request.text.format),
        "truncate": request.truncation != "disabled",
    }


def _format(text_format: dict[str, Any] | None) -> Any:
    match text_format:
        case {"type": "json_object"}:
            return "json"
        case {"type": "json_schema", "schema": schema}:
            return schema
    return None


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    before = [{"role": "system", "content": request.instructions}] if request.instructions else []
    match request.input:
        case str(text):
            return [*before, {"role": "user", "content": text}]
        case list(items):
            return [*before, *_from_items(items)]
    raise ValueError(f"input must be a string or array: got {type(request.input).__name__}")


def _from_items(items: list[Any]) -> list[dict[str, Any]]:
    """Thinking and calls belong to the message of the assistant that they stand beside."""
    found: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    thinking = ""
    for number, item in enumerate(items):
        if not isinstance(item, dict):
            raise ValueError(f"input[{number}]: must be an object")
        kind = item.get("type") or ("message" if item.get("role") else "")
        if kind == "reasoning":
            thinking = _thinking(item)
        elif kind == "message":
            message = {"role": str(item.get("role") or ""), **_content(item.get("content"), number)}
            if message["role"] == "assistant" and thinking:
                message["thinking"], thinking = thinking, ""
            found.append(message)
        elif kind == "function_call":
            call = _call(item)
            names[call["id"]] = call["function"]["name"]
            _add_call(found, call, thinking)
            thinking = ""
        elif kind == "function_call_output":
            call_id = str(item.get("call_id") or "")
            result = {"role": "tool", "tool_call_id": call_id, "tool_name": names.get(call_id, "")}
            found.append(result | _content(item.get("output"), number))
        elif not kind:
            raise ValueError("input item missing required 'type' field")
        elif kind != "web_search_call":
            raise ValueError(f'input[{number}]: unknown input item type: "{kind}"')
    return found


def _add_call(found: list[dict[str, Any]], call: dict[str, Any], thinking: str) -> None:
    if not found or found[-1]["role"] != "assistant" or thinking:
        found.append({"role": "assistant", "content": "", **({"thinking": thinking} if thinking else {})})
    found[-1].setdefault("tool_calls", []).append(call)


def _content(content: Any, number: int) -> dict[str, Any]:
    if isinstance(content, str):
        return {"content": content}
    if not isinstance(content, list):
        raise ValueError(f"input[{number}]: content must be a string or array")
    texts: list[str] = []
    images: list[str] = []
    for part in content:
        match part:
            case {"type": "input_text" | "output_text" | "text", "text": str(text)}:
                texts.append(text)
            case {"type": "refusal", "refusal": str(text)}:
                texts.append(text)
            case {"type": "input_image", "image_url": str(url)}:
                images.append(image_data(url))
            case {"type": "input_image"}:
                pass  # names a file that is stored elsewhere
            case {"type": "input_file"}:
                raise ValueError("file inputs are not currently supported")
            case {"type": kind}:
                raise ValueError(f"content[{number}]: unknown content type: {kind}")
            case _:
                raise ValueError(f"content[{number}]: must be an object with a type")
    return {"content": "".join(texts)} | ({"images": images} if images else {})


def _thinking(item: dict[str, Any]) -> str:
    """What this API calls encrypted is plain text here."""
    if isinstance(item.get("encrypted_content"), str):
        return str(item["encrypted_content"])
    summary = item.get("summary")
    parts = summary if isinstance(summary, list) else []
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))


def _call(item: dict[str, Any]) -> dict[str, Any]:
    text = item.get("arguments") or "{}"
    try:
        arguments = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"failed to parse function call arguments: {error}") from error
    if not isinstance(arguments, dict):
        raise ValueError("failed to parse function call arguments: not an object")
    return {"id": str(item.get("call_id") or ""), "function": {"name": str(item.get("name") or ""), "arguments": arguments}}
