"""What stands before every route: which browsers and which host names may call, and what happens when a caller leaves.

Knows no route. Source: Ollama's REST API, "CORS and Host checks".
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import socket
from collections.abc import Iterable, MutableMapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

_LOCAL_ORIGINS = tuple(
    f"{scheme}://{host}{port}"
    for host in ("localhost", "127.0.0.1", "0.0.0.0")
    for scheme in ("http", "https")
    for port in ("", ":*")
)
_APP_ORIGINS = ("app://*", "file://*", "tauri://*", "vscode-webview://*", "vscode-file://*")
_STAINLESS = (
    "arch async custom-poll-interval helper-method lang os package-version poll-helper retry-count runtime runtime-version"
    " timeout"
)
_ALLOWED_HEADERS = ", ".join(
    ["Authorization", "Content-Type", "User-Agent", "Accept", "X-Requested-With", "OpenAI-Beta"]
    + ["X-Api-Key", "X-Request-Id", "Anthropic-Version", "Anthropic-Beta", "Anthropic-Dangerous-Direct-Browser-Access"]
    + [f"x-stainless-{name}" for name in _STAINLESS.split()]
)
_ALLOWED_METHODS = "GET, POST, PUT, PATCH, DELETE, HEAD, OPTIONS"
_LOCAL_SUFFIXES = (".localhost", ".local", ".internal")


class Origins:
    """Which origins browsers may call from: the user's, then those of this machine and of desktop applications."""

    def __init__(self, configured: Iterable[str]) -> None:
        patterns = []
        self.allow_all = False
        for pattern in (*configured, *_LOCAL_ORIGINS, *_APP_ORIGINS):
            if pattern == "*":
                self.allow_all = True
            elif "://" not in pattern and "*" not in pattern:
                log.warning("OLLAMA_ORIGINS: %r is no origin (scheme://host), ignoring it", pattern)
            else:
                patterns.append(re.escape(pattern.lower()).replace(r"\*", ".*"))
        self._pattern = re.compile("|".join(patterns))

    def allow(self, origin: str) -> bool:
        return self.allow_all or self._pattern.fullmatch(origin.lower()) is not None


class CORS:
    """Answer browsers' preflight requests, and turn away pages from elsewhere before anything is done for them."""

    def __init__(self, app: ASGIApp, origins: Origins) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        origin, host = headers.get("origin", ""), headers.get("host", "")
        if not origin or origin in (f"http://{host}", f"https://{host}"):
            await self._app(scope, receive, send)
        elif not self._origins.allow(origin):
            await Response(status_code=403)(scope, receive, send)
        elif scope["method"] == "OPTIONS":
            preflight = {
                "access-control-allow-methods": _ALLOWED_METHODS,
                "access-control-allow-headers": _ALLOWED_HEADERS,
                "access-control-max-age": "43200",
            }
            await Response(status_code=204, headers=preflight | self._headers(origin))(scope, receive, send)
        else:
            await self._app(scope, receive, self._adding(self._headers(origin), send))

    def _headers(self, origin: str) -> dict[str, str]:
        if self._origins.allow_all:
            return {"access-control-allow-origin": "*"}
        return {"access-control-allow-origin": origin, "vary": "Origin"}

    @staticmethod
    def _adding(extra: dict[str, str], send: Send) -> Send:
        async def send_with(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(extra)
            await send(message)

        return send_with


class LocalHosts:
    """On a loopback address, refuse host names that a foreign page may have pointed at this machine (DNS rebinding)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        host = without_port(Headers(scope=scope).get("host", ""))
        is_ip = _is_own_address(host)
        if not is_ip and not _is_own_name(host):
            await Response(status_code=403)(scope, receive, send)
        elif scope["method"] == "OPTIONS" and not is_ip:
            await Response(status_code=204)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def without_port(host: str) -> str:
    match = re.fullmatch(r"\[([^\]]*)\](?::\d*)?", host)
    if match:
        return match.group(1)
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def _is_own_address(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return address.is_loopback or address.is_private or address.is_unspecified or _can_bind(address)


def _can_bind(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether an interface of this machine has the address: to others no socket can be bound."""
    with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(address), 0))
        except OSError:
            return False
    return True


def _is_own_name(host: str) -> bool:
    name = host.lower()
    return name in ("", "localhost", socket.gethostname().lower()) or name.endswith(_LOCAL_SUFFIXES)


class CancelOnDisconnect:
    """Cancel the work for a request as soon as its client is gone: while it is queued, loading or generating.

    Once the application has read the body, this reads on in its place; all that can come is the disconnection.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client = _Client(receive, send)
        try:
            await self._app(scope, client.receive, client.send)
        except asyncio.CancelledError:
            if not client.has_cancelled or client.task.uncancel() > 0:
                raise
            log.info("499 %s %s: request canceled", scope["method"], scope["path"])
        finally:
            client.stop()


class _Client:
    """The other end of one request."""

    def __init__(self, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.has_cancelled = False
        self._receive, self._send = receive, send
        self._watcher: asyncio.Task[None] | None = None
        self._is_answered = False
        self._gone = asyncio.Event()

    async def receive(self) -> Message:
        if self._watcher is not None:
            await self._gone.wait()
            return {"type": "http.disconnect"}
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            self._watcher = asyncio.create_task(self._watch())
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_answered = True  # what comes after is cleaning up, which nobody should interrupt
        await self._send(message)

    def stop(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone.set()
        if not self._is_answered:
            self.has_cancelled = True
            self.task.cancel()
