"""The server that belongs to one command, which may be about to ask a model (see puna.cli.private_server).

It serves on an inherited socket and ends when its standard input does. Importing the server takes longer than starting a
process: so the spare runner comes first, and imports on another core meanwhile. It looks for devices, too. Nothing heavy may
be imported by this module.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import uvloop

from puna.errors import PunaError
from puna.llm.discovery import Machine
from puna.llm.launch import Launcher
from puna.llm.spare import Spare
from puna.settings import Settings, load

_GRACE_S = 8.0  # more than the server takes when all goes well


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("puna private-server", description="A server of one command's own.")
    parser.add_argument("fd", type=int, help="an inherited socket that listens")
    parser.add_argument("--expect-model", action="store_true", help="a model will be asked for at once")
    args = parser.parse_args(argv)
    threading.Thread(target=_stop_at_end_of_input, daemon=True).start()
    try:
        with socket.socket(fileno=args.fd) as listener:
            serve(load(), listener, expects_model=args.expect_model)
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


def serve(settings: Settings, listener: socket.socket, *, expects_model: bool) -> None:
    """As puna.server.process.serve.serve, on this socket. The spare that *expects_model* asks for is the only one."""
    uvloop.run(_serve(settings, listener, has_spare=expects_model and settings.warm_spare))


async def _serve(settings: Settings, listener: socket.socket, *, has_spare: bool) -> None:
    spare = Spare(refill=False) if has_spare else None
    machine = Machine(ask=spare.devices if spare else None)
    launcher = Launcher(spare, machine=machine)
    launcher.open()
    looking = asyncio.create_task(machine.look(), name="first look at the machine") if has_spare else None
    await asyncio.sleep(0)  # the process is there after the first step of the task that starts it
    from puna.server.process.serve import serve_on

    try:
        await serve_on(listener, settings, launcher)
    finally:
        if looking is not None:
            looking.cancel()
            await asyncio.wait({looking})
