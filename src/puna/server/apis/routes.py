"""The routes of all APIs."""

from __future__ import annotations

from starlette.routing import Route

from puna.server.apis import metrics, openapi
from puna.server.apis.anthropic import messages
from puna.server.apis.native import account, chat, embed, generate, models, ps, rerank
from puna.server.apis.openai import chat as openai_chat
from puna.server.apis.openai import completions, embeddings, responses
from puna.server.apis.openai import models as openai_models
from puna.server.apis.openai import rerank as openai_rerank

_NATIVE = [ps, generate, chat, embed, rerank, models, account]
_OPENAI = [openai_chat, completions, openai_models, embeddings, openai_rerank, responses]
_HEAD_PATHS = frozenset({"/", "/health", "/api/version", "/api/tags"})


def all_routes() -> list[Route]:
    routes = [route for module in (*_NATIVE, *_OPENAI, messages, metrics, openapi) for route in module.routes]
    for route in routes:
        _take_head_from(route)
    return routes


def _take_head_from(route: Route) -> None:
    """Starlette has every GET answer HEAD as well; here some paths do, and elsewhere it is a method that is not allowed."""
    if route.methods and "GET" in route.methods and route.path not in _HEAD_PATHS:
        route.methods.discard("HEAD")
