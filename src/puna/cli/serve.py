"""``puna serve``: run the server in the foreground.

With ``--fd`` it belongs to another ``puna`` command: it serves on an inherited socket and ends when its standard input
does (see puna.cli.private_server).
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from contextlib import suppress
from typing import Annotated

import typer

from puna.settings import load

_GRACE_S = 8.0  # more than the server takes when all goes well


def serve(
    fd: Annotated[int, typer.Option(hidden=True, help="serve on this inherited socket until standard input ends")] = -1,
    expect_model: Annotated[bool, typer.Option(hidden=True, help="with --fd: a model will be asked for at once")] = False,
) -> None:
    """Start the server."""
    if fd < 0:
        from puna.server.process.serve import serve as run_server

        run_server(load())
        return
    from puna.server.process import private

    threading.Thread(target=_stop_at_end_of_input, daemon=True).start()
    with socket.socket(fileno=fd) as listener:
        private.serve(load(), listener, expects_model=expect_model)


def _stop_at_end_of_input() -> None:
    """Stop this process in good order once the owner is gone, and with force when that takes too long."""
    with suppress(OSError):
        while os.read(0, 4096):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # runners share the group
    os._exit(1)
