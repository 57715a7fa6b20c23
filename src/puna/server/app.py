"""The server as an ASGI application, and the process that serves it.

Knows which routes there are and what stands before them. Never imports the engine: that lives in runners.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Route

from puna import __version__
from puna.errors import PunaError
from puna.llm.discovery import Machine
from puna.llm.launch import Launcher
from puna.llm.spare import Spare
from puna.server.answering.rendering import Renderers
from puna.server.apis import metrics, openapi
from puna.server.apis.anthropic import messages
from puna.server.apis.native import account, chat, embed, generate, models, ps, rerank
from puna.server.apis.openai import chat as openai_chat
from puna.server.apis.openai import completions, embeddings, responses
from puna.server.apis.openai import models as openai_models
from puna.server.apis.openai import rerank as openai_rerank
from puna.server.http import activation, errors
from puna.server.http.access import ApiKeys, check_exposure, read_keys
from puna.server.http.bodies import BodiesInFlight
from puna.server.http.connections import Connections, allow_many_files, limits_of
from puna.server.http.middleware import CORS, CancelOnDisconnect, LocalHosts, Origins
from puna.server.http.protocol import protocol_for
from puna.server.http.request_id import RequestIds
from puna.server.log import log_to_stderr
from puna.server.metrics import Metrics
from puna.server.pipeline import Pipeline
from puna.server.placing.loading import Launch
from puna.server.placing.scheduler import Scheduler
from puna.settings import Settings, without_effect
from puna.store.store import Store

log = logging.getLogger(__name__)

SHUTDOWN_GRACE_S = 2.0  # for running requests, before their runners are ended
_CANCEL_AFTER_S = 5  # for what is running even then
_BACKLOG = 2048
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
            await asyncio.to_thread(_tidy_up, store)
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
        *embed.routes,
        *rerank.routes,
        *models.routes,
        *openai_chat.routes,
        *completions.routes,
        *openai_models.routes,
        *embeddings.routes,
        *openai_rerank.routes,
        *responses.routes,
        *messages.routes,
        *metrics.routes,
        *openapi.routes,
        *account.routes,
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


def _tidy_up(store: Store) -> None:
    try:
        store.prune()
    except OSError as error:
        log.warning("%s could not be tidied up: %s", store.root, error)


class _Server(uvicorn.Server):
    """Stops in good order: requests that are still running after a grace period get an error, then their runners end."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A second signal ends the wait for running requests."""
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_runners())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
            await asyncio.wait({ending})

    async def _end_runners(self) -> None:
        """Requests hear of their runner's end and can still say so, which one that is cancelled cannot."""
        await asyncio.sleep(SHUTDOWN_GRACE_S)
        assert isinstance(self.config.app, Starlette)
        await self.config.app.state.pipeline.scheduler.close()


def serve(settings: Settings, launch: Launch | None = None) -> None:
    """Serve until SIGINT or SIGTERM, on the sockets that a service manager opened, else at OLLAMA_HOST.

    Running requests get SHUTDOWN_GRACE_S to end; all runners are gone when this returns.
    """
    launcher = Launcher(Spare() if settings.warm_spare and launch is None else None, machine=Machine())
    opened = activation.inherited()
    if opened:
        settings = activation.as_opened(settings, opened)
    _prepare(settings)
    with ExitStack() as listening:
        listeners = [listening.enter_context(listener) for listener in opened or [_listen(settings)]]
        _make(settings, listeners[0], launcher, launch or launcher.launch).run(sockets=listeners)


def _prepare(settings: Settings) -> None:
    """Errors: PunaError when others could use the server without a key."""
    log_to_stderr(settings)
    for line in without_effect():
        log.warning("%s", line)
    check_exposure(settings)
    allow_many_files()


async def serve_on(listener: socket.socket, settings: Settings, launcher: Launcher) -> None:
    """As serve, in this event loop, on a socket that listens already."""
    _prepare(settings)
    await _make(settings, listener, launcher, launcher.launch).serve(sockets=[listener])


def _make(settings: Settings, listener: socket.socket, launcher: Launcher, launch: Launch) -> uvicorn.Server:
    store = Store(settings.models, keep_unused=settings.no_prune)
    app = create_app(settings, store, Scheduler(settings, launch, launcher.machine or Machine()), launcher)
    host, port = listener.getsockname()[:2]
    log.info("Listening on %s:%d (version %s)", host, port, __version__)
    return make_server(app, settings)


def make_server(app: Starlette, settings: Settings) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=protocol_for(Connections(limits_of(settings))),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_CANCEL_AFTER_S,
        timeout_keep_alive=75,
        backlog=_BACKLOG,
    )
    return _Server(config)


def _listen(settings: Settings) -> socket.socket:
    """Errors: PunaError when the address cannot be listened on."""
    family = socket.AF_INET6 if ":" in settings.host.host else socket.AF_INET
    try:
        return socket.create_server((settings.host.host, settings.host.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise PunaError(f"listen tcp {settings.host.host}:{settings.host.port}: {error.strerror}") from error
