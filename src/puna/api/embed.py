"""Requests for embeddings: ``/api/embed``, ``/api/embeddings`` and OpenAI's ``/v1/embeddings``.

Source: Ollama's REST API and its OpenAI compatibility.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Discriminator, Field, Tag, WithJsonSchema

from puna.api.generate import GivenOptions, Image, KeepAlive
from puna.api.go_json import Request
from puna.api.watched import ANYTHING, Watched


class Illustrated(Request):
    """A text and images, as llama-server takes them: a place in the text for each image, in their order."""

    prompt_string: str
    multimodal_data: list[Image] = Field(default_factory=list)


# Told apart before they are read, so that an error is about what was meant.
_Input = Annotated[
    Annotated[str, Tag("text")] | Annotated[Illustrated, Tag("object")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "object"),
]


def _inputs(value: Any) -> list[Any]:
    """One or a list, each a text or an object."""
    inputs = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str | dict) for one in inputs):
        raise ValueError("invalid input type")
    return inputs


def _inputs_or_none(value: Any) -> list[Any]:
    return [] if value == "" else _inputs(value)


def _some_inputs(value: Any) -> list[Any]:
    if value == []:
        raise ValueError("invalid input")
    return _inputs(value)


def _encoding(value: Any) -> str:
    if not isinstance(value, str) or value.lower() not in ("float", "base64", ""):
        raise ValueError(f"Invalid value for 'encoding_format' = {value}. Supported values: ['float', 'base64'].")
    return value.lower() or "float"


_ONE = {"anyOf": [{"type": "string"}, Illustrated.model_json_schema()]}
_INPUT = WithJsonSchema({"anyOf": [*_ONE["anyOf"], {"type": "array", "items": _ONE}]})


class _Common(Watched):
    model: str = ""
    keep_alive: KeepAlive | None = None
    options: GivenOptions = Field(default_factory=dict)


class EmbedRequest(_Common):
    input: Annotated[list[_Input], BeforeValidator(_inputs_or_none), _INPUT] = Field(
        default_factory=list
    )  # none: only load the model
    truncate: bool = True
    dimensions: int = 0


class EmbeddingsRequest(_Common):
    """The older form: one text, its vector as it is."""

    prompt: str = ""


class OpenAIEmbeddingsRequest(Watched):
    asks_nothing: ClassVar[Mapping[str, Container[Any]]] = {"user": ANYTHING}

    model: str = ""
    input: Annotated[list[_Input], BeforeValidator(_some_inputs), _INPUT] = Field(default_factory=list)
    dimensions: int = 0
    encoding_format: Annotated[str, BeforeValidator(_encoding), WithJsonSchema({"enum": ["float", "base64"]})] = "float"
