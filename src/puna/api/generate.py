"""Requests and replies of ``/api/generate``, ``/api/chat``, ``/api/ps`` and ``/api/version``.

Replies carry None for what is to be left out; zero counts and durations are left out too.

Source: Ollama's REST API.
"""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from puna.api import options as model_options
from puna.api.go_json import Request
from puna.api.watched import Watched
from puna.settings import FOREVER, parse_duration

_MAX_SECONDS = (1 << 63) / 1e9  # what Go can hold; longer is for ever
THINK_LEVELS = ("high", "medium", "low", "max")


def _keep_alive(value: Any) -> float:
    """Seconds; FOREVER for anything negative."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        names: dict[type, str] = {bool: "bool", list: "[]interface {}", dict: "map[string]interface {}"}
        raise ValueError(f"Unsupported type: '{names.get(type(value), type(value).__name__)}'")
    seconds = parse_duration(value) if isinstance(value, str) else float(value)
    return seconds if 0 <= seconds < _MAX_SECONDS else FOREVER


def _think(value: Any) -> bool | str:
    if isinstance(value, str):
        if value not in THINK_LEVELS:
            raise ValueError(f'invalid think value: "{value}" (must be "high", "medium", "low", "max", true, or false)')
        return value
    if not isinstance(value, bool):
        raise ValueError('think must be a boolean or string ("high", "medium", "low", "max", true, or false)')
    return value


def _image(value: Any) -> bytes:
    if not isinstance(value, str):
        raise ValueError("images must be base64 strings")
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise ValueError(f"illegal base64 data in images: {error}") from error


# What validators take is more than the types they make: the API's description is told.
KeepAlive = Annotated[
    float,
    BeforeValidator(_keep_alive),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string", "description": "as Go writes durations: 1h30m, 300ms"}]}),
]
Think = Annotated[
    bool | str, BeforeValidator(_think), WithJsonSchema({"anyOf": [{"type": "boolean"}, {"enum": list(THINK_LEVELS)}]})
]
Image = Annotated[bytes, BeforeValidator(_image), WithJsonSchema({"type": "string", "contentEncoding": "base64"})]
Format = Annotated[Any, WithJsonSchema({"anyOf": [{"enum": ["json", ""]}, {"type": "object"}]})]
GivenOptions = Annotated[dict[str, Any], WithJsonSchema(model_options.json_schema())]
Role = Annotated[str, BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)]


class _Common(Watched):
    """What generate and chat have in common."""

    model: str = ""
    stream: bool = True
    format: Format = None
    keep_alive: KeepAlive | None = None
    options: GivenOptions = Field(default_factory=dict)
    think: Think | None = None
    truncate: bool = True
    shift: bool = True
    logprobs: bool = False
    top_logprobs: int = 0
    regex: str = ""  # Puna's own: the answer matches this regular expression
    lark: str = ""  # Puna's own: the answer follows this grammar, in the syntax of llguidance
    projector: str = ""  # Puna's own: a file that a GGUF file named as the model sees with
    debug_render_only: bool = Field(False, alias="_debug_render_only")

    model_config = ConfigDict(populate_by_name=True)


class GenerateRequest(_Common):
    prompt: str = ""
    suffix: str = ""
    system: str = ""
    template: str = ""
    context: list[int] = Field(default_factory=list)
    raw: bool = False
    images: list[Image] = Field(default_factory=list)


class ToolCallFunction(Request):
    name: str = ""
    index: int = 0
    arguments: dict[str, Any] = Field(default_factory=dict)


class ToolCall(Request):
    id: str = ""
    function: ToolCallFunction = ToolCallFunction()


class Message(Request):
    role: Role = ""
    content: str = ""
    thinking: str = ""
    images: list[Image] = Field(default_factory=list)
    tool_calls: list[ToolCall] = Field(default_factory=list)
    tool_name: str = ""
    tool_call_id: str = ""


class ChatRequest(_Common):
    messages: list[Message] = Field(default_factory=list)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    # Puna's own, with the meaning they have for Hugging Face's chat templates; without them an answer that is begun is continued.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ReplyFunction(BaseModel):
    index: int  # of the call within the reply
    name: str
    arguments: dict[str, Any]


class ReplyCall(BaseModel):
    id: str
    function: ReplyFunction


class ReplyTopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ReplyLogprob(ReplyTopLogprob):
    top_logprobs: list[ReplyTopLogprob] | None = None


class ReplyMessage(BaseModel):
    role: str = "assistant"
    content: str = ""
    thinking: str | None = None
    tool_calls: list[ReplyCall] | None = None


class _GenerateHead(BaseModel):
    model: str
    created_at: str
    response: str = ""
    thinking: str | None = None
    logprobs: list[ReplyLogprob] | None = None
    done: bool = False
    done_reason: str | None = None
    context: list[int] | None = None


class _ChatHead(BaseModel):
    model: str
    created_at: str
    message: ReplyMessage = ReplyMessage()
    logprobs: list[ReplyLogprob] | None = None
    done: bool = False
    done_reason: str | None = None


class Metrics(BaseModel):
    """Nanoseconds and tokens; None where zero."""

    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    cached_count: int | None = None  # Puna's own: tokens of the prompt that were not computed again
    truncated_count: int | None = None  # Puna's own: tokens of the prompt that were left out since they did not fit
    truncated_messages: int | None = None  # Puna's own: messages that were left out whole
    warnings: list[str] | None = None  # Puna's own: what of the request had no effect


class GenerateReply(Metrics, _GenerateHead):
    pass


class ChatReply(Metrics, _ChatHead):
    pass


class RunningModel(BaseModel):
    name: str
    model: str
    size: int
    digest: str
    details: dict[str, Any]
    expires_at: str
    size_vram: int
    context_length: int
    node: str | None = None  # of a cluster


class PsReply(BaseModel):
    models: list[RunningModel]


class VersionReply(BaseModel):
    version: str
