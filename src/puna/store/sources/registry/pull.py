"""Pull a model from a registry: the manifest first, then what of its layers is not here, in the manifest's order.

What Ollama's registries hold is stored as it is, byte for byte. What registries of containers hold becomes a model here.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from puna.errors import BadRequest, FileFormatError, NotFound, SourceError, UnsupportedModel
from puna.store.disk import partial, space
from puna.store.disk.blobs import Blobs
from puna.store.disk.claims import Work
from puna.store.disk.config import MAX_CONFIG_BYTES, ModelConfig
from puna.store.disk.manifests import Layer, decode
from puna.store.folder import MAX_TEXT_BYTES, ModelFolder, Permit
from puna.store.models.details import read_details
from puna.store.models.model import StoredModel
from puna.store.names import Name
from puna.store.progress import Progress, Report
from puna.store.recipe import Recipe
from puna.store.sources.elsewhere import Elsewhere
from puna.store.sources.registry import oci
from puna.store.sources.registry.client import Missing, Registry
from puna.store.sources.registry.identity import Identity
from puna.store.sources.registry.place import place_of
from puna.store.sources.source import Fetched, Finished, Ingredients
from puna.store.sources.web.download import TICK_S, Remote, fetch
from puna.store.sources.web.http import Answer, Http

MAX_LAYERS = 1024
_LARGE = frozenset(("model", "projector", "adapter", "draft"))  # layers that are not read into memory


@dataclass(frozen=True)
class RegistrySource:
    """A model of a registry, by its name."""

    name: Name
    elsewhere: Elsewhere
    insecure: bool = False

    @property
    def key(self) -> str:
        return "/".join(self.name.key) + (" insecure" if self.insecure else "")

    def is_source_of(self, config: ModelConfig) -> bool:
        return (config.source or {}).get("type") == "oci" and (config.source or {}).get("name") == self.name.full

    def permit(self, name: Name) -> Permit:
        def permit(config: ModelConfig) -> None:
            if not name.is_same(self.name) and not self.is_source_of(config):
                raise BadRequest(
                    f"there is a model {name.display} already, and it did not come from {self.name.display}: it stays as it is. "
                    f'Choose another name for the new one, or remove the old one: "puna rm {name.display}"'
                )

        return permit

    def known(self, folder: ModelFolder, wanted: Name | None) -> StoredModel | None:
        """Nothing: what a registry has under a name may change at any time."""
        place_of(self.name, self.elsewhere, insecure=self.insecure)
        if wanted is not None and not wanted.is_same(self.name):
            folder.check_replaceable(wanted, self.permit(wanted))
        return None

    def fetch(self, folder: ModelFolder, work: Work, report: Report, wanted: Name | None) -> Fetched:
        place = place_of(self.name, self.elsewhere, insecure=self.insecure)
        with Http(place.host, self.elsewhere.n_streams) as http:
            registry = Registry(http, place, Identity(self.elsewhere.key_path))
            content = self._manifest(registry, report)
            known = self._here(folder, content)
            if known is not None:
                return known
            transfer = _Transfer(folder, work, registry, report, self.elsewhere.n_streams)
            if oci.is_foreign(content):
                return self._foreign(transfer, content, wanted or self.name)
            layers = _checked(content, self.name)
            transfer.bring(layers)
        report(Progress("verifying sha256 digest"))  # which was done on the way
        if parts := [layer for layer in layers if layer.kind == "model" and _is_part(folder.blobs.path(layer.digest))]:
            return self._in_parts(folder, content, parts, wanted or self.name)
        return Finished(wanted or self.name, content, self.permit(wanted or self.name))

    def _manifest(self, registry: Registry, report: Report) -> bytes:
        def sleep(seconds: float) -> None:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                report(Progress("pulling manifest"))
                time.sleep(TICK_S)

        try:
            content = registry.manifest(self.name.tag, sleep)
            for _ in range(2):  # an index of indexes is nobody's
                if digest := oci.chosen(content):
                    content = registry.manifest(digest, sleep)
                    found = f"sha256:{hashlib.sha256(content).hexdigest()}"
                    if found != digest:
                        raise SourceError(f"digest mismatch of a manifest: want {digest}, got {found}")
        except Missing as error:
            raise Missing(f"pull model manifest: {error}") from error
        except SourceError as error:
            raise type(error)(f"pull model manifest: {error}") from error
        return content

    def _here(self, folder: ModelFolder, content: bytes) -> StoredModel | None:
        """The model of that very manifest, if it is here whole."""
        digest = hashlib.sha256(content).hexdigest()
        try:
            name = folder.manifests.find(self.name)
            model = folder.opened(folder.manifests.read(name))
        except (NotFound, FileFormatError):
            return None
        is_same = digest in (model.digest, (model.config.source or {}).get("manifest", ""))
        is_whole = all(folder.blobs.has(layer.digest) for layer in (model.manifest.blobs if model.manifest else ()))
        return model if is_same and is_whole else None

    def _in_parts(self, folder: ModelFolder, content: bytes, parts: list[Layer], name: Name) -> Ingredients:
        """A model whose weights are cut into several files is made anew here, of one."""
        model = folder.described(decode(content), self.name)
        files = {f"part-{number}.gguf": layer.digest for number, layer in enumerate(parts)}
        projectors = [layer for layer in decode(content).layers if layer.kind == "projector"]
        files |= {f"projector-{number}.gguf": layer.digest for number, layer in enumerate(projectors)}
        recipe = Recipe(
            files=files,
            template=model.template,
            system=model.system,
            licenses=model.licenses,
            parameters=model.parameters,
            messages=model.messages,
            renderer=model.config.renderer,
            parser=model.config.parser,
            requires=model.config.requires,
            source=self._source(content),
        )
        return Ingredients(name, recipe, self.permit(name))

    def _source(self, content: bytes) -> dict[str, str]:
        return {"type": "oci", "name": self.name.full, "manifest": hashlib.sha256(content).hexdigest()}

    def _foreign(self, transfer: _Transfer, content: bytes, name: Name) -> Ingredients:
        files = oci.files_of(content, self.name.display)
        transfer.bring([Layer(item.media_type, item.digest, item.size) for item in files.all])
        transfer.report(Progress("verifying sha256 digest"))
        named = {item.title or f"{role}.gguf": item.digest for role, item in _roles(files)}
        texts = tuple(transfer.blobs.read(item.digest, oci.MAX_LICENSE_BYTES).decode(errors="replace") for item in files.licenses)
        return Ingredients(name, Recipe(files=named, licenses=texts, source=self._source(content)), self.permit(name))


def _is_part(path: Path) -> bool:
    """Whether a file is one of several that a model was cut into; one that makes no sense is found out later."""
    try:
        return read_details(path).n_splits > 1
    except FileFormatError:
        return False


def _roles(files: oci.Files) -> Iterable[tuple[str, oci.Descriptor]]:
    yield "model", files.weights
    for index, item in enumerate(files.projectors):
        yield f"projector-{index}", item


def _checked(content: bytes, name: Name) -> list[Layer]:
    """The blobs of a model's manifest, if it may be one that runs here.

    Errors: SourceError; UnsupportedModel.
    """
    try:
        manifest = decode(content)
    except FileFormatError as error:
        raise SourceError(f"pull model manifest: {error}") from error
    if any(layer.kind == "tensor" for layer in manifest.layers):
        raise UnsupportedModel(f"{name.display} consists of single tensors, which no engine here runs; there may be a GGUF of it")
    if len(manifest.layers) > MAX_LAYERS:
        raise SourceError(f"pull model manifest: {len(manifest.layers)} layers are more than any model has")
    for layer in manifest.blobs:
        limit = MAX_CONFIG_BYTES if layer is manifest.config else MAX_TEXT_BYTES
        if layer.kind not in _LARGE and layer.size > limit:
            raise SourceError(f"pull model manifest: the layer {layer.kind} has {layer.size} bytes, more than {limit}")
    return [*manifest.layers, manifest.config]


class _Transfer:
    """Blobs of one registry on their way into the folder."""

    def __init__(self, folder: ModelFolder, work: Work, registry: Registry, report: Report, n_streams: int) -> None:
        self.blobs = folder.blobs_kept_by(work)
        self.report = report
        self._folder = folder
        self._work = work
        self._registry = registry
        self._n_streams = n_streams

    def bring(self, layers: Iterable[Layer]) -> None:
        """Fetch what is not here, one blob after the other.

        Errors: DiskFull before anything is fetched, saying how much is missing; as download.fetch.
        """
        wanted = {layer.digest: layer for layer in layers}
        self._work.claim(wanted)
        missing = [layer for layer in wanted.values() if not self.blobs.has(layer.digest)]
        space.require(self._folder.root, sum(_still_to_come(self.blobs, layer) for layer in missing))
        for layer in wanted.values():
            fetch(self.blobs, Remote(layer.digest, layer.size, self._opener(layer.digest)), self.report, self._n_streams)

    def _opener(self, digest: str) -> Callable[[int, int], AbstractContextManager[Answer]]:
        return lambda begin, end: self._registry.blob(digest, begin, end)


def _still_to_come(blobs: Blobs, layer: Layer) -> int:
    return max(0, layer.size - partial.n_allocated(blobs, layer.digest))
