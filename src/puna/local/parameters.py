"""What a request may say, as keywords: types for who writes the program, and the body of the native API that they make."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from puna.api import go_json
from puna.api.generate import ChatRequest, GenerateRequest
from puna.api.options import OF_REQUEST
from puna.errors import BadRequest

Message = Mapping[str, Any]  # role and content, and what else /api/chat takes: images, tool_calls
Messages = str | Sequence[Message]  # a text is one message of the user's
Image = bytes | Path | str  # a string is base64

R = TypeVar("R", bound=go_json.Request)


class Options(TypedDict, total=False):
    """How tokens are chosen and when an answer ends; the defaults are the model's, then the server's (``puna help``)."""

    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    top_n_sigma: float
    repeat_last_n: int
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    xtc_probability: float
    xtc_threshold: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: list[str]
    samplers: list[str]
    logit_bias: dict[int, float]
    num_predict: int
    num_keep: int
    min_tokens: int
    ignore_eos: bool
    stop: list[str]
    think_budget: int


class Common(Options, total=False):
    """*format* is "json" or a JSON schema; *logprobs* asks for those of the answer's tokens with so many alternatives to each."""

    format: str | Mapping[str, Any]
    think: bool | str
    logprobs: int
    regex: str
    lark: str
    truncate: bool
    shift: bool


class Generate(Common, total=False):
    """*raw*: the prompt as it is, without the model's template."""

    system: str
    suffix: str
    images: Sequence[Image]
    raw: bool


class Chat(Common, total=False):
    tools: Sequence[Mapping[str, Any]]


def generate_request(model: str, prompt: str, given: Mapping[str, Any], keep_alive: int) -> GenerateRequest:
    """Errors: TypeError for a keyword that there is none of; BadRequest naming the field; OSError for an image."""
    fields = _fields(Generate, given)
    if "images" in fields:
        fields["images"] = [_image(image) for image in fields["images"]]
    return _parsed(GenerateRequest, {"model": model, "prompt": prompt, "keep_alive": keep_alive, **fields})


def chat_request(model: str, messages: Messages, given: Mapping[str, Any], keep_alive: int) -> ChatRequest:
    """Errors: as generate_request."""
    conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else [*map(_message, messages)]
    return _parsed(ChatRequest, {"model": model, "messages": conversation, "keep_alive": keep_alive, **_fields(Chat, given)})


def _fields(kind: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Options go into a field of their own."""
    unknown = next((name for name in given if name not in kind.__annotations__), None)
    if unknown is not None:
        raise TypeError(f"there is no parameter {unknown!r}")
    fields = {name: value for name, value in given.items() if name not in OF_REQUEST}
    if "logprobs" in fields:
        fields |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
    if "tools" in fields:
        fields["tools"] = [*fields["tools"]]
    return {**fields, "options": {name: value for name, value in given.items() if name in OF_REQUEST}}


def _parsed(kind: type[R], fields: Mapping[str, Any]) -> R:
    """Checked as the body of a request over HTTP is."""
    try:
        body = json.dumps(fields).encode()
    except (TypeError, ValueError) as error:
        raise BadRequest(f"this is nothing that a model could be sent: {error}") from error
    return go_json.parse(kind, body)


def _message(message: Message) -> dict[str, Any]:
    if not message.get("images"):
        return dict(message)
    return {**message, "images": [_image(image) for image in message["images"]]}


def _image(image: Image) -> str:
    if isinstance(image, str):
        return image
    return base64.b64encode(image if isinstance(image, bytes) else image.read_bytes()).decode()
