"""The server that belongs to one command, which may be about to ask a model.

Importing the server takes longer than starting a process: so the spare runner comes first, and imports on another core
meanwhile. Nothing heavy may be imported by this module.
"""

from __future__ import annotations

import asyncio
import socket

import uvloop

from puna.llm.discovery import Machine
from puna.llm.launch import Launcher
from puna.llm.spare import Spare
from puna.settings import Settings


def serve(settings: Settings, listener: socket.socket, *, expects_model: bool) -> None:
    """As puna.server.process.serve.serve, on this socket. The spare that *expects_model* asks for is the only one."""
    uvloop.run(_serve(settings, listener, has_spare=expects_model and settings.warm_spare))


async def _serve(settings: Settings, listener: socket.socket, *, has_spare: bool) -> None:
    launcher = Launcher(Spare(refill=False) if has_spare else None, machine=Machine())
    launcher.open()
    await asyncio.sleep(0)  # the process is there after the first step of the task that starts it
    from puna.server.process.serve import serve_on

    await serve_on(listener, settings, launcher)
