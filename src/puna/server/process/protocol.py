"""HTTP/1.1 as uvicorn speaks it, for peers of whom nobody knows yet who they are: what they send has bounds in size and time.

The head of a request is bounded in bytes and in number of headers, and so is what surrounds a chunked body; a head or
body that does not get on, and an answer that is not read, end the connection; requests that are sent in advance are few.
What may be in a body, and whose it is, is the application's business.
"""

from __future__ import annotations

import asyncio
import enum
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from puna.keepalive import probe
from puna.server.process.connections import LINGER_S, Connections

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 128
MAX_PIPELINED = 16
MIN_BODY_BYTES = 1 << 10  # of a body, in the time that it has: who sends less keeps a place and sends nothing
_GONE_AFTER, _GONE_AFTER_S = 5, 60.0  # times the patience, but so long at least: a machine that takes nothing may be there still
_CHUNK_OVERHEAD = 8  # bytes of framing for one of body, at most: those of a chunk of one byte are 5


class _Refused(Exception):
    """The parser is to stop here."""


class Reading(enum.Enum):
    """What is to come from the other side."""

    NOTHING_YET = "the first head"
    NEXT = "another request, perhaps"
    HEAD = "the rest of a head"
    BODY = "the rest of a body"
    WHOLE = "nothing: the request is complete"
    UNWANTED_BODY = "the rest of a body whose request was answered"
    CLOSING = "nothing: the connection is being closed"


class BoundedProtocol(HttpToolsProtocol):
    """*registry* is shared by all connections of a server."""

    def __init__(self, *args: Any, registry: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.peer = ""
        self._registry = registry
        self._reading = Reading.NOTHING_YET
        self._since = self._read_at = 0.0  # of what is read; when some of the answer was read last
        self._n_unread = 0
        self._n_head = self._n_headers = 0  # bytes, headers of this message
        self._n_raw = self._n_body = 0  # bytes of this message after its head, and those of its body
        self._n_window = 0  # bytes since
        self._refusal: HTTPStatus | None = None

    # What comes

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.peer = self.client[0] if self.client else ""
        self._since = self._read_at = self._registry.clock()
        probe(transport.get_extra_info("socket"), max(_GONE_AFTER_S, _GONE_AFTER * self._registry.limits.patience_s))
        if not self._registry.admit(self):
            self._close_with(HTTPStatus.SERVICE_UNAVAILABLE)

    def connection_lost(self, exc: Exception | None) -> None:
        self._registry.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._reading is Reading.CLOSING:
            return
        was_in_body = self._is_in_body
        self._n_head += len(data)
        self._n_raw += len(data)
        self._n_window += len(data)
        super().data_received(data)
        if not self._is_in_body and self._n_head > MAX_HEAD_BYTES:  # or ends of lines, which may come before one
            self._close_with(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        elif was_in_body and self._n_raw > MAX_HEAD_BYTES + self._n_body * (1 + _CHUNK_OVERHEAD):
            self._close_with(HTTPStatus.BAD_REQUEST)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._n_headers = 0
        self._read(Reading.HEAD)

    def on_url(self, url: bytes) -> None:
        self._count(len(url), 0)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value), 1)
        super().on_header(name, value)

    def _count(self, n_bytes: int, n_headers: int) -> None:
        """Also of heads that come in one piece with what follows, and of what follows a chunked body."""
        self._n_head += n_bytes
        self._n_headers += n_headers
        if self._n_head > 2 * MAX_HEAD_BYTES or self._n_headers > MAX_HEADERS:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refuse(HTTPStatus.TOO_MANY_REQUESTS)
        super().on_headers_complete()
        self._n_raw = self._n_body = 0
        self._read(Reading.BODY)

    def on_body(self, body: bytes) -> None:
        self._n_body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._read(Reading.NEXT if self._is_answered else Reading.WHOLE)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._reading is Reading.BODY:
            self._read(Reading.UNWANTED_BODY)
        elif self._reading is Reading.WHOLE and not self.pipeline:
            self._read(Reading.NEXT)

    @property
    def _is_in_body(self) -> bool:
        return self._reading in (Reading.BODY, Reading.UNWANTED_BODY)

    @property
    def _is_answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _read(self, what: Reading) -> None:
        if self._reading is Reading.CLOSING:
            return
        self._reading = what
        if what is not Reading.BODY:
            self._n_head = 0
        self._since, self._n_window = self._registry.clock(), 0
        if what is Reading.WHOLE or self._is_answering_another:
            self._registry.keep(self)
        elif what is Reading.BODY:
            self._registry.wait_for_body(self)
        else:
            self._registry.wait_for_head(self)

    @property
    def _is_answering_another(self) -> bool:
        """While a further request comes in advance."""
        return self._reading is Reading.HEAD and not self._is_answered

    # What does not come

    def check(self, now: float) -> None:
        self._check_reader(now)
        patience_s = self._registry.limits.patience_s
        waited_s = now - self._since
        match self._reading:
            case Reading.NOTHING_YET if waited_s > patience_s:
                self.leave()
            case Reading.HEAD if waited_s > patience_s:
                self._close_with(HTTPStatus.REQUEST_TIMEOUT)
            case Reading.BODY if self.flow.read_paused:  # it is us who do not read
                self._since, self._n_window = now, 0
            case Reading.BODY if waited_s > patience_s:
                if self._n_window < MIN_BODY_BYTES:
                    self._close_with(HTTPStatus.REQUEST_TIMEOUT)
                self._since, self._n_window = now, 0
            case Reading.UNWANTED_BODY if waited_s > LINGER_S:
                self._close()
            case Reading.CLOSING if waited_s > LINGER_S:
                self.leave()

    def _check_reader(self, now: float) -> None:
        """Whoever reads nothing of an answer for too long does not hold a model any longer."""
        n_unread = self.transport.get_write_buffer_size()
        if n_unread == 0 or n_unread < self._n_unread:
            self._read_at = now
        self._n_unread = n_unread
        if now - self._read_at > self._registry.limits.patience_s:
            self.leave()

    # How it ends

    def leave(self) -> None:
        self._reading = Reading.CLOSING
        self.transport.abort()

    def _refuse(self, status: HTTPStatus) -> None:
        self._refusal = status
        raise _Refused

    def send_400_response(self, msg: str) -> None:
        self._close_with(self._refusal or HTTPStatus.BAD_REQUEST)

    def _close_with(self, status: HTTPStatus) -> None:
        """Say why, unless an answer is on its way."""
        if self._reading is Reading.CLOSING or self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            text = status.phrase.lower().encode()
            head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
            self.transport.write(head.encode() + b"content-length: %d\r\n\r\n" % len(text) + text)
        self._close()

    def _close(self) -> None:
        """What was written may still be read."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._read(Reading.CLOSING)
        self.transport.close()


def protocol_for(registry: Connections) -> type[asyncio.Protocol]:
    """What uvicorn makes connections with."""
    return cast(type[asyncio.Protocol], partial(BoundedProtocol, registry=registry))


assert issubclass(httptools.HttpParserCallbackError, httptools.HttpParserError)  # uvicorn ends a connection at the latter
