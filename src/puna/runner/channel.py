"""The parent's own way to the engine: commands come in as lines of standard input, replies go out over the same socket.

It spares what a stream of HTTP costs for every token of every request. Standard input that is a pipe or a terminal has no
way back; then completions are had over HTTP alone.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from puna.errors import BadRequest
from puna.runner.failures import failed, require_ready
from puna.runner.outbox import Outbox
from puna.runner.service import EngineService, Handle
from puna.runner.spare import NamedModel
from puna.runner.tally import Tally
from puna.wire import MAX_QUEUED_CHARACTERS, Cancel, Complete, CompletionReply, Failed, NameModel, Piece, decode_command

log = logging.getLogger(__name__)

# Prompts are tokenised there: a long one keeps nobody else's from starting.
_SUBMITTERS = 4


class _Numbered(msgspec.Struct, frozen=True):
    """All that must be understood of a command to answer that the rest was not."""

    id: int


class _Exchange:
    """One request and its replies."""

    def __init__(self, channel: Channel, number: int) -> None:
        self._channel = channel
        self._number = number
        self._handle: Handle | None = None
        self._has_ended = False
        self._is_unwanted = False

    def started(self, handle: Handle) -> None:
        self._handle = handle
        if self._is_unwanted:
            handle.cancel()

    def cancel(self) -> None:
        """Before or after the engine has it."""
        self._is_unwanted = True
        if self._handle is not None:
            self._handle.cancel()

    def emit(self, reply: CompletionReply) -> None:
        """For the engine; nothing follows the terminal reply."""
        if self._has_ended:
            return
        outbox = self._channel.outbox
        if type(reply) is Piece and outbox.n_unsent > MAX_QUEUED_CHARACTERS:
            reply = Failed(error=f"{outbox.n_unsent} bytes of replies are left unread", status=500)
            self.cancel()
        self._has_ended = type(reply) is not Piece
        outbox.put(self._number, reply)
        if self._has_ended:
            self._channel.ended(self._number, reply)
            outbox.flush()


class Channel:
    def __init__(self, service: EngineService, outbox: Outbox, named: NamedModel, tally: Tally) -> None:
        self.outbox = outbox
        self._service = service
        self._named = named
        self._tally = tally
        self._lock = threading.Lock()
        self._exchanges: dict[int, _Exchange] = {}
        self._is_closed = False
        self._submitters = ThreadPoolExecutor(_SUBMITTERS, "submit")
        service.after_step(outbox.flush)

    def handle(self, line: bytes) -> None:
        """Do what a line says; never raises, never blocks."""
        if self._is_closed:
            return
        try:
            command = decode_command(line)
        except BadRequest as error:
            self._refuse(line, error)
            return
        if isinstance(command, NameModel):
            self._named.set(Path(command.path))
        elif isinstance(command, Cancel):
            with self._lock:
                exchange = self._exchanges.get(command.id)
            if exchange is not None:
                exchange.cancel()
        else:
            exchange = _Exchange(self, command.id)
            with self._lock:
                self._exchanges[command.id] = exchange
            self._tally.add("requests")
            self._submitters.submit(self._start, exchange, command)

    def _start(self, exchange: _Exchange, command: Complete) -> None:
        try:
            require_ready(self._service)
            exchange.started(self._service.submit(command.request, exchange.emit))
        except Exception as error:
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
        self.outbox.put(number, failed(error))
        self.outbox.flush()

    def close(self) -> None:
        """Take nothing more: who still asks learns from the end of the line that this process has ended."""
        self._is_closed = True

    def ended(self, number: int, last: CompletionReply) -> None:
        with self._lock:
            self._exchanges.pop(number, None)
        self._tally.ended(last)
