"""A GGUF file by its address: ``https://HOST/PATH/model.gguf``.

Nobody says beforehand what its bytes are, unless the server states their hash as the hub does; otherwise the file is what came
over a protected connection. Taken up again it is only as long as the server says that it is still the same file.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

from puna.errors import BadRequest, InvalidName, SourceError
from puna.store.disk import partial, space
from puna.store.disk.blobs import Blob, Blobs
from puna.store.disk.claims import Work
from puna.store.disk.config import ModelConfig
from puna.store.folder import ModelFolder, Permit
from puna.store.models.details import read_details
from puna.store.models.model import StoredModel
from puna.store.names import DEFAULT_TAG, MAX_LENGTH, Name
from puna.store.progress import Progress, Report
from puna.store.recipe import Recipe
from puna.store.sources.elsewhere import Elsewhere
from puna.store.sources.source import Fetched, Ingredients
from puna.store.sources.web.download import TICK_S, Remote, fetch
from puna.store.sources.web.http import MAX_REDIRECTS, REDIRECTS, Answer, Http, Passing, origin
from puna.store.sources.web.retry import persistently

MAX_FILES = 1000
_PART = re.compile(r"-([0-9]{5})-of-([0-9]{5})(\.gguf)$", re.IGNORECASE)
_SHA256 = re.compile(r'"?([0-9a-f]{64})"?')


@dataclass(frozen=True)
class _Found:
    """What the server says of the file."""

    url: str  # after all redirects
    n_bytes: int
    version: str  # an ETag, or a date; empty when the server says neither
    sha256: str  # empty when it does not say

    def mark(self, url: str) -> str:
        """The digest; where nobody says it, what stands for it until all is here: what has come goes by what the server says."""
        marked = f"{url} {self.version} {self.n_bytes}"
        return f"sha256:{self.sha256 or hashlib.sha256(marked.encode()).hexdigest()}"

    def n_missing(self, blobs: Blobs, url: str) -> int:
        """Bytes that the disk must still have room for."""
        digest = self.mark(url)
        return 0 if blobs.has(digest) else max(0, self.n_bytes - partial.n_allocated(blobs, digest))


@dataclass(frozen=True)
class FileSource:
    """One file at one address."""

    url: str
    elsewhere: Elsewhere
    insecure: bool = False

    @classmethod
    def parse(cls, text: str, elsewhere: Elsewhere, *, insecure: bool) -> FileSource:
        """Errors: InvalidName."""
        parts = urlsplit(text)
        if len(text) > MAX_LENGTH or not parts.hostname or parts.username or not text.isprintable() or " " in text:
            raise InvalidName("invalid model name: the address of a file needs a host, and holds no user and no spaces")
        return cls(parts._replace(scheme=parts.scheme.lower(), fragment="").geturl(), elsewhere, insecure)

    @property
    def key(self) -> str:
        return self.url

    def is_source_of(self, config: ModelConfig) -> bool:
        source = config.source or {}
        return source.get("type") == "url" and source.get("url") == self.url

    def permit(self, name: Name) -> Permit:
        def permit(config: ModelConfig) -> None:
            if not self.is_source_of(config):
                raise BadRequest(
                    f"there is a model {name.display} already, and it did not come from {self.url}: it stays as it is. "
                    f'Choose another name for the new one: "puna pull {self.url} --as NAME", or "as": "NAME" in /api/pull'
                )

        return permit

    def known(self, folder: ModelFolder, wanted: Name | None) -> StoredModel | None:
        if self.url.startswith("http:") and not self.insecure:
            raise BadRequest("insecure protocol http")
        name = wanted or self._name()
        folder.check_replaceable(name, self.permit(name))
        return None

    def fetch(self, folder: ModelFolder, work: Work, report: Report, wanted: Name | None) -> Fetched:
        parts = [replace(self, url=url) for url in _addresses(self.url)]
        with Http(urlsplit(self.url).hostname or "", self.elsewhere.n_streams) as http:
            found = {part: part._look(http, report) for part in parts}
            version = " ".join(item.version for item in found.values()) if all(item.version for item in found.values()) else ""
            known = self._stored(folder, version)
            if known is not None:
                return known
            blobs = folder.blobs_kept_by(work)
            work.claim(item.mark(part.url) for part, item in found.items())
            space.require(folder.root, sum(item.n_missing(blobs, part.url) for part, item in found.items()))
            brought = {part: part._bring(http, blobs, item, report) for part, item in found.items()}
        report(Progress("verifying sha256 digest"))
        for blob in brought.values():
            if read_details(folder.blobs.path(blob.digest)).kind != "model":
                raise SourceError(f"{self.url} holds no model")
        name = wanted or self._name()
        digests = " ".join(blob.digest.removeprefix("sha256:") for blob in brought.values())
        source = {"type": "url", "url": self.url, "version": version, "sha256": digests}
        files = {part._file: blob.digest for part, blob in brought.items()}
        return Ingredients(name, Recipe(files=files, source=source), self.permit(name))

    def _bring(self, http: Http, blobs: Blobs, found: _Found, report: Report) -> Blob:
        remote = Remote(
            found.mark(self.url),
            found.n_bytes,
            lambda begin, end: self._part(http, found, begin, end),
            f"pulling {self._file}",
        )
        return fetch(blobs, remote, report, self.elsewhere.n_streams, is_known=bool(found.sha256))

    @property
    def _file(self) -> str:
        return PurePosixPath(unquote(urlsplit(self.url).path)).name

    def _name(self) -> Name:
        """The file's own; what stands behind its last point may be a quantisation, which is no tag: people search by names."""
        stem = re.sub(r"[^a-z0-9._-]+", "-", _PART.sub(".gguf", self._file.lower()).removesuffix(".gguf")).strip("-._")[:80]
        return Name(stem or "model", DEFAULT_TAG)

    def _stored(self, folder: ModelFolder, version: str) -> StoredModel | None:
        """The model if it is here whole, and the server says that its files are still the same."""
        for model in folder.list():
            source = model.config.source or {}
            is_same = self.is_source_of(model.config) and bool(version) and source.get("version") == version
            if is_same and all(folder.blobs.has(layer.digest) for layer in (model.manifest.blobs if model.manifest else ())):
                return model
        return None

    def _look(self, http: Http, report: Report) -> _Found:
        def sleep(seconds: float) -> None:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                report(Progress("pulling manifest"))
                time.sleep(TICK_S)

        def look() -> _Found:
            sha256 = ""
            url = self.url
            for _ in range(MAX_REDIRECTS + 1):
                with http.ask("GET", url, {"Range": "bytes=0-0", **self._token(url)}) as answer:
                    linked = _SHA256.fullmatch(answer.headers.get("x-linked-etag", ""))
                    sha256 = linked[1] if linked and origin(url) == origin(self.elsewhere.hub) else sha256
                    if answer.status in REDIRECTS:
                        url = answer.location()
                        continue
                    if answer.status == 404:
                        raise SourceError(f"{self.url}: file does not exist")
                    if answer.status not in (200, 206):
                        raise answer.failure()
                    version = answer.headers.get("etag", "") or answer.headers.get("last-modified", "")
                    return _Found(url, _n_bytes(answer), version, sha256)
            raise SourceError(f"maximum redirects exceeded ({MAX_REDIRECTS}) for {self.url}")

        return persistently(look, sleep)

    @contextmanager
    def _part(self, http: Http, found: _Found, begin: int, end: int) -> Iterator[Answer]:
        """Through the redirects anew each time: where they lead may hold for minutes only."""
        url = self.url
        headers = {"Range": f"bytes={begin}-{end - 1}"} if end > begin else {}
        for _ in range(MAX_REDIRECTS + 1):
            with http.ask("GET", url, {**headers, **self._token(url)}) as answer:
                if answer.status in REDIRECTS:
                    url = answer.location()
                    continue
                if answer.status not in (200, 206):
                    raise answer.failure()
                version = answer.headers.get("etag", "") or answer.headers.get("last-modified", "")
                if version != found.version:
                    raise SourceError(f"{self.url} has become another file meanwhile; pull it again")
                yield answer
                return
        raise Passing(f"maximum redirects exceeded ({MAX_REDIRECTS}) for {self.url}")

    def _token(self, url: str) -> dict[str, str]:
        """The hub's token for the hub, and for nobody else."""
        is_hub = origin(url) == origin(self.elsewhere.hub)
        return {"Authorization": f"Bearer {self.elsewhere.hub_token}"} if is_hub and self.elsewhere.hub_token else {}


def _addresses(url: str) -> list[str]:
    """Of all files that a large model was cut into, where the address of one of them says how many."""
    parts = urlsplit(url)
    found = _PART.search(parts.path)
    if found is None:
        return [url]
    n = min(int(found[2]), MAX_FILES)
    return [
        parts._replace(path=f"{parts.path[: found.start()]}-{number:05d}-of-{found[2]}{found[3]}").geturl()
        for number in range(1, n + 1)
    ]


def _n_bytes(answer: Answer) -> int:
    """Errors: SourceError when the server does not say how large the file is."""
    total = answer.headers.get("content-range", "").rpartition("/")[2] if answer.status == 206 else ""
    text = total or answer.headers.get("content-length", "")
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise SourceError(f"{answer.url[:200]}: the server does not say how large the file is")
    return int(text)
