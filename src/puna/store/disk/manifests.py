"""Manifests: ``manifests/<host>/<namespace>/<model>/<tag>``, one JSON file per model, naming its layers.

Knows which blobs a model consists of, not what is in them. The digest of a model is the hash of its manifest's exact bytes.
A manifest that cannot be read is never taken for one that is not there: what it names must not be removed.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from puna.errors import BadRequest, FileFormatError, InvalidName, NotFound, PunaError, StoreError
from puna.store.disk.blobs import parse_digest
from puna.store.disk.files import is_absent, is_file, names_in, read_with_time, remove_empty_folders, write_atomically
from puna.store.names import Name

log = logging.getLogger(__name__)

MAX_MANIFEST_BYTES = 4 << 20
MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG_TYPE = "application/vnd.docker.container.image.v1+json"
LAYER_PREFIX = "application/vnd.ollama.image."
UNFINISHED = re.compile(r"\.[0-9a-f]{16}")  # what a process that died while it wrote a manifest leaves beside it


class Layer(msgspec.Struct, frozen=True, omit_defaults=True, rename={"media_type": "mediaType", "origin": "from"}):
    """One blob and its meaning; *origin* names the model it was taken over from."""

    media_type: str
    digest: str
    size: int
    origin: str = ""
    name: str = ""

    @property
    def kind(self) -> str:
        """The last part of the media type: ``model``, ``params``, ``template`` …"""
        return self.media_type.partition(";")[0].removeprefix(LAYER_PREFIX)


class Manifest(msgspec.Struct, frozen=True, rename="camel"):
    """A model's configuration and layers."""

    schema_version: int
    media_type: str
    config: Layer
    layers: list[Layer]

    @property
    def blobs(self) -> tuple[Layer, ...]:
        """Everything the manifest keeps alive."""
        return (self.config, *self.layers)

    @property
    def n_bytes(self) -> int:
        return sum(layer.size for layer in self.blobs)

    def encoded(self) -> bytes:
        """As Ollama writes it, the line end included."""
        return msgspec.json.encode(self) + b"\n"


class _Tolerant(msgspec.Struct, rename="camel"):
    # what others wrote may lack what we do not need
    config: Layer
    schema_version: int = 2
    media_type: str = MANIFEST_TYPE
    layers: list[Layer] | None = None


def decode(content: bytes) -> Manifest:
    """Read and check a manifest.

    Errors: FileFormatError saying which field is wrong.
    """
    try:
        found = msgspec.json.decode(content, type=_Tolerant)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileFormatError(f"not a manifest: {error}") from error
    manifest = Manifest(found.schema_version, found.media_type, found.config, found.layers or [])
    for layer in manifest.blobs:
        try:
            canonical = parse_digest(layer.digest)
        except BadRequest as error:
            raise FileFormatError(f"not a manifest: the digest {layer.digest[:100]!r} is malformed") from error
        if canonical != layer.digest:
            raise FileFormatError(f"not a manifest: the digest {layer.digest!r} must be written with a colon")
        if not 0 <= layer.size < 1 << 63:
            raise FileFormatError(f"not a manifest: layer {layer.digest} has the size {layer.size}")
    return manifest


@dataclass(frozen=True)
class StoredManifest:
    """A manifest as it lies in the store; *digest* is the hash of its bytes, in hex without prefix."""

    name: Name
    manifest: Manifest
    digest: str
    modified_at: float  # seconds since 1970


class Manifests:
    """The folder of manifests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: Name) -> Path:
        """Where a manifest is, or would be.

        Errors: InvalidName when the operating system reads more into the parts than the grammar does (drive letters).
        """
        path = self.folder.joinpath(*name.parts)
        if path.parts[len(self.folder.parts) :] != name.parts:
            raise InvalidName("invalid model name")
        return path

    def has(self, name: Name) -> bool:
        """Whether there is a manifest of exactly this name.

        Errors: StoreError when that cannot be told.
        """
        return is_file(self.path(name))

    def find(self, name: Name) -> Name:
        """The stored name that equals *name* but for case, or *name* itself when there is none.

        Errors: StoreError when a folder that may hold it cannot be read.
        """
        if self.has(name):
            return name
        return next((found for found in self._names(name, _raise) if found.is_same(name)), name)

    def read(self, name: Name) -> StoredManifest:
        """The manifest of exactly this name.

        Errors: NotFound; StoreError when there is one that cannot be read, FileFormatError when it makes no sense, both
        naming the model.
        """
        content, modified_at = self._content(name)
        try:
            manifest = decode(content)
        except FileFormatError as error:
            raise FileFormatError(f"the manifest of {name.display} is damaged: {error}") from error
        return StoredManifest(name, manifest, hashlib.sha256(content).hexdigest(), modified_at)

    def content(self, name: Name) -> bytes:
        """The exact bytes of the manifest of exactly this name.

        Errors: as read, but nothing is made of what is in it.
        """
        return self._content(name)[0]

    def _content(self, name: Name) -> tuple[bytes, float]:
        path = self.path(name)
        try:
            return read_with_time(path, MAX_MANIFEST_BYTES)
        except OSError as error:
            if is_absent(path, error):  # also a name that is too long for the file system
                raise NotFound(f"model '{name.display}' not found") from error
            raise StoreError(f"the manifest of {name.display} cannot be read: {error.strerror}") from error
        except FileFormatError as error:
            raise FileFormatError(f"the manifest of {name.display} is damaged: {error}") from error

    def write(self, name: Name, manifest: Manifest) -> None:
        """Errors: InvalidName when the file system cannot hold the name."""
        self.write_bytes(name, manifest.encoded())

    def write_bytes(self, name: Name, content: bytes) -> None:
        """Store a manifest's exact bytes, so that its digest stays what it was elsewhere."""
        decode(content)
        path = self.path(name)
        if any(len(part) > 255 for part in name.parts):
            raise InvalidName("invalid model name")
        try:
            write_atomically(path, content)
        except OSError:
            remove_empty_folders(path.parent, self.folder)
            raise

    def remove(self, name: Name) -> None:
        """Remove a manifest and the folders it leaves empty."""
        path = self.path(name)
        path.unlink(missing_ok=True)
        remove_empty_folders(path.parent, self.folder)

    def names(self) -> Iterator[Name]:
        """All names with a file, in no order; files whose path is no valid name are skipped.

        Errors: StoreError when a folder cannot be read.
        """
        yield from self._names(None, _raise)

    def all(self) -> tuple[list[StoredManifest], list[PunaError]]:
        """All manifests that can be read, and what is wrong with the others, which the log names too."""
        found: list[StoredManifest] = []
        problems: list[PunaError] = []
        for name in self._names(None, problems.append):
            try:
                found.append(self.read(name))
            except (FileFormatError, StoreError) as error:
                problems.append(error)
            except NotFound:  # removed since it was listed
                continue
        for problem in problems:
            log.warning("skipping a model: %s", problem)
        return found, problems

    def used(self) -> frozenset[str]:
        """Digests of all blobs that any manifest names, also those under names that are not valid here.

        Errors: StoreError when one cannot be read or makes no sense, or a folder cannot be read: what else is used is not
        known then.
        """
        digests: set[str] = set()
        for path in self._files(None, _raise):
            if path.name.startswith("."):
                continue
            try:
                manifest = decode(read_with_time(path, MAX_MANIFEST_BYTES)[0])
            except OSError as error:
                if is_absent(path, error):
                    continue
                raise StoreError(f"the manifest {path} cannot be read: {error.strerror}") from error
            except FileFormatError as error:
                raise StoreError(f"the manifest {path} is damaged: {error}") from error
            digests.update(layer.digest for layer in manifest.blobs)
        return frozenset(digests)

    def unfinished(self) -> Iterator[Path]:
        """Files of writers that did not finish; only while nobody writes are all of them dead.

        Errors: StoreError when a folder cannot be read.
        """
        return (path for path in self._files(None, _raise) if UNFINISHED.fullmatch(path.name))

    def _names(self, like: Name | None, on_error: OnError) -> Iterator[Name]:
        for path in self._files(like, on_error):
            host, namespace, model, tag = path.parts[-4:]
            try:
                yield Name(host=host, namespace=namespace, model=model, tag=tag)
            except InvalidName:
                if not tag.startswith("."):  # our own unfinished files
                    log.warning("skipping the manifest %s/%s/%s/%s: no valid model name", host, namespace, model, tag)

    def _files(self, like: Name | None, on_error: OnError) -> Iterator[Path]:
        """Walk the four levels, below *like* only where a folder's name equals its part but for case."""
        folders = [self.folder]
        for wanted in (None,) * 4 if like is None else like.key:
            folders = [path for folder in folders for path in _entries(folder, wanted, on_error)]
        for path in folders:
            try:
                if is_file(path):
                    yield path
            except StoreError as error:
                on_error(error)


OnError = Callable[[StoreError], object]


def _raise(error: StoreError) -> None:
    raise error


def _entries(folder: Path, wanted: str | None, on_error: OnError) -> list[Path]:
    try:
        names = names_in(folder)
    except StoreError as error:
        on_error(error)
        return []
    return [folder / name for name in names if wanted is None or name.casefold() == wanted]
