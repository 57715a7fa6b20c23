"""The server as an ASGI application.

Knows which routes there are and what stands before them. Never imports the engine: that lives in runners.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.types import ExceptionHandler

from puna.errors import PunaError
from puna.llm.launch import Launcher
from puna.server.apis.routes import all_routes
from puna.server.http import errors
from puna.server.http.access import ApiKeys, read_keys
from puna.server.http.bodies import BodiesInFlight
from puna.server.http.middleware import CORS, CancelOnDisconnect, LocalHosts, Origins
from puna.server.http.request_id import RequestIds
from puna.server.http.trace_context import TraceContext
from puna.server.placing.placement import Placement
from puna.server.running import at_work, pipeline_of
from puna.settings import Settings
from puna.store.store import Store

_ERRORS: dict[type[Exception], ExceptionHandler] = {
    PunaError: errors.on_error,
    ClientDisconnect: errors.on_disconnect,
    HTTPException: errors.on_http_error,
    Exception: errors.on_error,
}


def create_app(settings: Settings, store: Store, scheduler: Placement, launcher: Launcher | None = None) -> Starlette:
    """Routes find what they need in ``Pipeline.of(request)``.

    *launcher*: what the scheduler starts runners with, if it has something to open and close.
    """
    launcher = launcher or Launcher()
    pipeline = pipeline_of(settings, store, scheduler, launcher)
    app = Starlette(
        routes=all_routes(),
        middleware=_middleware(settings),
        lifespan=lambda _: at_work(pipeline, launcher),
        exception_handlers=_ERRORS,
    )
    app.state.pipeline = pipeline
    return app


def _middleware(settings: Settings) -> list[Middleware]:
    """What stands before every route, outermost first."""
    found = [Middleware(RequestIds), Middleware(CORS, Origins(settings.origins))]
    if settings.host.is_loopback:
        found.append(Middleware(LocalHosts))
    if keys := read_keys(settings):
        found.append(Middleware(ApiKeys, keys, isolate=settings.isolate_keys))
    if settings.otlp_endpoint:
        found.append(Middleware(TraceContext))
    return [*found, Middleware(CancelOnDisconnect), Middleware(BodiesInFlight)]
