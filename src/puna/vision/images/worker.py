"""The process that reads images which nobody vouches for: files on its standard input, pixels on its standard output.

It ends with whoever started it, even in the middle of an image, and the kernel ends it when an image takes more of a processor's
time or more memory than the limits say; who started it sees that. It can write no file.
"""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import signal
import sys
from typing import BinaryIO

from puna.errors import BadRequest
from puna.guard import exit_with_parent
from puna.vision.images.decode import decode
from puna.vision.images.limits import LIMIT_S, MAX_PROCESS_BYTES, PIXELS, PROBLEM, READY, REPLY, REQUEST


class Requests:
    """Files as they come in pieces; each is taken once."""

    def __init__(self) -> None:
        self._whole: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._rest = bytearray()

    def feed(self, data: bytes) -> None:
        self._rest += data
        while len(self._rest) >= REQUEST.size:
            end = REQUEST.size + REQUEST.unpack_from(self._rest)[0]
            if len(self._rest) < end:
                return
            self._whole.put(bytes(self._rest[REQUEST.size : end]))
            del self._rest[:end]

    def take(self) -> bytes:
        return self._whole.get()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it decides
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not come between the replies
    limit()
    requests = Requests()
    exit_with_parent(on_data=requests.feed)
    _send(replies, REPLY.pack(READY, 0, 0))  # all is imported: from now on the time of images counts
    while True:
        answer(requests.take(), replies)


def limit() -> None:
    """What the kernel holds against this process."""
    for what, most in ((resource.RLIMIT_AS, MAX_PROCESS_BYTES), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):  # a stricter limit is there already, or the system knows none
            resource.setrlimit(what, (most, resource.getrlimit(what)[1]))


def answer(data: bytes, replies: BinaryIO) -> None:
    """Read one image within its time, and send what came of it."""
    # The timer's default action ends the process, also where Python's own code is not reached.
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        picture = decode(data)
    except BadRequest as error:
        problem = str(error)
    except MemoryError:
        problem = "it takes too much memory"
    else:
        problem = ""
    signal.setitimer(signal.ITIMER_PROF, 0)
    if problem:
        text = problem.encode()
        _send(replies, REPLY.pack(PROBLEM, len(text), 0), text)
    else:
        _send(replies, REPLY.pack(PIXELS, picture.width, picture.height), picture.rgb)


def _send(replies: BinaryIO, *parts: bytes) -> None:
    for part in parts:
        replies.write(part)
    replies.flush()
