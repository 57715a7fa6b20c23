"""Replies on their way to the parent: all that a step has said leaves in one write, on the thread that said it.

With as many threads computing as there are cores, another thread that had to be woken for every token would take the
time from them.
"""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import suppress

import msgspec

from puna.wire import Addressed, Answer, Failed, Reply

log = logging.getLogger(__name__)

_AT_ONCE = 1 << 20  # bytes


class Outbox:
    """Any thread may put and flush. Nobody waits for a parent that does not read: a thread of its own writes to that one."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._encode = msgspec.json.Encoder().encode
        self._replies: list[Addressed] = []
        self._unsent = bytearray()
        self._is_writing = False  # somebody waits for the parent to read
        self._n_of_answers = 0  # bytes that joined what is unsent, at most

    @property
    def n_unsent(self) -> int:
        """Bytes that the parent has left to wait, answers apart: vectors of many texts are long, and it asked for them."""
        return max(0, len(self._unsent) - self._n_of_answers)

    def put(self, number: int, reply: Reply) -> None:
        """Add a reply to the next write."""
        with self._lock:
            self._replies.append((number, reply))
            if type(reply) is Answer:
                self._n_of_answers += len(memoryview(reply.body))

    def flush(self) -> None:
        with self._lock:
            if self._replies:
                line = self._line()
                self._replies.clear()
                self._unsent += line if self._unsent else line[self._send(line, socket.MSG_DONTWAIT) :]
            if not self._unsent:
                self._n_of_answers = 0
            elif not self._is_writing:
                self._start_writing()

    def _start_writing(self) -> None:
        try:
            threading.Thread(target=self._write_rest, name="outbox", daemon=True).start()
            self._is_writing = True
        except RuntimeError:  # no more threads: tried again with the next flush
            log.exception("nobody can write to the parent now")

    def _line(self) -> bytes:
        """All replies; in the place of one that cannot be written, why."""
        with suppress(Exception):
            return self._encode(self._replies) + b"\n"
        return self._encode([(number, self._writable(reply)) for number, reply in self._replies]) + b"\n"

    def _writable(self, reply: Reply) -> Reply:
        try:
            self._encode(reply)
            return reply
        except Exception as error:
            log.exception("a reply cannot be written")
            return Failed(error=f"a reply cannot be written: {type(error).__name__}", status=500)

    def _write_rest(self) -> None:
        while True:
            # What is added meanwhile goes behind, so the first bytes stay what they are.
            n_sent = self._send(bytes(self._unsent[:_AT_ONCE]))
            with self._lock:
                del self._unsent[:n_sent]
                if not self._unsent:
                    self._n_of_answers = 0
                    self._is_writing = False
                    return

    def _send(self, data: bytes, flags: int = 0) -> int:
        """Bytes of which the writer is rid: taken, or no longer wanted by anybody."""
        try:
            return self._connection.send(data, flags)
        except BlockingIOError:
            return 0
        except OSError as error:  # the parent is gone; the guard ends this process
            log.debug("nobody reads the replies any more: %s", error)
            return len(data)
