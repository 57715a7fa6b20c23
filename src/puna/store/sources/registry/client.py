"""The registry protocol: manifests and blobs by GET, uploads in pieces, tokens when they are asked for.

Credentials go to the origin of the registry alone: a redirect is followed without them, a token is asked for with the
machine's signature only at the registry's own host. Knows not what the blobs are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from puna.errors import SourceError
from puna.store.disk.manifests import MANIFEST_TYPE, MAX_MANIFEST_BYTES
from puna.store.sources.registry.challenge import Challenge, signed_text
from puna.store.sources.registry.identity import Identity
from puna.store.sources.registry.place import Place
from puna.store.sources.web.http import MAX_REDIRECTS, REDIRECTS, Answer, Http, Passing, origin
from puna.store.sources.web.retry import Sleep, persistently

OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
MAX_TOKEN_BYTES = 1 << 20
_ACCEPTED = ", ".join((MANIFEST_TYPE, OCI_MANIFEST, OCI_INDEX))

Content = bytes | Callable[[], Iterator[bytes]]
"""A body, or what makes it anew each time that it has to be sent."""

_EXPIRED = frozenset((400, 401, 403, 404, 410))


class Unauthorized(SourceError):
    """The registry does not let this machine do that."""


class Missing(SourceError):
    """The registry has no such thing."""


class _Token(msgspec.Struct):
    token: str = ""
    access_token: str = ""


class Registry:
    """One repository of a registry; may be used from several threads."""

    def __init__(self, http: Http, place: Place, identity: Identity) -> None:
        self.place = place
        self._http = http
        self._identity = identity
        self._lock = threading.Lock()
        self._token = place.token
        self._direct: dict[str, str] = {}  # where a blob really is, as the registry said last

    def manifest(self, reference: str, sleep: Sleep) -> bytes:
        """The exact bytes of a manifest.

        Errors: Missing; Unauthorized; SourceError.
        """

        def read() -> bytes:
            with self.ask("GET", self.place.url(f"manifests/{reference}"), {"Accept": _ACCEPTED}) as answer:
                if answer.status != 200:
                    raise self.failure(answer)
                return answer.read(MAX_MANIFEST_BYTES)

        return persistently(read, sleep)

    @contextmanager
    def blob(self, digest: str, begin: int, end: int) -> Iterator[Answer]:
        """A part of a blob; may be answered with all of it.

        Errors: Passing; Missing; Unauthorized; SourceError.
        """
        headers = {"Range": f"bytes={begin}-{end - 1}"} if end > begin else {}
        url = self._direct.get(digest, "") or self.place.url(f"blobs/{digest}")
        with self.ask("GET", url, headers) as answer:
            is_elsewhere = origin(answer.url) != origin(self.place.base)
            if answer.status in (200, 206):
                self._direct[digest] = answer.url if is_elsewhere else ""
                yield answer
                return
            self._direct.pop(digest, None)
            if is_elsewhere and answer.status in _EXPIRED:  # links of object stores end; the registry gives new ones
                raise Passing(f"the link to {digest} has expired ({answer.says()})")
            raise self.failure(answer)

    @contextmanager
    def ask(
        self, method: str, url: str, headers: Mapping[str, str] | None = None, content: Content | None = None
    ) -> Iterator[Answer]:
        """A request to the registry, with a token when it wants one; questions are also asked where it redirects them to.

        Errors: Passing; Unauthorized; SourceError.
        """
        has_asked = False
        for _ in range(MAX_REDIRECTS + 1):
            is_ours = origin(url) == origin(self.place.base)
            token = self._token if is_ours else ""
            sent = {**(headers or {}), **({"Authorization": f"Bearer {token}"} if token else {})}
            with self._http.ask(method, url, sent, content() if callable(content) else content) as answer:
                challenge = Challenge.parse(answer.headers) if answer.status == 401 and is_ours else None
                if answer.status in REDIRECTS and method in ("GET", "HEAD"):
                    url = answer.location()
                    continue
                if challenge is not None and not has_asked:
                    has_asked = True
                    self._authorize(challenge, token)
                    continue
                yield answer
                return
        raise SourceError(f"maximum redirects exceeded ({MAX_REDIRECTS}) for {url[:200]}")

    def failure(self, answer: Answer) -> Exception:
        """What to raise for an answer that is not the one hoped for."""
        if answer.status == 404:
            return Missing("file does not exist")
        if answer.status in (401, 403):
            return Unauthorized("unauthorized: access denied")
        return answer.failure()

    def _authorize(self, challenge: Challenge, refused: str) -> None:
        """Get a token, unless another thread has got one since."""
        with self._lock:
            if self._token != refused:
                return
            self._token = self._new_token(challenge)

    def _new_token(self, challenge: Challenge) -> str:
        """Signed when it is the registry itself that wants to know who asks; who does not know signatures is asked as anybody
        would, and so are token servers elsewhere.
        """
        if self.place.base.startswith("https:") and not challenge.realm.startswith("https:"):
            raise SourceError(f"{self.place.host} wants a token from {challenge.realm[:200]}, without protection; refused")
        is_its_own = origin(challenge.realm) == origin(self.place.base) and not self.place.token
        token = self._asked_token(challenge, is_signed=True) if is_its_own else ""
        token = token or self._asked_token(challenge, is_signed=False)
        if not token:
            raise Unauthorized("unauthorized: access denied")
        return token

    def _asked_token(self, challenge: Challenge, *, is_signed: bool) -> str:
        """Empty when it is refused."""
        url = challenge.url(is_signed=is_signed)
        headers = {"Authorization": self._identity.authorization(signed_text(url))} if is_signed else {}
        with self._http.ask("GET", url, headers) as answer:
            if answer.status in (400, 401, 403, 404):
                return ""
            if answer.status != 200:
                raise answer.failure()
            try:
                found = msgspec.json.decode(answer.read(MAX_TOKEN_BYTES), type=_Token)
            except msgspec.MsgspecError as error:
                raise SourceError(f"{self.place.host} gave no token: {error}") from error
        token = found.token or found.access_token
        return token if token.isprintable() and token.isascii() else ""
