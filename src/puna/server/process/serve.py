"""The process that serves the application: it listens, and stops in good order."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from contextlib import ExitStack
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from uvicorn.server import HANDLED_SIGNALS

from puna import __version__
from puna.errors import PunaError
from puna.llm.discovery import Machine
from puna.llm.launch import Launcher
from puna.llm.spare import Spare
from puna.server.app import create_app
from puna.server.http.access import check_exposure
from puna.server.placing.loading import Launch
from puna.server.placing.placement import Placement
from puna.server.process import activation
from puna.server.process.connections import Connections, allow_many_files, limits_of
from puna.server.process.log import log_to_stderr
from puna.server.process.protocol import protocol_for
from puna.server.running import scheduler_of, store_of
from puna.settings import Settings, without_effect

log = logging.getLogger(__name__)

SHUTDOWN_GRACE_S = 2.0  # for running requests, before their runners are ended
_CANCEL_AFTER_S = 5  # for what is running even then
_BACKLOG = 2048


class _Server(uvicorn.Server):
    """Stops in good order: requests that are still running after a grace period get an error, then their runners end."""

    def heed_signals(self) -> None:
        """Also while the server starts: one that comes then lets it start and stop, in good order."""
        if threading.current_thread() is threading.main_thread():
            for number in HANDLED_SIGNALS:
                signal.signal(number, self.handle_exit)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A second signal ends the wait for running requests."""
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_runners())
        try:
            await super().shutdown(sockets)
            if self.force_exit:  # it leaves this out, and what the application does then ends as a cancelled task: in a traceback
                await self.lifespan.shutdown()
        finally:
            ending.cancel()
            await asyncio.wait({ending})

    async def _end_runners(self) -> None:
        """Requests hear of their runner's end and can still say so, which one that is cancelled cannot."""
        await asyncio.sleep(SHUTDOWN_GRACE_S)
        assert isinstance(self.config.app, Starlette)
        await self.config.app.state.pipeline.scheduler.close()


def serve(settings: Settings, launch: Launch | None = None, *, scheduler: Placement | None = None) -> None:
    """Serve until SIGINT or SIGTERM, on the sockets that a service manager opened, else at OLLAMA_HOST.

    *scheduler*: who finds places for requests, if that is not to be this machine.

    Running requests get SHUTDOWN_GRACE_S to end; all runners are gone when this returns.
    """
    has_spare = settings.warm_spare and launch is None and scheduler is None
    launcher = Launcher(Spare() if has_spare else None, machine=Machine())
    opened = activation.inherited()
    if opened:
        settings = activation.as_opened(settings, opened)
    _prepare(settings)
    with ExitStack() as listening:
        listeners = [listening.enter_context(listener) for listener in opened or [_listen(settings)]]
        placement = scheduler or scheduler_of(settings, launcher, launch)
        _make(settings, listeners[0], launcher, placement).run(sockets=listeners)


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
    await _make(settings, listener, launcher, scheduler_of(settings, launcher)).serve(sockets=[listener])


def _make(settings: Settings, listener: socket.socket, launcher: Launcher, scheduler: Placement) -> uvicorn.Server:
    app = create_app(settings, store_of(settings), scheduler, launcher)
    server = make_server(app, settings)
    server.heed_signals()  # before anybody can tell that there is a server
    host, port = listener.getsockname()[:2]
    log.info("Listening on %s:%d (version %s)", host, port, __version__)
    return server


def make_server(app: Starlette, settings: Settings) -> _Server:
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
