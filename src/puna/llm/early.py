"""A runner's process that is started before there is an event loop: it imports while its parent still imports one.

*begin* starts it, and needs next to nothing of Python's library. What is begun has no owner but the line to it: where that is
closed, also by the end of this process, the runner ends. puna.llm.process gives it to an event loop.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from puna import environment

# A runner that gets ready before its model is known. -P: a folder named puna where the server runs is not this package.
SPARE_COMMAND = (sys.executable, "-P", "-m", "puna", "runner", "--spare")


@dataclass(frozen=True)
class Begun:
    process: subprocess.Popen[bytes]
    line: socket.socket  # whose other end is its standard input


def begin(command: Sequence[str] = SPARE_COMMAND) -> Begun:
    """Errors: OSError."""
    own_end, end = socket.socketpair()
    try:
        with end:
            process = subprocess.Popen(
                command,
                stdin=end.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**environment.for_computing(), "GGML_NO_BACKTRACE": "1"},
                start_new_session=True,  # an interrupt from the terminal is for the server, which then ends its runners
            )
    except BaseException:
        own_end.close()
        raise
    return Begun(process, own_end)
