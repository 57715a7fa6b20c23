"""The way to the engine: commands are done as they come, and replies go to whoever takes them (an Outlet).

Knows neither sockets nor HTTP. Every command but a cancellation gets exactly one last reply.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import msgspec

from puna.errors import BadRequest, Overloaded
from puna.runner.failures import failed, require_ready
from puna.runner.service import EngineService, Handle
from puna.runner.transport.calls import QUICK_PATHS, Calls
from puna.runner.transport.counters import Counters
from puna.runner.transport.named_model import NamedModel
from puna.wire import (
    MAX_QUEUED_CHARACTERS,
    Answer,
    Call,
    Cancel,
    Command,
    Complete,
    Discovery,
    Done,
    Failed,
    Message,
    NameModel,
    Piece,
    Reply,
    decode_command,
    encode,
)

log = logging.getLogger(__name__)

# Prompts are tokenised there: a long one keeps nobody else's from starting. Images are read in threads of their own: those that
# take all their time keep no text waiting.
_SUBMITTERS = 4
_PATHS_WITH_IMAGES = frozenset({"/images", "/embedding"})


class Outlet(Protocol):
    """Where replies go. Any thread may put and flush, and neither blocks."""

    @property
    def n_unsent(self) -> int:
        """Characters of pieces that nobody has taken, roughly."""

    def put(self, number: int, reply: Reply) -> None: ...

    def flush(self) -> None:
        """What was put until now may leave."""


class _Numbered(msgspec.Struct, frozen=True):
    """All that must be understood of a command to answer that the rest was not."""

    id: int


class _Pictured(msgspec.Struct, frozen=True):
    """All that must be understood of a call to know whether it brings images."""

    images: list[msgspec.Raw] = []


class _Exchange:
    """One command and its replies."""

    def __init__(self, channel: Channel, number: int, *, is_counted: bool) -> None:
        self._channel = channel
        self._number = number
        self._is_counted = is_counted
        self._handle: Handle | None = None
        self.has_ended = False
        self._is_cancelled = False

    def started(self, handle: Handle | None) -> None:
        self._handle = handle
        if self._is_cancelled:
            self.cancel()

    def cancel(self) -> None:
        """Before or after the engine has it."""
        self._is_cancelled = True
        if self._handle is not None:
            self._handle.cancel()

    def answer(self, message: Message) -> None:
        """The answer to a call."""
        self.emit(message if isinstance(message, Failed) else Answer(body=msgspec.Raw(encode(message))))

    def emit(self, reply: Reply) -> None:
        """For the engine; nothing follows the terminal reply."""
        if self.has_ended:
            return
        outlet = self._channel.outlet
        if type(reply) is Piece and outlet.n_unsent > MAX_QUEUED_CHARACTERS:
            reply = Failed(error=f"{outlet.n_unsent} bytes of replies are left unread", status=500)
            self.cancel()
        self.has_ended = type(reply) is not Piece
        outlet.put(self._number, reply)
        if self.has_ended:
            self._channel.ended(self._number, reply if self._is_counted else None)
            outlet.flush()


class Channel:
    def __init__(
        self,
        service: EngineService,
        outlet: Outlet,
        named: NamedModel,
        counters: Counters,
        devices: Callable[[], Discovery],
    ) -> None:
        self.outlet = outlet
        self._service = service
        self._named = named
        self._counters = counters
        self._calls = Calls(service, counters, devices)
        self._lock = threading.Lock()
        self._exchanges: dict[int, _Exchange] = {}
        self._is_closed = False
        self._submitters = ThreadPoolExecutor(_SUBMITTERS, "submit")
        self._image_submitters = ThreadPoolExecutor(_SUBMITTERS, "submit images")
        service.after_step(outlet.flush)

    def handle(self, line: bytes) -> None:
        """Do what a line says; never raises, never blocks."""
        if self._is_closed:
            return
        try:
            command = decode_command(line)
        except BadRequest as error:
            self._refuse(line, error)
            return
        self.do(command)

    def do(self, command: Command) -> None:
        """Never raises, never blocks."""
        if isinstance(command, NameModel):
            self._named.set(Path(command.path))
            return
        if isinstance(command, Cancel):
            with self._lock:
                exchange = self._exchanges.get(command.id)
            if exchange is not None:
                exchange.cancel()
            return
        exchange = _Exchange(self, command.id, is_counted=isinstance(command, Complete))
        with self._lock:
            self._exchanges[command.id] = exchange
        if isinstance(command, Call) and command.path in QUICK_PATHS:
            self._start(exchange, command)
        else:
            submitters = self._image_submitters if _has_images(command) else self._submitters
            try:
                submitters.submit(self._start, exchange, command)
            except RuntimeError as error:  # it waits all the same, for another's thread
                exchange.emit(failed(Overloaded(f"no thread can be started for a request: {error}")))

    def _start(self, exchange: _Exchange, command: Complete | Call) -> None:
        if exchange.has_ended:
            return
        try:
            if isinstance(command, Call):
                exchange.started(self._calls.answer(command.path, bytes(command.body), exchange.answer))
            else:
                self._counters.add("requests")
                require_ready(self._service)
                exchange.started(self._service.submit(command.request, exchange.emit))
        except BaseException as error:  # a panic in a grammar's compiler is no Exception
            if self._is_closed:  # that it came too late to be started is no answer either
                return
            reply = failed(error)
            if reply.status == 500:
                log.exception("a request could not be started")
            exchange.emit(reply)

    def _refuse(self, line: bytes, error: BadRequest) -> None:
        log.error("a command cannot be understood: %s", error)
        try:
            number = msgspec.json.decode(line, type=_Numbered).id
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._named.fail(f"no model is named in {line[:100]!r}")
            return
        self.outlet.put(number, failed(error))
        self.outlet.flush()

    def close(self) -> None:
        """Take nothing more: who still asks learns from the end of the line that this process has ended."""
        self._is_closed = True

    def ended(self, number: int, last: Reply | None) -> None:
        """*last*: of a completion, to be counted."""
        with self._lock:
            self._exchanges.pop(number, None)
        if isinstance(last, Done | Failed):
            self._counters.ended(last)


def _has_images(command: Complete | Call) -> bool:
    if isinstance(command, Complete):
        return bool(command.request.images)
    if command.path not in _PATHS_WITH_IMAGES:
        return False
    try:
        return bool(msgspec.json.decode(command.body, type=_Pictured).images)
    except (msgspec.DecodeError, UnicodeDecodeError):  # whoever reads all of it says what is wrong
        return False
