"""Manifests of registries of containers: which of the layers are a model's files, whoever packed them.

Docker's and the CNCF's types for models are known; other layers count by the name that packers write beside them. Knows not
where a manifest came from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePosixPath

import msgspec

from puna.errors import SourceError
from puna.store.disk.blobs import parse_digest
from puna.store.disk.manifests import LAYER_PREFIX

MAX_LICENSE_BYTES = 1 << 20
_TITLES = ("org.opencontainers.image.title", "org.cncf.model.filepath")
_HERE = ("linux/amd64", "linux/arm64")  # of several manifests these first; most models are for any machine


class _Platform(msgspec.Struct):
    os: str = ""
    architecture: str = ""


class Descriptor(msgspec.Struct, rename={"media_type": "mediaType"}):
    """What a manifest says about one blob."""

    media_type: str = ""
    digest: str = ""
    size: int = 0
    annotations: dict[str, str] | None = None
    platform: _Platform | None = None

    @property
    def title(self) -> str:
        """The file's name, without folders."""
        notes = self.annotations or {}
        return next((PurePosixPath(notes[key].replace("\\", "/")).name for key in _TITLES if notes.get(key)), "")

    @property
    def is_gguf(self) -> bool:
        return "gguf" in self.media_type or self.title.lower().endswith(".gguf") or self.is_projector

    @property
    def is_projector(self) -> bool:
        return "mmproj" in self.media_type or "mmproj" in self.title.lower()


class _Document(msgspec.Struct, rename={"media_type": "mediaType"}):
    media_type: str = ""
    config: Descriptor | None = None
    layers: list[Descriptor] | None = None
    manifests: list[Descriptor] | None = None


@dataclass(frozen=True)
class Files:
    """The layers of a manifest that a model is made of."""

    weights: Descriptor
    projectors: tuple[Descriptor, ...] = field(default=())
    licenses: tuple[Descriptor, ...] = field(default=())

    @property
    def all(self) -> tuple[Descriptor, ...]:
        return (self.weights, *self.projectors, *self.licenses)


def is_foreign(content: bytes) -> bool:
    """Whether a manifest is one of containers rather than of a model."""
    found = _decoded(content)
    return not any(layer.media_type.startswith(LAYER_PREFIX) for layer in found.layers or ())


def chosen(content: bytes) -> str:
    """The digest of the manifest that an index of several leads to; empty when this is a manifest itself."""
    found = _decoded(content)
    if not found.manifests:
        return ""

    def rank(item: Descriptor) -> int:
        platform = f"{item.platform.os}/{item.platform.architecture}" if item.platform else ""
        return _HERE.index(platform) if platform in _HERE else len(_HERE)

    return parse_digest(min(found.manifests, key=rank).digest)


def files_of(content: bytes, what: str) -> Files:
    """The files of the model that a manifest holds.

    Errors: SourceError when there is none, or more than one.
    """
    found = _decoded(content)
    layers = found.layers or []
    for layer in layers:
        if parse_digest(layer.digest) != layer.digest or not 0 <= layer.size < 1 << 63:
            raise SourceError(f"{what}: the manifest names the blob {layer.digest[:100]!r} of {layer.size} bytes")
    weights = [layer for layer in layers if layer.is_gguf and not layer.is_projector]
    if not weights:
        kinds = ", ".join(sorted({layer.media_type for layer in layers})[:10]) or "nothing"
        raise SourceError(f"{what} holds no GGUF file, only {kinds}")
    if len(weights) > 1:
        names = ", ".join(layer.title or layer.digest for layer in weights[:10])
        raise SourceError(f"{what} holds {len(weights)} GGUF files, and a model has one: {names}")
    projectors = tuple(layer for layer in layers if layer.is_gguf and layer.is_projector)
    licenses = tuple(layer for layer in layers if "license" in layer.media_type.lower() and layer.size <= MAX_LICENSE_BYTES)
    return Files(weights[0], projectors, licenses)


def _decoded(content: bytes) -> _Document:
    try:
        return msgspec.json.decode(content, type=_Document)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SourceError(f"pull model manifest: what came is no manifest: {error}") from error
