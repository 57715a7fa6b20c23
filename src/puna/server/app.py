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
from starlette.types import ExceptionHandler

from puna import packed_files
from puna.errors import PunaError
from puna.llm.launch import Launcher
from puna.server.apis.routes import all_routes
from puna.server.http import errors
from puna.server.http.access import ApiKeys, read_keys
from puna.server.http.bodies import BodiesInFlight
from puna.server.http.middleware import CORS, CancelOnDisconnect, LocalHosts, Origins
from puna.server.http.request_id import RequestIds
from puna.server.metrics import Metrics
from puna.server.pipeline import Pipeline
from puna.server.placing.scheduler import Scheduler
from puna.server.rendering import Renderers
from puna.settings import Settings
from puna.store.store import Store

log = logging.getLogger(__name__)

_ERRORS: dict[type[Exception], ExceptionHandler] = {
    PunaError: errors.on_error,
    ClientDisconnect: errors.on_disconnect,
    HTTPException: errors.on_http_error,
    Exception: errors.on_error,
}


def create_app(settings: Settings, store: Store, scheduler: Scheduler, launcher: Launcher | None = None) -> Starlette:
    """Routes find what they need in ``Pipeline.of(request)``.

    *launcher*: what the scheduler starts runners with, if it has something to open and close.
    """
    launcher = launcher or Launcher()
    pipeline = Pipeline(settings, store, scheduler, Metrics(scheduler.models, launcher.spare), Renderers())
    app = Starlette(
        routes=all_routes(),
        middleware=_middleware(settings),
        lifespan=lambda _: _lifespan(pipeline, launcher),
        exception_handlers=_ERRORS,
    )
    app.state.pipeline = pipeline
    return app


@asynccontextmanager
async def _lifespan(pipeline: Pipeline, launcher: Launcher) -> AsyncGenerator[None, None]:
    launcher.open()
    search = asyncio.create_task(pipeline.scheduler.machine.look(), name="search for devices")
    try:
        await asyncio.to_thread(_tidy_up, pipeline.store, pipeline.settings.packed_cache)
        yield
    finally:
        search.cancel()
        await asyncio.wait({search})
        await pipeline.scheduler.close()
        await launcher.close()
        await pipeline.renderers.close()
        await asyncio.to_thread(pipeline.store.close)


def _middleware(settings: Settings) -> list[Middleware]:
    """What stands before every route, outermost first."""
    found = [Middleware(RequestIds), Middleware(CORS, Origins(settings.origins))]
    if settings.host.is_loopback:
        found.append(Middleware(LocalHosts))
    if keys := read_keys(settings):
        found.append(Middleware(ApiKeys, keys, isolate=settings.isolate_keys))
    return [*found, Middleware(CancelOnDisconnect), Middleware(BodiesInFlight)]


def _tidy_up(store: Store, packed_bytes: int) -> None:
    packed_files.tidy(store.root, packed_bytes)
    try:
        store.prune()
    except OSError as error:
        log.warning("%s could not be tidied up: %s", store.root, error)
