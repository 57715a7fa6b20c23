"""Requests whose unknown fields are remembered, so that what has no effect can be named.

Knows no API: which fields ask for nothing, each says for itself.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from typing import Any, ClassVar

from pydantic import ConfigDict

from puna.api.go_json import Request

_MAX_NAMED = 20


class Anything(Container[Any]):
    """Every value there is."""

    def __contains__(self, value: object) -> bool:
        return True


ANYTHING = Anything()


class Watched(Request):
    """*asks_nothing* has the values with which an unknown field asks for what is done anyway, or for nothing at all."""

    model_config = ConfigDict(extra="allow")
    asks_nothing: ClassVar[Mapping[str, Container[Any]]] = {}

    @property
    def unused(self) -> list[str]:
        """Sentences about the fields that nobody reads."""
        names = [name for name, value in self.unknown.items() if value not in self.asks_nothing.get(name, ())]
        found = [f"field {json.dumps(name[:100])} is not supported, and has no effect" for name in names[:_MAX_NAMED]]
        return [*found, f"and {len(names) - _MAX_NAMED} more fields"] if len(names) > _MAX_NAMED else found

    @property
    def unknown(self) -> dict[str, Any]:
        """Fields that are given and not declared."""
        return self.model_extra or {}
