"""The routes of all APIs."""

from __future__ import annotations

from starlette.routing import BaseRoute, Route

from puna.server.apis import metrics
from puna.server.apis.native import chat, generate, ps
from puna.server.http.later import Later

_APIS = "puna.server.apis"
# What a question at a terminal does not need: prefixes of paths, and the modules of their routes.
_LATER: dict[tuple[str, ...], tuple[str, ...]] = {
    ("/api/tags", "/api/show", "/api/create", "/api/pull", "/api/push", "/api/blobs", "/api/copy", "/api/delete"): (
        "native.models",
    ),
    ("/api/embed", "/api/rerank"): ("native.embed", "native.rerank"),
    ("/api/status", "/api/me", "/api/signout"): ("native.account",),
    ("/v1/",): (
        *("openai.chat", "openai.completions", "openai.models", "openai.embeddings", "openai.rerank", "openai.responses"),
        "anthropic.messages",
    ),
    ("/api/search",): ("native.search",),
    ("/api/engine",): ("engine",),
    ("/web/",): ("page",),
    ("/openapi.json",): ("openapi",),
}
_HEAD_PATHS = frozenset({"/", "/health", "/api/version", "/api/tags"})


def all_routes() -> list[BaseRoute]:
    routes = [*ps.routes, *generate.routes, *chat.routes, *metrics.routes]
    for route in routes:
        _take_head_from(route)
    later = (Later(prefixes, [f"{_APIS}.{name}" for name in names], _take_head_from) for prefixes, names in _LATER.items())
    return [*routes, *later]


def _take_head_from(route: Route) -> None:
    """Starlette has every GET answer HEAD as well; here some paths do, and elsewhere it is a method that is not allowed."""
    if route.methods and "GET" in route.methods and route.path not in _HEAD_PATHS:
        route.methods.discard("HEAD")
