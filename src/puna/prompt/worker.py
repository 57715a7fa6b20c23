"""The process that renders templates which nobody vouches for: requests on its standard input, prompts on its standard output.

It ends with its standard input, and the kernel ends it when one prompt takes more of a processor's time than LIMIT_S or when
it wants more memory than MAX_BYTES; who started it sees that. Every message is a length in four bytes, then MessagePack; the
first that it sends is empty.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from typing import BinaryIO

import msgspec

from puna.errors import BadRequest, TemplateError
from puna.prompt.exchange import LENGTH, LIMIT_S, Failure, PromptRequest, Reply
from puna.prompt.render import render

MAX_BYTES = 4 << 30


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it decides
    _limit_memory()
    # What a template could ever print must not come between the replies.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin.buffer, replies)


def _limit_memory() -> None:
    with contextlib.suppress(ValueError, OSError):  # a stricter limit is there already, or the system knows none
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    decoder, encoder = msgspec.msgpack.Decoder(PromptRequest), msgspec.msgpack.Encoder()
    _send(replies, b"")  # all is imported: from now on the time of requests counts
    while len(head := requests.read(LENGTH.size)) == LENGTH.size:
        content = requests.read(LENGTH.unpack(head)[0])
        # Its default action ends the process, also where Python's own code is not reached.
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        reply = encoder.encode(answer(decoder.decode(content)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(replies, reply)


def _send(replies: BinaryIO, content: bytes) -> None:
    replies.write(LENGTH.pack(len(content)) + content)
    replies.flush()


def answer(request: PromptRequest) -> Reply:
    try:
        return Reply(prompt=render(request))
    except BadRequest as error:
        return Reply(failure=Failure(str(error), isinstance(error, TemplateError)))
    except MemoryError:
        return Reply(failure=Failure("the template does too much: it takes too much memory", is_template=True))
    except Exception as error:  # noqa: BLE001 - the process's edge; whatever a template can break is the template's fault
        return Reply(failure=Failure(f"the template cannot be rendered: {type(error).__name__}", is_template=True))
