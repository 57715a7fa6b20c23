"""Serving an engine that is still being made, and ending in bounded time.

Knows nothing of arguments or of how an engine is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Generator
from types import FrameType

import uvicorn

from puna.errors import LoadError, PunaError
from puna.runner.app import make_app
from puna.runner.service import EngineService, Handle, NotLoaded
from puna.runner.tally import Tally
from puna.wire import (
    CompletionReply,
    CompletionRequest,
    EmbeddingReply,
    EmbeddingRequest,
    Failed,
    Health,
    LoadReply,
    LoadRequest,
)

log = logging.getLogger(__name__)

CLOSE_S = 3.0  # for the engine to end its requests and free its memory
DRAIN_S = 1  # for the last lines to reach the clients
EXIT_S = 6.0  # after a signal the process is gone, whatever hangs


class StartingEngine:
    """An EngineService that makes the real one in a thread, and stands for it until it is there.

    With *load*, the model is loaded as soon as the engine is made, and a failure shows in health.
    """

    def __init__(self, make: Callable[[], EngineService], load: LoadRequest | None = None) -> None:
        self._made = threading.Event()
        self._engine: EngineService | None = None
        self._error: PunaError | None = None
        self._after_step: list[Callable[[], None]] = []
        threading.Thread(target=self._start, args=(make, load), name="engine-start", daemon=True).start()

    def _start(self, make: Callable[[], EngineService], load: LoadRequest | None) -> None:
        try:
            engine = make()
            engine.after_step(self._step_ended)
            self._engine = engine
            self._made.set()
            if load is not None:
                reply = self._engine.load(load)
                if not reply.success:
                    raise LoadError(reply.error or "the model does not fit into memory")
        except PunaError as error:
            log.error("the model cannot be used: %s", error)
            self._error = error
        except Exception as error:
            log.exception("the engine failed to start")
            self._error = LoadError(f"the engine failed to start: {type(error).__name__}: {error}")
        finally:
            self._made.set()

    def _step_ended(self) -> None:
        for call in self._after_step:
            call()

    def after_step(self, call: Callable[[], None]) -> None:
        self._after_step.append(call)

    def _get(self) -> EngineService:
        if self._engine is not None:
            return self._engine
        if self._error is not None:
            raise self._error
        raise NotLoaded

    def health(self) -> Health:
        if self._error is not None:
            return Health(status="error", error=str(self._error))
        return Health(status="launched") if self._engine is None else self._engine.health()

    def load(self, request: LoadRequest) -> LoadReply:
        """Waits for the engine to be made; a later success clears the error of an earlier attempt."""
        self._made.wait()
        reply = self._get().load(request)
        if reply.success:
            self._error = None
        return reply

    def submit(self, request: CompletionRequest, emit: Callable[[CompletionReply], None]) -> Handle:
        return self._get().submit(request, emit)

    def embed(self, request: EmbeddingRequest, emit: Callable[[EmbeddingReply | Failed], None]) -> Handle:
        return self._get().embed(request, emit)

    def tokenize(self, text: str, add_special: bool) -> list[int]:
        return self._get().tokenize(text, add_special)

    def detokenize(self, tokens: list[int]) -> str:
        return self._get().detokenize(tokens)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


class _Server(uvicorn.Server):
    """uvicorn with the engine closed first, so that streams end with their terminal line, and a clean exit status."""

    def __init__(self, config: uvicorn.Config, service: EngineService, take_no_more: Callable[[], None]) -> None:
        super().__init__(config)
        self._service = service
        self._take_no_more = take_no_more

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:  # nothing new while the engine ends what it has
            server.close()
        self._take_no_more()
        try:
            await asyncio.wait_for(asyncio.to_thread(self._service.close), CLOSE_S)
        except TimeoutError:
            log.warning("the engine did not close within %s s", CLOSE_S)
        except Exception:
            log.exception("the engine failed to close")
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            self.should_exit = True
            # A native call that never returns must not keep the process, nor the memory it holds.
            timer = threading.Timer(EXIT_S, os._exit, args=(0,))
            timer.daemon = True
            timer.start()


def make_server(
    service: EngineService, tally: Tally | None = None, take_no_more: Callable[[], None] = lambda: None
) -> uvicorn.Server:
    """*take_no_more* ends what else brings requests, before the engine is closed."""
    config = uvicorn.Config(
        make_app(service, tally or Tally()),
        http="httptools",
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        date_header=False,
        timeout_keep_alive=120,  # longer than a client keeps idle connections: it never writes into one we just closed
        timeout_graceful_shutdown=DRAIN_S,
    )
    return _Server(config, service, take_no_more)


def serve(service: EngineService, listener: socket.socket, tally: Tally, take_no_more: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT."""
    make_server(service, tally, take_no_more).run(sockets=[listener])
