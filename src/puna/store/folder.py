"""The folder of models: manifests and blobs, and what can be done with the models in it.

Every method may be called from any thread, and several processes may work on one folder. Who reads takes no lock: files are
replaced whole, an open file stays whole when its name goes, and who finds a blob gone looks at the manifest again. Who changes
manifests or removes blobs holds the store's lock for that moment; what long work relies on meanwhile, it claims
(puna.store.disk.claims). Nothing is removed where it cannot be told what is used.
Knows nothing of HTTP, nor how models are made and where they come from.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from puna.errors import BadRequest, FileFormatError, InvalidName, NotFound, StoreError
from puna.store.disk import config as configs
from puna.store.disk import prune
from puna.store.disk.blobs import Blobs, BlobWriter, parse_digest
from puna.store.disk.claims import Claims, Keeper, Lender, Work
from puna.store.disk.files import is_file
from puna.store.disk.locks import LocksMissing, StoreLock
from puna.store.disk.manifests import Manifest, Manifests, StoredManifest
from puna.store.disk.space import storing
from puna.store.models.model import StoredModel
from puna.store.names import Name

log = logging.getLogger(__name__)

MAX_TEXT_BYTES = 16 << 20
UPLOAD_S = 24 * 3600.0  # how long an uploaded blob waits for the model that it is for
ASKED_S = 3600.0  # and how long one that was asked for, since who asks is about to make a model of it
PRUNE_PATIENCE_S = 2.0  # at a start; whoever holds the lock, or the next start, tidies up as well
_MAX_OPENED = 1024
_MAX_LOOKS = 16

Permit = Callable[[configs.ModelConfig], None]
"""Raises if a model with this configuration may not be replaced."""


class ModelFolder:
    """Models below one folder, usually ``~/.ollama/models``; the folder appears when something is written."""

    def __init__(self, root: Path, *, keep_unused: bool = False) -> None:
        self.root = Path(root)
        self.blobs = Blobs(self.root / "blobs")
        self.manifests = Manifests(self.root / "manifests")
        self.keep_unused = keep_unused  # OLLAMA_NOPRUNE: no blob is ever removed
        self._lock = StoreLock(self.root)  # manifests and the blobs they name change together
        self._claims = Claims(self.root, self._lock)
        self._uploads: Work | None = None  # of clients, until they say what for
        self._opened: dict[tuple[str, str, float], StoredModel] = {}

    def get(self, text: str) -> StoredModel:
        """The model of this name.

        Errors: NotFound with the name as typed; InvalidName; StoreError when it cannot be read; FileFormatError when the
        manifest or a layer is damaged.
        """
        stored = self._read(text, f"model '{text}' not found")
        for _ in range(_MAX_LOOKS):
            try:
                return self._whole(text, stored)
            except (NotFound, FileFormatError):
                if not self._has_changed(stored):
                    raise
                stored = self._read(text, f"model '{text}' not found")
        return self._whole(text, stored)

    def find(self, text: str) -> Name | None:
        """The stored name that *text* stands for, case aside, or None.

        Errors: InvalidName; StoreError when it cannot be told.
        """
        name = self.manifests.find(Name.parse(text))
        return name if self.manifests.has(name) else None

    def list(self) -> list[StoredModel]:
        """All models that can be opened, the newest first; others are named in the log."""
        models = []
        for stored in self.manifests.all()[0]:
            try:
                models.append(self.opened(stored))
            except (FileFormatError, NotFound, StoreError) as error:
                log.warning("skipping %s: %s", stored.name.display, error)
        return sorted(models, key=lambda model: (-model.modified_at, model.name))

    def delete(self, text: str) -> None:
        """Remove a model, and the blobs that no other model uses.

        Errors: NotFound with the name as typed; InvalidName; StoreError when nothing may be removed, or it cannot be.
        """
        missing = f"model '{text}' not found"
        if self.find(text) is None:
            raise NotFound(missing)
        with self._lock.held(), storing(self.root):
            name = self.find(text)
            if name is None:
                raise NotFound(missing)
            digests = self.digests_of(name)
            self.manifests.remove(name)
            self.remove_unused(digests)

    def copy(self, source: str, destination: str, permit: Permit | None = None) -> None:
        """Give a model a second name; the blobs are shared.

        Errors: NotFound; BadRequest saying which of the names is invalid; what *permit* raises; DiskFull; StoreError.
        """
        names = []
        for role, text in (("source", source), ("destination", destination)):
            try:
                names.append(self.manifests.find(Name.parse(text)))
            except InvalidName as error:
                raise BadRequest(f'{role} "{text}" is invalid') from error
        found, wanted = names
        missing = f'model "{source}" not found'
        if not self.manifests.has(found):
            raise NotFound(missing)
        if found.is_same(wanted):
            return
        with self._changing():
            try:
                manifest = self.manifests.read(found).manifest
            except NotFound as error:
                raise NotFound(missing) from error
            self._write(wanted, manifest, None, permit)

    def check_replaceable(self, name: Name, permit: Permit) -> None:
        """Raise what *permit* has against writing a model of this name, as things are now.

        Errors: what *permit* raises; StoreError.
        """
        stored = self.manifests.find(name)
        if self.manifests.has(stored):
            permit(self._config_named(stored))

    @contextmanager
    def work(self) -> Iterator[Work]:
        """A piece of work that brings blobs or relies on some; those it brought and no manifest names go at its end.

        Errors: DiskFull; StoreError.
        """
        work = self._claims.begin()
        try:
            yield work
        finally:
            try:
                self.remove_unused(work.brought, work)
            finally:
                work.end()

    def blobs_of(self, work: Work) -> Blobs:
        """The blobs, for a piece of work that brings some."""
        return Blobs(self.blobs.folder, work)

    def blobs_kept_by(self, work: Work) -> Blobs:
        """The blobs, for a piece of work that brings some which the next try shall find if this one fails."""
        return Blobs(self.blobs.folder, Keeper(work))

    def upload(self, n_expected: int = 0) -> BlobWriter:
        """For the bytes of a blob that a client is about to make a model of, within a day.

        Errors: DiskFull; StoreError.
        """
        return self.uploads.writer(n_expected)

    @property
    def uploads(self) -> Blobs:
        """The blobs, for what a client is about to make a model of, within a day."""
        return Blobs(self.blobs.folder, Lender(self._lending(), UPLOAD_S))

    def expects(self, digest: str) -> bool:
        """Whether a blob is there; if so it stays for a while, since who asks is about to make a model of it.

        Errors: BadRequest for a malformed digest; StoreError.
        """
        if not self.blobs.has(digest):
            return False
        try:
            self._lending().lend(digest, time.time() + ASKED_S)
        except StoreError as error:
            log.info("%s is not kept for who asks for it: %s", digest, error)  # a store that can only be read
        return self.blobs.has(digest)

    def write_manifest(
        self, name: Name, manifest: Manifest, work: Work, permit: Permit | None = None, *, content: bytes = b""
    ) -> StoredManifest:
        """Make the model exist, under the name in the case it is stored with, and remove what it no longer uses.

        *content* are the manifest's exact bytes, where others wrote it.
        Errors: NotFound when a blob has vanished since it was stored; what *permit* raises; DiskFull; StoreError.
        """
        with self._changing():
            for layer in manifest.blobs:
                if not self.blobs.has(layer.digest):
                    raise NotFound(f'blob "{layer.digest}" not found: it was removed in the meantime, try again')
            return self._write(self.manifests.find(name), manifest, work, permit, content)

    def remove_unused(self, digests: Iterable[str], work: Work | None = None) -> tuple[str, ...]:
        """Remove those of the blobs that no model needs and no work but *work* relies on; returns them.

        Nothing is removed, and the log says why, when that cannot be told.
        """
        wanted = dict.fromkeys(digests)
        if self.keep_unused or not wanted:
            return ()
        try:
            with self._lock.held():
                needed = self.manifests.used() | self._claims.look().claimed(but_for=work.id if work else "")
                return tuple(digest for digest in wanted if digest not in needed and self._remove(digest))
        except StoreError as error:
            log.warning("blobs that may be unused stay: %s", error)
            return ()

    def prune(self) -> None:
        """Tidy up at the start of the server: old forms of names, unused blobs, unfinished files."""
        if not self.root.is_dir():
            return
        try:
            with self._lock.held(PRUNE_PATIENCE_S), storing(self.root):
                self._prune()
        except StoreError as error:
            log.warning("nothing is tidied up: %s", error)

    def close(self) -> None:
        """Keep uploads no longer than others do."""
        with self._lock.threads:
            if self._uploads is not None:
                self._uploads.end()
                self._uploads = None

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Write manifests: alone, or where there are no locks with what has always been done, and without removing."""
        with ExitStack() as stack:
            try:
                stack.enter_context(self._lock.held())
            except LocksMissing as error:
                log.warning("%s; other processes may change models at the same time", error)
                stack.enter_context(self._lock.threads)
            yield

    def _write(
        self, name: Name, manifest: Manifest, work: Work | None, permit: Permit | None, content: bytes = b""
    ) -> StoredManifest:
        if permit is not None:
            self.check_replaceable(name, permit)
        old = self.digests_of(name)
        content = content or manifest.encoded()
        with storing(self.root, len(content)):
            self.manifests.write_bytes(name, content)
        if work is not None:
            work.settle(layer.digest for layer in manifest.blobs)
        self.remove_unused(old, work)
        return self.manifests.read(name)

    def _prune(self) -> None:
        prune.rename_legacy_blobs(self.blobs.folder)
        if self.keep_unused:
            return
        used, standing = self.manifests.used(), self._claims.look()
        for path in self.manifests.unfinished():
            path.unlink(missing_ok=True)
        needs = prune.Needs(used | standing.claimed(), standing.abandoned, standing.live.keys())
        prune.remove_stale(self.root, needs)
        self._claims.forget(standing.dead)

    def _remove(self, digest: str) -> bool:
        try:
            self.blobs.remove(digest)
        except OSError as error:  # Windows: the runner still has it open; the next start removes it
            log.warning("%s stays for now: %s", digest, error.strerror)
            return False
        return True

    def _lending(self) -> Work:
        with self._lock.threads:
            if self._uploads is None:
                self._uploads = self._claims.begin()
            return self._uploads

    def take_back(self, digests: Iterable[str]) -> None:
        """Keep uploads no longer for the model that they were meant for: it is there now."""
        if self._uploads is not None:
            try:
                self._uploads.drop(parse_digest(digest) for digest in digests)
            except StoreError as error:
                log.info("uploads are kept longer than needed: %s", error)

    def _read(self, text: str, missing: str) -> StoredManifest:
        name = self.find(text)
        if name is None:
            raise NotFound(missing)
        try:
            return self.manifests.read(name)
        except NotFound as error:
            raise NotFound(missing) from error

    def _whole(self, text: str, stored: StoredManifest) -> StoredModel:
        model = self.opened(stored)
        for what, paths in (("weights", [model.weights_path]), ("adapters", model.adapter_paths)):
            if any(path is not None and not is_file(path) for path in paths):
                raise NotFound(f"model '{text}' not found: its {what} are missing from the store, pull it again")
        return model

    def _has_changed(self, stored: StoredManifest) -> bool:
        """Whether the model was replaced or deleted since; its blobs may have gone with it."""
        try:
            now = self.manifests.read(stored.name)
        except NotFound:
            return True
        return (now.digest, now.modified_at) != (stored.digest, stored.modified_at)

    def _config_named(self, name: Name) -> configs.ModelConfig:
        try:
            return self.config_of(self.manifests.read(name).manifest)
        except (NotFound, FileFormatError):
            return configs.ModelConfig()

    def config_of(self, manifest: Manifest) -> configs.ModelConfig:
        try:
            return configs.decode(self.blobs.read(manifest.config.digest, configs.MAX_CONFIG_BYTES))[0]
        except (NotFound, FileFormatError):
            return configs.ModelConfig()

    def digests_of(self, name: Name) -> tuple[str, ...]:
        """What the model of exactly this name consists of; nothing where there is none, or its manifest is damaged."""
        try:
            return tuple(layer.digest for layer in self.manifests.read(name).manifest.blobs)
        except (NotFound, FileFormatError):
            return ()

    def opened(self, stored: StoredManifest) -> StoredModel:
        """The model of a manifest that was read a moment ago.

        Errors: FileFormatError; StoreError.
        """
        key = (stored.name.full, stored.digest, stored.modified_at)
        known = self._opened.get(key)
        if known is None:
            known = self._assemble(stored)
            if known.weights_path is None or is_file(known.weights_path):
                if len(self._opened) >= _MAX_OPENED:
                    self._opened.clear()
                self._opened[key] = known
        return known

    def described(self, manifest: Manifest, name: Name) -> StoredModel:
        """What a manifest says that is not stored, though its blobs are.

        Errors: FileFormatError; StoreError.
        """
        return self._assemble(StoredManifest(name, manifest, "", 0.0))

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
            case "draft":
                fields = {"draft_path": path}
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
