"""Requests to put texts in the order in which they answer a query: ``/api/rerank`` and ``/v1/rerank``.

Ollama has no such endpoint; the fields are those that Jina's and Cohere's clients send.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from puna.api.generate import GivenOptions, KeepAlive
from puna.api.watched import Watched


def _texts(value: Any) -> list[str]:
    """Texts, or objects with a text each."""
    if not isinstance(value, list) or not value:
        raise ValueError("documents must be a list of texts that is not empty")
    texts: list[str] = []
    for number, item in enumerate(value):
        text = item.get("text") if isinstance(item, dict) else item
        if not isinstance(text, str):
            raise ValueError(f'documents[{number}] must be a text, or an object with a "text"')
        texts.append(text)
    return texts


_WITH_TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
_DOCUMENTS = {"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "string"}, _WITH_TEXT]}}


class RerankRequest(Watched):
    model: str = ""
    query: str = ""
    documents: Annotated[list[str], BeforeValidator(_texts), WithJsonSchema(_DOCUMENTS)] = Field(default_factory=list)
    top_n: Annotated[int | None, WithJsonSchema({"type": "integer", "minimum": 1})] = None  # only the best so many
    return_documents: bool = False
    raw_scores: bool = False  # Puna's own: as the model gave them, not between 0 and 1
    truncate: bool = True
    keep_alive: KeepAlive | None = None
    options: GivenOptions = Field(default_factory=dict)

    def check(self) -> None:
        """Errors: ValueError for what is missing or has no meaning."""
        if not self.model:
            raise ValueError("model is required")
        if not self.query:
            raise ValueError("query is required")
        if not self.documents:
            raise ValueError("documents must be a list of texts that is not empty")
        if self.top_n is not None and self.top_n < 1:
            raise ValueError("top_n must be at least 1")
