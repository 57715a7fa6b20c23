"""The server that belongs to one command, which may be about to ask a model (see puna.cli.private_server).

It serves on an inherited socket and ends when its standard input does. Importing the server, and even what it takes to have an
event loop, takes longer than starting a process: so the spare runner is begun before anything else, and imports on another core
meanwhile. It looks for devices, too. Nothing heavy may be imported by this module.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from puna.errors import PunaError
from puna.llm.early import Begun, begin
from puna.settings import Settings, load

_EXPECTS_MODEL = "--expect-model"
_GRACE_S = 8.0  # more than the server takes when all goes well


def main(argv: Sequence[str]) -> None:
    settings = load()
    begun = begin() if _EXPECTS_MODEL in argv and settings.warm_spare else None
    import argparse

    parser = argparse.ArgumentParser("puna private-server", description="A server of one command's own.")
    parser.add_argument("fd", type=int, help="an inherited socket that listens")
    parser.add_argument(_EXPECTS_MODEL, action="store_true", help="a model will be asked for at once")
    args = parser.parse_args(argv)
    threading.Thread(target=_stop_at_end_of_input, daemon=True).start()
    try:
        with socket.socket(fileno=args.fd) as listener:
            serve(settings, listener, begun)
    except (PunaError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(1)


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


def serve(settings: Settings, listener: socket.socket, begun: Begun | None = None) -> None:
    """As puna.server.process.serve.serve, on this socket. What is *begun* becomes the spare, the only one."""
    import uvloop

    uvloop.run(_serve(settings, listener, begun))


async def _serve(settings: Settings, listener: socket.socket, begun: Begun | None) -> None:
    import asyncio

    from puna.llm.launch import for_one_model

    launcher = for_one_model(begun, has_spare=begun is not None)
    launcher.open()
    look = launcher.machine.look if launcher.machine and begun else None
    looking = asyncio.create_task(look(), name="first look at the machine") if look else None
    await asyncio.sleep(0)  # the spare is asked before a load takes it
    from puna.server.process.serve import serve_on

    try:
        await serve_on(listener, settings, launcher)
    finally:
        if looking is not None:
            looking.cancel()
            await asyncio.wait({looking})
