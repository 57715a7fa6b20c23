"""The actor that a node is: one on each machine, which lives as long as there is a head that wants it.

The node runs in a thread of its own, on an event loop that is none of Ray's: what is heard and said does not wait for Ray.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
from concurrent.futures import Future

import uvloop

from puna.cluster.node.node import Node
from puna.cluster.node.service import Service
from puna.server.process.log import log_to_stderr
from puna.settings import load

log = logging.getLogger(__name__)

_START_TIMEOUT_S = 120.0
_CLOSE_TIMEOUT_S = 30.0
_TELL_S = 2.0  # for those who wait for the node to hear why there is none


class NodeActor:
    """*host*: the machine's address in the cluster. *grace_s*: how long it stays without any head."""

    def __init__(self, name: str, host: str, version: str, memory_limit: int, grace_s: float) -> None:
        settings = load()
        log_to_stderr(settings)
        self._key = secrets.token_urlsafe(32)
        self._host = host
        self._port: Future[int] = Future()
        node = Node(settings, memory_limit=memory_limit)
        self._service = Service(node, name, self._key, version=version, idle=self._end, grace_s=grace_s)
        threading.Thread(target=self._run, name="node", daemon=True).start()

    def place(self) -> tuple[str, int, str]:
        """Address, port and key."""
        return self._host, self._port.result(_START_TIMEOUT_S), self._key

    def _run(self) -> None:
        uvloop.run(self._serve())

    async def _serve(self) -> None:
        self._ending = asyncio.Event()
        try:
            self._port.set_result(await self._service.open(self._host))
        except Exception as error:
            log.exception("the node cannot be opened")
            self._port.set_exception(error)
            await asyncio.sleep(_TELL_S)
            os._exit(1)  # who asks for this node again starts it anew
        await self._ending.wait()
        try:
            await asyncio.wait_for(self._service.close(), _CLOSE_TIMEOUT_S)
        finally:
            os._exit(0)  # an actor ends itself from one of its methods alone, and nobody calls one

    def _end(self) -> None:
        log.info("no head is left: the node ends")
        self._ending.set()
