"""Requests for embeddings: ``/api/embed``, ``/api/embeddings`` and OpenAI's ``/v1/embeddings``.

Source: Ollama's REST API and its OpenAI compatibility.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, WithJsonSchema

from puna.api.generate import GivenOptions, KeepAlive
from puna.api.watched import ANYTHING, Watched


def _texts(value: Any) -> list[str]:
    """A text or a list of texts."""
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("invalid input type")
    return texts


def _texts_or_none(value: Any) -> list[str]:
    return [] if value == "" else _texts(value)


def _some_texts(value: Any) -> list[str]:
    if value == []:
        raise ValueError("invalid input")
    return _texts(value)


def _encoding(value: Any) -> str:
    if not isinstance(value, str) or value.lower() not in ("float", "base64", ""):
        raise ValueError(f"Invalid value for 'encoding_format' = {value}. Supported values: ['float', 'base64'].")
    return value.lower() or "float"


_INPUT = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})


class _Common(Watched):
    model: str = ""
    keep_alive: KeepAlive | None = None
    options: GivenOptions = Field(default_factory=dict)


class EmbedRequest(_Common):
    input: Annotated[list[str], BeforeValidator(_texts_or_none), _INPUT] = Field(
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
    input: Annotated[list[str], BeforeValidator(_some_texts), _INPUT] = Field(default_factory=list)
    dimensions: int = 0
    encoding_format: Annotated[str, BeforeValidator(_encoding), WithJsonSchema({"enum": ["float", "base64"]})] = "float"
