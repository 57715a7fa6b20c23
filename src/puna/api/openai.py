"""Requests of the OpenAI-compatible API. Options of the native API may stand beside OpenAI's own fields.

Source: Ollama's OpenAI compatibility.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Container, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema, field_validator

from puna.api import options as model_options
from puna.api.go_json import Request
from puna.api.options import OptionTypeError
from puna.api.watched import ANYTHING, Watched

_DATA_URL = re.compile(r"data:(?:image/(?:jpeg|jpg|png|webp|gif|bmp|tiff))?;base64,")


Budget = Annotated[int, Field(ge=0)]  # tokens of thinking at most


class StreamOptions(Request):
    include_usage: bool = False


class Reasoning(Request):
    effort: str = ""
    max_tokens: Budget | None = None  # of thinking; an extension that other servers have too


class FunctionCall(Request):
    name: str = ""
    arguments: str = ""


class ToolCall(Request):
    id: str = ""
    type: str = "function"
    function: FunctionCall = FunctionCall()


class Message(Request):
    role: str = ""
    content: Any = None
    reasoning: str = ""
    name: str = ""
    tool_calls: list[ToolCall] = Field(default_factory=list)
    tool_call_id: str = ""


def _stop(value: Any) -> Any:
    """A text or a list of texts."""
    return [value] if isinstance(value, str) else value


_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}


MAX_CHOICES = 128
MAX_BIAS = 100

# For the books of whoever serves: nothing in an answer depends on them.
FOR_THE_BOOKS = {
    name: ANYTHING
    for name in (
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "service_tier",
        "prediction",
    )
}


class _Common(Watched):
    asks_nothing: ClassVar[Mapping[str, Container[Any]]] = {
        **FOR_THE_BOOKS,
        "store": (False,),
        "parallel_tool_calls": (True,),
        "modalities": (["text"],),
        "verbosity": ("medium",),
        "echo": (False,),
        "best_of": (1,),
    }

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    stop: Annotated[list[str], WithJsonSchema(_TEXTS)] = Field(default_factory=list)
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    logit_bias: dict[str, float] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None  # an extension that other servers have too
    ignore_eos: bool | None = None  # likewise
    regex: str = ""  # Puna's own, as in the native API
    lark: str = ""

    _list_of_stops = field_validator("stop", mode="before")(_stop)

    @property
    def unknown(self) -> dict[str, Any]:
        return {name: value for name, value in super().unknown.items() if name not in _NATIVE}

    @property
    def options(self) -> dict[str, Any]:
        """As options of the native API; only what was given.

        Errors: ValueError for one of the wrong type; BadRequest.
        """
        given = {
            "num_predict": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "stop": self.stop or None,
            "logit_bias": self.logit_bias,
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
        } | {name: value for name, value in (self.model_extra or {}).items() if name in _NATIVE}
        if any(abs(bias) > MAX_BIAS for bias in (self.logit_bias or {}).values()):
            raise ValueError(f"logit_bias must be between -{MAX_BIAS} and {MAX_BIAS}")
        try:
            model_options.merge(given)
        except OptionTypeError as error:
            raise ValueError(str(error)) from error
        return {name: value for name, value in given.items() if value is not None}


# Options of the native API that may be given as fields; the others have a field of their own here.
_NATIVE = model_options.OF_REQUEST - {"stop", "num_predict", *_Common.model_fields}


class ChatCompletionRequest(_Common):
    messages: list[Message] = Field(default_factory=list)
    add_generation_prompt: bool | None = None  # extensions that other servers have too
    continue_final_message: bool | None = None
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    reasoning: Reasoning = Reasoning()
    reasoning_effort: str = ""
    thinking_token_budget: Budget | None = None  # the same as reasoning.max_tokens, by another server's name
    logprobs: bool = False
    top_logprobs: int = 0

    @property
    def forced_tool(self) -> str | None:
        """The tool that must be called, nothing for any of them; None when none must."""
        return forced_tool(self.tool_choice)

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else self.tools

    @property
    def options(self) -> dict[str, Any]:
        limit = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        budget = self.thinking_token_budget if self.reasoning.max_tokens is None else self.reasoning.max_tokens
        given = {"num_predict": limit, "think_budget": budget}
        return super().options | {name: value for name, value in given.items() if value is not None}


class CompletionRequest(_Common):
    prompt: str = ""
    suffix: str = ""
    logprobs: int | None = None  # so many alternatives to each token

    @field_validator("top_p", mode="after")
    @classmethod
    def _absent_when_zero(cls, value: float | None) -> float | None:
        return value or None


def forced_tool(choice: Any) -> str | None:
    match choice:
        case "required":
            return ""
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name
    return None


_EFFORTS = {
    "none": False,
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "max",
    "ultra": "max",
    "max": "max",
}


def think(request: ChatCompletionRequest) -> bool | str | None:
    """Errors: ValueError for an effort that has no meaning here."""
    return think_of(request.reasoning.effort or request.reasoning_effort)


def think_of(effort: str) -> bool | str | None:
    """Errors: as think."""
    if not effort:
        return None
    if effort not in _EFFORTS:
        known = ", ".join(f'"{name}"' for name in _EFFORTS)
        raise ValueError(f'invalid reasoning value: "{effort}" (must be one of {known})')
    value = _EFFORTS[effort]
    assert isinstance(value, bool | str)
    return value


def native_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """The conversation as the native API takes it; each part of a list of contents becomes a message of its own.

    Errors: ValueError saying what cannot be understood.
    """
    found: list[dict[str, Any]] = []
    tool_names: dict[str, str] = {}
    for message in messages:
        calls = [_native_call(call) for call in message.tool_calls]
        tool_names |= {call.id: call.function.name for call in message.tool_calls}
        parts = _parts(message)
        last = parts[-1] if parts else {}
        if calls:
            last["tool_calls"] = calls
        if message.reasoning:
            last["thinking"] = message.reasoning
        if message.role == "tool":
            last["tool_name"] = message.name or tool_names.get(message.tool_call_id, "")
            last["tool_call_id"] = message.tool_call_id
        found += parts
    return found


def _parts(message: Message) -> list[dict[str, Any]]:
    match message.content:
        case str():
            return [{"role": message.role, "content": message.content}]
        case list():
            return [{"role": message.role, **_part(part)} for part in message.content]
        case None if message.tool_calls:
            return [{"role": message.role, "content": ""}]
        case None:
            raise ValueError("invalid message content type: <nil>")
        case _:
            raise ValueError(f"invalid message content type: {type(message.content).__name__}")


def _part(part: Any) -> dict[str, Any]:
    match part:
        case {"type": "text", "text": str(text)}:
            return {"content": text}
        case {"type": "image_url", "image_url": {"url": str(url)}} | {"type": "image_url", "image_url": str(url)}:
            return {"content": "", "images": [image_data(url)]}
        case {"type": "input_audio", "input_audio": {"data": str(data)}}:
            return {"content": "", "images": [data]}
    raise ValueError("invalid message format")


def image_data(url: str) -> str:
    """The base64 text in a data URL.

    Errors: ValueError when it is none, or no image.
    """
    if url.startswith(("http://", "https://")):
        raise ValueError("image URLs are not currently supported, please use base64 encoded data instead")
    match = _DATA_URL.match(url)
    if match is None:
        raise ValueError("invalid image input")
    data = url[match.end() :]
    try:
        base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise ValueError("invalid image input") from error
    return data


def _native_call(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError("invalid tool call arguments") from error
    if not isinstance(arguments, dict):
        raise ValueError("invalid tool call arguments")
    return {"id": call.id, "function": {"name": call.function.name, "arguments": arguments}}
