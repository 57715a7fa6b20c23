"""Who may use the server: API keys, and whether it may listen to other machines without any.

Keys come as ``Authorization: Bearer KEY``, as OpenAI's and Ollama's clients send them, or as ``x-api-key: KEY``, as
Anthropic's do.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from puna.api import go_json
from puna.errors import PunaError
from puna.server.errors import JSON_CONTENT_TYPE, body_for
from puna.settings import Settings

OPEN_PATHS = frozenset({"/", "/health"})  # tell that a server is there, and nothing else


def check_exposure(settings: Settings) -> None:
    """Errors: PunaError when other machines could use the server without a key."""
    if settings.host.is_loopback or settings.api_keys or settings.allow_no_keys:
        return
    raise PunaError(
        f"OLLAMA_HOST={settings.host.host} would let other machines use this server without a key. Set PUNA_API_KEYS to "
        "one or more keys, separated by commas, or PUNA_ALLOW_NO_KEYS=1 if everyone who can reach it may use it."
    )


class ApiKeys:
    """Let pass what brings one of *keys*."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_known(_key_in(Headers(scope=scope))):
            await self._app(scope, receive, send)
            return
        body = body_for(scope["path"], "unauthorized: send one of the server's API keys as a bearer token", 401)
        answer = Response(go_json.dumps(body), 401, {"www-authenticate": "Bearer"}, JSON_CONTENT_TYPE)
        await answer(scope, receive, send)

    def _is_known(self, key: str) -> bool:
        """All keys are compared, each in constant time: how long it takes tells nothing."""
        given = key.encode("latin-1")  # as headers are decoded
        return sum([hmac.compare_digest(given, known) for known in self._keys]) > 0


def _key_in(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
