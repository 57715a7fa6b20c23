"""The server as an ASGI application.

Knows which routes there are and what stands before them. Never imports the engine: that lives in runners.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Route

from puna import packed_files
from puna.errors import PunaError
from puna.llm.launch import Launcher
from puna.server.answering.rendering import Renderers
from puna.server.apis import metrics
from puna.server.apis.native import account, chat, generate, ps
from puna.server.http import errors
from puna.server.http.access import ApiKeys, read_keys
from puna.server.http.bodies import BodiesInFlight
from puna.server.http.later import Later
from puna.server.http.middleware import CORS, CancelOnDisconnect, LocalHosts, Origins
from puna.server.http.request_id import RequestIds
from puna.server.metrics import Metrics
from puna.server.pipeline import Pipeline
from puna.server.placing.scheduler import Scheduler
from puna.settings import Settings
from puna.store.store import Store

log = logging.getLogger(__name__)

_APIS = "puna.server.apis"
# What a question at a terminal does not need: prefixes of paths, and the modules of their routes.
_LATER: dict[tuple[str, ...], tuple[str, ...]] = {
    ("/api/tags", "/api/show", "/api/create", "/api/pull", "/api/blobs/", "/api/copy", "/api/delete"): ("native.models",),
    ("/api/embed", "/api/rerank"): ("native.embed", "native.rerank"),
    ("/v1/",): (
        *("openai.chat", "openai.completions", "openai.models", "openai.embeddings", "openai.rerank", "openai.responses"),
        "anthropic.messages",
    ),
    ("/openapi.json",): ("openapi",),
}
_HEAD_PATHS = frozenset({"/", "/health", "/api/version", "/api/tags"})


def create_app(settings: Settings, store: Store, scheduler: Scheduler, launcher: Launcher | None = None) -> Starlette:
    """Routes find what they need in ``Pipeline.of(request)``.

    *launcher*: what the scheduler starts runners with, if it has something to open and close.
    """
    launcher = launcher or Launcher()
    renderers = Renderers()

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None, None]:
        launcher.open()
        looking = asyncio.create_task(scheduler.machine.look(), name="search for devices")
        try:
            await asyncio.to_thread(_tidy_up, store, settings.packed_cache)
            yield
        finally:
            looking.cancel()
            await asyncio.wait({looking})
            await scheduler.close()
            await launcher.close()
            await renderers.close()
            await asyncio.to_thread(store.close)

    middleware = [Middleware(RequestIds), Middleware(CORS, Origins(settings.origins))]
    if settings.host.is_loopback:
        middleware.append(Middleware(LocalHosts))
    if keys := read_keys(settings):
        middleware.append(Middleware(ApiKeys, keys, isolate=settings.isolate_keys))
    middleware += [Middleware(CancelOnDisconnect), Middleware(BodiesInFlight)]
    routes: list[BaseRoute] = [
        *ps.routes,
        *generate.routes,
        *chat.routes,
        *metrics.routes,
        *account.routes,
        *(Later(prefixes, [f"{_APIS}.{name}" for name in names], _take_head_from) for prefixes, names in _LATER.items()),
    ]
    for route in routes:
        _take_head_from(route)
    app = Starlette(
        routes=routes,
        middleware=middleware,
        lifespan=lifespan,
        exception_handlers={
            PunaError: errors.on_error,
            ClientDisconnect: errors.on_disconnect,
            HTTPException: errors.on_http_error,
            Exception: errors.on_error,
        },
    )
    app.state.pipeline = Pipeline(settings, store, scheduler, Metrics(scheduler.models, launcher.spare), renderers)
    return app


def _take_head_from(route: BaseRoute) -> None:
    """Starlette has every GET answer HEAD as well; here some paths do, and elsewhere it is a method that is not allowed."""
    if isinstance(route, Route) and route.methods and "GET" in route.methods and route.path not in _HEAD_PATHS:
        route.methods.discard("HEAD")


def _tidy_up(store: Store, packed_bytes: int) -> None:
    packed_files.tidy(store.root, packed_bytes)
    try:
        store.prune()
    except OSError as error:
        log.warning("%s could not be tidied up: %s", store.root, error)
