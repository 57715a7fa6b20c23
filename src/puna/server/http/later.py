"""Routes whose modules are imported when a request first asks for one of their paths.

A server starts for one question of a person at a terminal, too: what that question does not need, it need not wait for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send

_CHOSEN = "puna.route"


class Later(BaseRoute):
    """The ``routes`` of modules, which are all below these prefixes. *prepare* is called with each route once."""

    def __init__(self, prefixes: Sequence[str], modules: Sequence[str], prepare: Callable[[Route], None]) -> None:
        self._prefixes = tuple(prefixes)
        self._modules = modules
        self._prepare = prepare

    @cached_property
    def routes(self) -> list[Route]:
        found: list[Route] = [route for name in self._modules for route in importlib.import_module(name).routes]
        for route in found:
            assert route.path.startswith(self._prefixes), route.path
            self._prepare(route)
        return found

    def matches(self, scope: Scope) -> tuple[Match, Any]:
        """As Starlette looks through a list: the first that fits wholly, else the first of which only the method does not."""
        if scope["type"] != "http" or not scope["path"].startswith(self._prefixes):
            return Match.NONE, {}
        best: tuple[Match, Any] = (Match.NONE, {})
        for route in self.routes:
            match, child = route.matches(scope)
            if match is Match.FULL or (match is Match.PARTIAL and best[0] is Match.NONE):
                best = match, {**child, _CHOSEN: route}
            if match is Match.FULL:
                break
        return best

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await scope[_CHOSEN].handle(scope, receive, send)


def flattened(routes: Iterable[BaseRoute]) -> Iterator[BaseRoute]:
    for route in routes:
        if isinstance(route, Later):
            yield from route.routes
        else:
            yield route
