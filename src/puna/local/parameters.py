"""What a request may say, as keywords: types for who writes the program, and the body of the native API that they make."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
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
T = TypeVar("T")


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
    stop: str | list[str]
    think_budget: int


class Common(Options, total=False):
    """*format* is "json" or a JSON schema; *logprobs* asks for those of the answer's tokens and of so many others at each."""

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
    """Errors: TypeError for a keyword that there is none of, and for a prompt that is no text; BadRequest naming the field;
    OSError for an image.
    """
    if not isinstance(prompt, str):
        raise TypeError(f"a prompt is a text, not {_kind(prompt)}")
    fields = _fields(Generate, given)
    if "images" in fields:
        fields["images"] = _images(fields["images"])
    return _parsed(GenerateRequest, {"model": model, "prompt": prompt, "keep_alive": keep_alive, **fields})


def chat_request(model: str, messages: Messages, given: Mapping[str, Any], keep_alive: int) -> ChatRequest:
    """Errors: as generate_request."""
    conversation = _conversation(messages)
    return _parsed(ChatRequest, {"model": model, "messages": conversation, "keep_alive": keep_alive, **_fields(Chat, given)})


def listed(items: Iterable[T], what: str) -> list[T]:
    """Errors: TypeError for one text, which Python would take for a list of its characters."""
    if isinstance(items, str | bytes):
        raise TypeError(f"{what} must be a list, not {_kind(items)}")
    return [*items]


def embedding_inputs(items: Iterable[Any], what: str) -> list[str | list[int]]:
    """Also as the numbers of their tokens. Errors: as listed; TypeError for what is no text."""
    found = listed(items, what)
    for item in found:
        if not isinstance(item, str | list):
            raise TypeError(f"each of {what} is a text, not {_kind(item)}")
    return found


def _fields(kind: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Options go into a field of their own. None is as if nothing were said."""
    unknown = next((name for name in given if name not in kind.__annotations__), None)
    if unknown is not None:
        raise TypeError(f"there is no parameter {unknown!r}{_hint(unknown, kind)}")
    given = {name: value for name, value in given.items() if value is not None}
    fields = {name: value for name, value in given.items() if name not in OF_REQUEST}
    alternatives = fields.pop("logprobs", False)
    if alternatives is not False:
        fields |= {"logprobs": True, "top_logprobs": int(alternatives) if alternatives is not True else 0}
    if "tools" in fields:
        fields["tools"] = listed(fields["tools"], "tools")
    options = {name: value for name, value in given.items() if name in OF_REQUEST}
    if isinstance(options.get("stop"), str):
        options["stop"] = [options["stop"]]
    return {**fields, "options": options}


def _hint(unknown: str, kind: type[Any]) -> str:
    """What was meant, perhaps."""
    if unknown in ("system", "images"):
        return f": in a conversation, {unknown} {'are' if unknown == 'images' else 'is'} part of the messages"
    for other in (Generate, Chat):
        if unknown in other.__annotations__:
            return f" here: it is one of {other.__name__.lower()}"
    from difflib import get_close_matches

    near = get_close_matches(unknown, kind.__annotations__, 1, cutoff=0.85)
    return f"; did you mean {near[0]!r}?" if near else ""


def _parsed(kind: type[R], fields: Mapping[str, Any]) -> R:
    """Checked as the body of a request over HTTP is."""
    try:
        body = json.dumps(fields, allow_nan=False, default=_plain).encode()
    except (TypeError, ValueError) as error:
        raise BadRequest(f"this is nothing that a model could be sent: {error}") from error
    return go_json.parse(kind, body)


def _plain(value: object) -> object:
    """Numbers and mappings of other libraries are numbers and mappings."""
    match value:
        case Integral():
            return int(value)
        case Real():
            return float(value)
        case Mapping():
            return dict(value)
    raise TypeError(f"{_kind(value)} is not what JSON has")


def _conversation(messages: Messages) -> list[dict[str, Any]]:
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if isinstance(messages, Mapping | bytes) or not isinstance(messages, Iterable):
        raise TypeError(f"a conversation is a text or a list of messages, not {_kind(messages)}")
    return [*map(_message, messages)]


def _message(message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TypeError(f'a message is a mapping as {{"role": "user", "content": "..."}}, not {_kind(message)}')
    if not message.get("images"):
        return dict(message)
    return {**message, "images": _images(message["images"])}


def _images(images: Sequence[Image]) -> list[str]:
    return [_image(image) for image in listed(images, "images")]


def _image(image: Image) -> str:
    match image:
        case str():
            if "." in image and not image.startswith("data:"):  # which base64 has none of, and most names of files have
                raise BadRequest(f"images: {image[:80]!r} is not base64; what names a file is a Path")
            return image
        case Path():
            return base64.b64encode(image.read_bytes()).decode()
        case bytes() | bytearray() | memoryview():
            return base64.b64encode(image).decode()
    raise TypeError(f"an image is bytes, a Path, or base64, not {_kind(image)}")


def _kind(value: object) -> str:
    return type(value).__name__
