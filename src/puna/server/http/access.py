"""Who may use the server: API keys and what each is good for, and whether it may listen to other machines without any.

A key comes as ``Authorization: Bearer KEY``, as OpenAI's and Ollama's clients send it, or as ``x-api-key: KEY``, as
Anthropic's do. In PUNA_API_KEYS and in the file it may be followed by its scopes: ``KEY inference``. Without any it is
good for everything. Whoever has a key may look at what there is.
"""

from __future__ import annotations

import enum
import hmac
import logging
import secrets
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from puna.api import go_json
from puna.errors import PunaError
from puna.server.http.errors import JSON_CONTENT_TYPE, body_for
from puna.settings import Settings, keys_in

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/", "/health"})  # tell that a server is there, and nothing else
PAGE_PREFIX = "/web/"  # what the page consists of: the same for everybody, and it asks for the key


_INFERENCE_PATHS = frozenset(f"/api/{name}" for name in ("generate", "chat", "embed", "embeddings", "rerank", "show"))


class KeyScope(enum.Enum):
    INFERENCE = "inference"  # ask models
    MANAGEMENT = "management"  # pull, push, create, copy and delete them


@dataclass(frozen=True)
class Key:
    text: bytes
    scopes: frozenset[KeyScope]


def check_exposure(settings: Settings, listener: str = "") -> None:
    """*listener*: what listens in the server's place, as an error calls it.

    Errors: PunaError when other machines could use the server without a key.
    """
    if settings.host.is_loopback or settings.allow_no_keys or read_keys(settings):
        return
    raise PunaError(
        f"{listener or f'OLLAMA_HOST={settings.host.host}'} would let other machines use this server without a key. Set "
        "PUNA_API_KEYS to one or more keys, separated by commas, or PUNA_API_KEYS_FILE to a file with a key in each line; or set "
        "PUNA_ALLOW_NO_KEYS=1 if everyone who can reach it may use it."
    )


def read_keys(settings: Settings) -> list[Key]:
    """Those of the environment and of the file.

    Errors: PunaError for a file that cannot be read or has no keys, and for a scope that does not exist.
    """
    found = [_key(entry, "PUNA_API_KEYS") for entry in settings.api_keys]
    path = settings.api_keys_file
    if path is None:
        return found
    try:
        lines = keys_in(path)
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise PunaError(f"PUNA_API_KEYS_FILE={path}: {getattr(error, 'strerror', None) or error}") from error
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning("PUNA_API_KEYS_FILE=%s can be read by other users of this machine", path)
    in_file = [_key(line, str(path)) for line in lines]
    if not in_file:
        # Whoever names a file wants keys asked for; an empty one must not open the server.
        raise PunaError(f"PUNA_API_KEYS_FILE={path}: there is no key in it")
    return found + in_file


def _key(entry: str, where: str) -> Key:
    text, *names = entry.split()
    try:
        scopes = frozenset(map(KeyScope, names)) or frozenset(KeyScope)
    except ValueError:
        known = " and ".join(scope.value for scope in KeyScope)
        raise PunaError(f"{where}: a key has a scope that does not exist; there are {known}") from None
    return Key(text.encode(), scopes)


def needed_scope(method: str, path: str) -> KeyScope | None:
    """None for what only shows what there is. What is new here and unknown needs management."""
    if method in ("GET", "HEAD", "OPTIONS"):
        return None
    return KeyScope.INFERENCE if path in _INFERENCE_PATHS or path.startswith("/v1/") else KeyScope.MANAGEMENT


class ApiKeys:
    """Let pass what brings one of *keys* that is good for it."""

    def __init__(self, app: ASGIApp, keys: Sequence[Key], *, isolate: bool | None = None) -> None:
        """*isolate*: whether each key gets a salt of its own; None: where there are several."""
        self._app = app
        self._keys = keys
        is_isolated = len({key.text for key in keys}) > 1 if isolate is None else isolate
        self._pepper = secrets.token_bytes(32) if is_isolated else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or scope["path"].startswith(PAGE_PREFIX):
            await self._app(scope, receive, send)
            return
        scopes = self._scopes_of(_key_in(Headers(scope=scope)))
        needed = needed_scope(scope["method"], scope["path"])
        if not scopes:
            text = "unauthorized: send one of the server's API keys as a bearer token"
            await _refuse(scope["path"], text, 401, {"www-authenticate": "Bearer"})(scope, receive, send)
        elif needed is not None and needed not in scopes:
            text = f"forbidden: this API key is not good for {needed.value}"
            await _refuse(scope["path"], text, 403, {})(scope, receive, send)
        else:
            scope.setdefault("state", {}).update(scopes=scopes, salt=self._salt_of(_key_in(Headers(scope=scope))))
            await self._app(scope, receive, send)

    def _salt_of(self, key: str) -> str:
        """The same for a key as long as the server runs; tells nothing of the key."""
        return hmac.digest(self._pepper, key.encode("latin-1"), "sha256").hex()[:32] if self._pepper else ""

    def _scopes_of(self, key: str) -> frozenset[KeyScope]:
        """Of a key that may be written down more than once. All are compared, each in constant time: how long it takes
        tells nothing.
        """
        given = key.encode("latin-1")  # as headers are decoded
        matches: Iterable[frozenset[KeyScope]] = [
            k.scopes if hmac.compare_digest(given, k.text) else frozenset() for k in self._keys
        ]
        return frozenset[KeyScope]().union(*matches)


def salt_of(request: HTTPConnection) -> str:
    """What stands for its key beside what its prompts leave in caches; empty where that belongs to everybody."""
    salt: str = getattr(request.state, "salt", "")
    return salt


def may_manage(request: HTTPConnection) -> bool:
    """Whether its key is good for that; where there are no keys everybody may."""
    return KeyScope.MANAGEMENT in getattr(request.state, "scopes", KeyScope)


def _refuse(path: str, text: str, status: int, headers: dict[str, str]) -> Response:
    return Response(go_json.dumps(body_for(path, text, status)), status, headers, JSON_CONTENT_TYPE)


def _key_in(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
