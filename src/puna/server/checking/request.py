"""What the APIs hand on when they have read a request: all of them in the terms of the native API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from puna import wire
from puna.api.generate import ChatRequest, GenerateRequest
from puna.server.http.caller import Caller


@dataclass(frozen=True)
class InferenceRequest:
    """A request for an answer."""

    caller: Caller
    native: ChatRequest | GenerateRequest
    defaults: Mapping[str, Any] = field(default_factory=dict)  # options that count less than the model's
    unused: Sequence[str] = ()  # what of the client's request has no effect
    thinks_if_able: bool = False  # to ask for thinking is no error where the model cannot
    is_raw_without_template: bool = False  # a model that was not made for conversations continues the prompt as it is


@dataclass(frozen=True)
class EmbeddingRequest:
    """A request for the vectors of texts, or for how well they answer a query."""

    caller: Caller
    model: str
    texts: wire.EmbeddingRequest
    options: Mapping[str, Any] = field(default_factory=dict)
    keep_alive: float | None = None
    unused: Sequence[str] = ()
