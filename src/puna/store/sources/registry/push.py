"""Push a model to the registry of its name: blobs that are not there, then the manifest as it is here, byte for byte.

A blob goes in pieces one after the other, each where the registry says that the next one goes; when a piece breaks off, the
registry says how much of it has come.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urljoin, urlsplit

from puna.errors import InvalidName, NotFound, SourceError
from puna.store.disk.blobs import short
from puna.store.disk.files import open_regular
from puna.store.disk.manifests import MANIFEST_TYPE, Layer, decode
from puna.store.folder import ModelFolder
from puna.store.names import Name
from puna.store.progress import Progress, Report
from puna.store.sources.elsewhere import Elsewhere
from puna.store.sources.registry.client import Missing, Registry
from puna.store.sources.registry.identity import Identity
from puna.store.sources.registry.place import place_of
from puna.store.sources.web.download import MAX_PART_BYTES, MIN_PART_BYTES, N_PARTS, TICK_S
from puna.store.sources.web.http import Answer, Http, Passing
from puna.store.sources.web.retry import Tries, persistently

SEND_BYTES = 256 << 10
_OCTETS = "application/octet-stream"


def push(folder: ModelFolder, text: str, elsewhere: Elsewhere, report: Report, *, insecure: bool = False) -> None:
    """Send a model to where its name says.

    Errors: NotFound; InvalidName; BadRequest; SourceError with what the registry said; FileFormatError; StoreError.
    """
    name = Name.parse(text)
    place = place_of(name, elsewhere, insecure=insecure)
    report(Progress("retrieving manifest"))
    with folder.work() as work:
        try:
            content = folder.manifests.content(folder.manifests.find(name))
        except NotFound:
            report(Progress("couldn't retrieve manifest"))
            raise
        manifest = decode(content)
        layers = {layer.digest: layer for layer in (*manifest.layers, manifest.config)}
        work.claim(layers)
        with Http(place.host) as http:
            registry = Registry(http, place, Identity(elsewhere.key_path))
            for layer in layers.values():
                _Upload(folder, http, registry, layer, report).run(name)
            report(Progress("pushing manifest"))
            _put_manifest(registry, content, manifest.media_type, _sleeper(report, Progress("pushing manifest")))
    report(Progress("success"))


def _put_manifest(registry: Registry, content: bytes, media_type: str, sleep: Callable[[float], None]) -> None:
    def put() -> None:
        headers = {"Content-Type": media_type or MANIFEST_TYPE}
        with registry.ask("PUT", registry.place.url(f"manifests/{registry.place.tag}"), headers, content) as answer:
            if answer.status not in (200, 201, 202):
                raise registry.failure(answer)

    persistently(put, sleep)


def _sleeper(report: Report, line: Progress) -> Callable[[float], None]:
    """Waits, and says so, which tells whether anybody still wants it."""

    def sleep(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            report(line)
            time.sleep(TICK_S)

    return sleep


@dataclass
class _Session:
    """An upload under way, as the registry has it."""

    url: str
    n_sent: int = 0


class _Piece:
    """A part of a file, to be sent as often as need be."""

    def __init__(self, path: Path, begin: int, end: int, on_sent: Callable[[int], None]) -> None:
        self.begin = begin
        self.end = end
        self.md5 = hashlib.md5(usedforsecurity=False)
        self._path = path
        self._on_sent = on_sent

    @property
    def headers(self) -> dict[str, str]:
        return {"Content-Type": _OCTETS, "Content-Length": str(self.end - self.begin)}

    def chunks(self) -> Iterator[bytes]:
        self.md5 = hashlib.md5(usedforsecurity=False)
        at = self.begin
        with os.fdopen(open_regular(self._path), "rb") as file:
            file.seek(at)
            while at < self.end:
                chunk = file.read(min(SEND_BYTES, self.end - at))
                if not chunk:
                    raise SourceError(f"{self._path.name} is shorter than it was")
                self.md5.update(chunk)
                yield chunk
                at += len(chunk)
                self._on_sent(at)


class _Upload:
    """One blob on its way to a registry."""

    def __init__(self, folder: ModelFolder, http: Http, registry: Registry, layer: Layer, report: Report) -> None:
        self._http = http
        self._registry = registry
        self._layer = layer
        self._report = report
        self._path = folder.blobs.path(layer.digest)
        self._n_bytes = folder.blobs.n_bytes(layer.digest)
        self._sums: list[bytes] = []  # of the pieces, for registries that keep them as an object store does
        self._line(0)

    def run(self, name: Name) -> None:
        if self._n_bytes != self._layer.size:
            raise SourceError(f"the blob {self._layer.digest} has {self._n_bytes} bytes instead of {self._layer.size}")
        sleep = _sleeper(self._report, self._progress(0))
        if not persistently(self._is_there, sleep):
            session = persistently(lambda: self._begin(name), sleep)
            if session is not None:
                self._send(session, name)
                persistently(lambda: self._commit(session), sleep)
        self._line(self._n_bytes)

    def _progress(self, n_done: int) -> Progress:
        return Progress(f"pushing {short(self._layer.digest)}", self._layer.digest, self._n_bytes, n_done)

    def _line(self, n_done: int) -> None:
        self._report(self._progress(n_done))

    def _is_there(self) -> bool:
        with self._registry.ask("HEAD", self._registry.place.url(f"blobs/{self._layer.digest}")) as answer:
            if answer.status == 200:
                return True
            if answer.status == 404:
                return False
            raise self._registry.failure(answer)

    def _begin(self, name: Name) -> _Session | None:
        """None when the registry had the blob in another repository."""
        query = {"mount": self._layer.digest, "from": source} if (source := _repository(self._layer.origin, name)) else {}
        url = self._registry.place.url("blobs/uploads/") + (f"?{urlencode(query)}" if query else "")
        with self._registry.ask("POST", url, {"Content-Type": _OCTETS}, b"") as answer:
            if answer.status == 201 and query:
                return None
            if answer.status not in (200, 201, 202):
                raise self._refusal(answer)
            return _Session(_next(answer))

    def _send(self, session: _Session, name: Name) -> None:
        n_part = max(1, min(max(self._n_bytes // N_PARTS, MIN_PART_BYTES), MAX_PART_BYTES))
        tries = Tries()
        while session.n_sent < self._n_bytes:
            end = min(session.n_sent + n_part, self._n_bytes)
            try:
                self._send_piece(session, end)
                tries.progressed()
            except Passing as error:
                tries.again(error, _sleeper(self._report, self._progress(session.n_sent)), error.after_s)
                self._ask_again(session, name)

    def _send_piece(self, session: _Session, end: int) -> None:
        piece = _Piece(self._path, session.n_sent, end, self._line)
        headers = {**piece.headers, "Content-Range": f"{piece.begin}-{end - 1}", "X-Redirect-Uploads": "1"}
        with self._registry.ask("PATCH", session.url, headers, piece.chunks) as answer:
            if answer.status not in (200, 201, 202, 204, 307):
                raise self._refusal(answer)
            after = _next(answer)
            target = answer.location() if answer.status == 307 else ""
        if target:  # another host, which gets no credentials
            with self._http.ask("PUT", target, piece.headers, piece.chunks()) as answer:
                if answer.status not in (200, 201, 202, 204):
                    raise answer.failure()
        session.url, session.n_sent = after, end
        self._sums.append(piece.md5.digest())

    def _ask_again(self, session: _Session, name: Name) -> None:
        """How much has come, or where to begin anew when the registry knows nothing of it any more."""

        def ask() -> str:
            with self._registry.ask("GET", session.url) as answer:
                if answer.status not in (200, 202, 204):
                    return ""
                session.url = _next(answer) if "location" in answer.headers else session.url
                return answer.headers.get("range", "")

        sleep = _sleeper(self._report, self._progress(session.n_sent))
        last = persistently(ask, sleep).removeprefix("bytes=").partition("-")[2]
        if last.isascii() and last.isdigit() and int(last) < self._n_bytes:
            session.n_sent = int(last) + 1 if last != "0" else 0  # which is how they say that nothing has
            return
        fresh = persistently(lambda: self._begin(name), sleep)
        if fresh is not None:
            session.url, session.n_sent, self._sums = fresh.url, 0, []

    def _commit(self, session: _Session) -> None:
        etag = hashlib.md5(b"".join(self._sums), usedforsecurity=False).hexdigest()
        parts = urlsplit(session.url)
        query = [*parse_qsl(parts.query), ("digest", self._layer.digest), ("etag", f"{etag}-{len(self._sums)}")]
        with self._registry.ask("PUT", parts._replace(query=urlencode(query)).geturl(), {"Content-Type": _OCTETS}, b"") as answer:
            if answer.status not in (200, 201, 202, 204):
                raise self._refusal(answer)

    def _refusal(self, answer: Answer) -> Exception:
        failure = self._registry.failure(answer)
        return SourceError("the registry does not take blobs for this repository") if isinstance(failure, Missing) else failure


def _next(answer: Answer) -> str:
    """Where the next piece goes.

    Errors: SourceError when the registry does not say.
    """
    location = answer.headers.get("docker-upload-location") or answer.headers.get("location", "")
    if not location:
        raise SourceError("the registry does not say where to send the blob")
    return urljoin(answer.url, location)


def _repository(origin: str, name: Name) -> str:
    """Of the model that a layer was taken over from, if the same registry may have it."""
    try:
        source = Name.parse(origin) if origin else None
    except InvalidName:
        return ""
    return f"{source.namespace}/{source.model}" if source and source.host.casefold() == name.host.casefold() else ""
