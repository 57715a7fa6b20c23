"""The server around a runner's HTTP door: it ends within bounded time, with the engine closed first."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Generator

import uvicorn

from puna.runner.process.discover import discover
from puna.runner.process.serve import DRAIN_S, close, on_signal
from puna.runner.service import EngineService
from puna.runner.transport.counters import Counters
from puna.runner.transport.http import Door, make_app


class _Server(uvicorn.Server):
    """uvicorn with the engine closed first, so that streams end with their terminal line, and a clean exit status."""

    def __init__(self, config: uvicorn.Config, service: EngineService, door: Door) -> None:
        super().__init__(config)
        self._service = service
        self._door = door

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:  # nothing new while the engine ends what it has
            server.close()
        self._door.close()
        await asyncio.to_thread(close, self._service)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        on_signal(self._end)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end(self) -> None:
        self.should_exit = True


def make_server(service: EngineService, key: str) -> uvicorn.Server:
    counters = Counters()
    door = Door(service, counters, discover)
    config = uvicorn.Config(
        make_app(service, counters, door, key),
        http="httptools",
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=int(DRAIN_S),
    )
    return _Server(config, service, door)


def serve(service: EngineService, listener: socket.socket, key: str) -> None:
    """Serve until SIGTERM or SIGINT."""
    make_server(service, key).run(sockets=[listener])
