"""Manifests: ``manifests/<host>/<namespace>/<model>/<tag>``, one JSON file per model, naming its layers.

Knows which blobs a model consists of, not what is in them. The digest of a model is the hash of its manifest's exact bytes.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from puna.errors import BadRequest, FileFormatError, InvalidName, NotFound
from puna.store.blobs import parse_digest
from puna.store.files import read_limited, remove_empty_folders, write_atomically
from puna.store.names import Name

log = logging.getLogger(__name__)

MAX_MANIFEST_BYTES = 4 << 20
MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG_TYPE = "application/vnd.docker.container.image.v1+json"
LAYER_PREFIX = "application/vnd.ollama.image."


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

    def find(self, name: Name) -> Name:
        """The stored name that equals *name* but for case, or *name* itself when there is none."""
        if _is_file(self.path(name)):
            return name
        return next((found for found in self._names(name) if found.is_same(name)), name)

    def read(self, name: Name) -> StoredManifest:
        """The manifest of exactly this name.

        Errors: NotFound; FileFormatError naming the model.
        """
        path = self.path(name)
        try:
            content = read_limited(path, MAX_MANIFEST_BYTES)
            modified_at = path.stat().st_mtime
            manifest = decode(content)
        except OSError as error:  # also a name that is too long for the file system
            raise NotFound(f"model '{name.display}' not found") from error
        except FileFormatError as error:
            raise FileFormatError(f"the manifest of {name.display} is damaged: {error}") from error
        return StoredManifest(name, manifest, hashlib.sha256(content).hexdigest(), modified_at)

    def write(self, name: Name, manifest: Manifest) -> None:
        """Errors: InvalidName when the file system cannot hold the name."""
        self.write_bytes(name, manifest.encoded())

    def write_bytes(self, name: Name, content: bytes) -> None:
        """Store a manifest's exact bytes, so that its digest stays what it was elsewhere."""
        decode(content)
        path = self.path(name)
        if any(len(part) > 255 for part in name.parts):
            raise InvalidName("invalid model name")
        write_atomically(path, content)

    def remove(self, name: Name) -> None:
        """Remove a manifest and the folders it leaves empty."""
        path = self.path(name)
        path.unlink(missing_ok=True)
        remove_empty_folders(path.parent, self.folder)

    def names(self) -> Iterator[Name]:
        """All names with a file, in no order; files whose path is no valid name are skipped."""
        yield from self._names(None)

    def all(self) -> tuple[list[StoredManifest], bool]:
        """All manifests that can be read, and whether there are others; those are named in the log."""
        found: list[StoredManifest] = []
        is_complete = True
        for name in self.names():
            try:
                found.append(self.read(name))
            except FileFormatError as error:
                is_complete = False
                log.warning("skipping a model: %s", error)
            except NotFound:  # removed since it was listed
                continue
        return found, is_complete

    def _names(self, like: Name | None) -> Iterator[Name]:
        """Walk the four levels, below *like* only where a folder's name equals its part but for case."""
        wanted = (None,) * 4 if like is None else like.key
        for host in _entries(self.folder, wanted[0]):
            for namespace in _entries(self.folder / host, wanted[1]):
                for model in _entries(self.folder / host / namespace, wanted[2]):
                    folder = self.folder / host / namespace / model
                    for tag in _entries(folder, wanted[3]):
                        if not _is_file(folder / tag):
                            continue
                        try:
                            yield Name(host=host, namespace=namespace, model=model, tag=tag)
                        except InvalidName:
                            if not tag.startswith("."):  # our own unfinished files
                                log.warning("skipping the manifest %s/%s/%s/%s: no valid model name", host, namespace, model, tag)


def _entries(folder: Path, wanted: str | None) -> list[str]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted(name for name in names if wanted is None or name.casefold() == wanted)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
