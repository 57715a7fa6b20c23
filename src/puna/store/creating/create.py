"""Make a model from another one, or from files whose blobs are already in the store: GGUF files, or a checkpoint's.

Changed layers are written anew, all others are shared with the base model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from puna.errors import BadRequest, FileFormatError, NotFound
from puna.gguf.quantise import kind_named
from puna.store.creating.weights import check_adapter, convert_adapter, convert_checkpoint, join_parts, quantise_blob
from puna.store.disk import config as configs
from puna.store.disk.blobs import Blob, parse_digest
from puna.store.disk.claims import Work
from puna.store.disk.config import ModelConfig
from puna.store.disk.manifests import CONFIG_TYPE, LAYER_PREFIX, MANIFEST_TYPE, Layer, Manifest
from puna.store.folder import ModelFolder, Permit
from puna.store.models import parameters
from puna.store.models.details import FileDetails, read_details
from puna.store.models.model import StoredModel
from puna.store.names import Name
from puna.store.progress import Progress, Report
from puna.store.recipe import Recipe, info_fields

GGUF_MAGIC = b"GGUF"
_MAX_LOOKS = 16

Fetch = Callable[[str], StoredModel]
"""Brings a model that is not there, by its name."""


def create(
    folder: ModelFolder,
    work: Work,
    name: Name,
    recipe: Recipe,
    report: Report,
    permit: Permit | None = None,
    *,
    fetch: Fetch | None = None,
) -> StoredModel:
    """Write the layers and the manifest of a new model, or of a new version of one if *permit* does not object.

    A base that is not there is left to *fetch* to bring. Errors: as Recipe.check; NotFound for a base that nobody brings;
    FileFormatError for a damaged file; UnsupportedModel for what cannot be converted; PunaError for a model that cannot be
    quantised.
    """
    recipe.check()
    making = _Making(folder, work, report)
    if recipe.base:
        making.take_over(_base(folder, work, recipe.base, fetch), recipe)
    else:
        making.add_files(_canonical(recipe.files or {}), recipe.quantize)
    if recipe.quantize:
        making.quantise(kind_named(recipe.quantize))
    making.add_adapters(_canonical(recipe.adapters))
    making.add_draft(_canonical(recipe.drafts), kind_named(recipe.draft_quantize) if recipe.draft_quantize else "")
    making.add_texts(recipe)
    return making.write(name, recipe, permit)


def _canonical(files: Mapping[str, str]) -> dict[str, str]:
    return {path: parse_digest(digest) for path, digest in files.items()}


class _Making:
    """The layers and the configuration of a model in the making."""

    def __init__(self, folder: ModelFolder, work: Work, report: Report) -> None:
        self.folder = folder
        self.work = work
        self.blobs = folder.blobs_of(work)
        self.report = report
        self.layers: list[tuple[Layer, bool]] = []  # with whether the blob is new
        self.config = ModelConfig(model_format="gguf")
        self.extra: dict[str, Any] = {}
        self.parameters: dict[str, Any] = {}

    def take_over(self, base: StoredModel, recipe: Recipe) -> None:
        replaced = {
            kind
            for kind, is_given in (
                ("template", recipe.template),
                ("prompt", recipe.template),
                ("system", recipe.system),
                ("messages", recipe.messages),
                ("adapter", recipe.adapters),
                ("draft", recipe.drafts),
                ("params", True),
            )
            if is_given
        }
        for layer in base.manifest.layers if base.manifest else ():
            if layer.kind in replaced:
                continue
            origin = base.name if layer.kind == "model" else layer.origin
            self.layers.append((msgspec.structs.replace(layer, origin=origin), False))
        self.config = msgspec.structs.replace(base.config, source=None)
        self.extra = base.config_extra
        self.parameters = dict(base.parameters)

    def add_files(self, digests: Mapping[str, str], quantize: str) -> None:
        """The model's files by name: GGUF files, or those of a checkpoint; *quantize* is what becomes of them later."""
        if any(path.lower().endswith(".safetensors") for path in digests):
            files = {path: self._uploaded(digest) for path, digest in digests.items()}
            blob, eyes, kind = convert_checkpoint(self.blobs, self.work, files, self.report)
            self._append("model", blob)
            self._describe(blob.digest)
            if eyes is not None:
                self._append("projector", eyes)
            if kind and not quantize:
                self.quantise(kind)
            return
        found = {path: self._details(path, digest) for path, digest in digests.items()}
        parts = {path: digests[path] for path, details in found.items() if details.n_splits > 1}
        if parts:
            blob = self._join(parts)
            self._append("model", blob)
            self._describe(blob.digest)
        for path, details in found.items():
            if path not in parts:
                self._add_model_file(details, digests[path])
        self.add_adapters({path: digests[path] for path, details in found.items() if details.kind == "adapter"})

    def _join(self, parts: Mapping[str, str]) -> Blob:
        """One file of those that a model was cut into."""
        return join_parts(self.blobs, self.work, {path: self._uploaded(digest) for path, digest in parts.items()}, self.report)

    def quantise(self, kind: str) -> None:
        """Have the weights in another kind.

        Errors: PunaError when they are quantised already, or cannot be.
        """
        for i, (layer, is_new) in enumerate(self.layers):
            if layer.kind != "model":
                continue
            blob = quantise_blob(self.blobs, self.work, layer.digest, kind, self.report)
            if blob is not None:
                kind = read_details(self.blobs.path(blob.digest)).file_type
                self.config = msgspec.structs.replace(self.config, file_type=kind)
                new = msgspec.structs.replace(layer, digest=blob.digest, size=blob.n_bytes)
                self.layers[i] = (new, blob.is_new)
                if is_new:  # it was only a step on the way
                    self.folder.remove_unused([layer.digest], self.work)

    def _add_model_file(self, details: FileDetails, digest: str) -> None:
        """An adapter is not added."""
        if details.kind != "adapter":
            self._add_blob(details.kind, digest)
        if details.kind == "model":
            self._describe(digest)
        elif details.kind == "projector":
            families = dict.fromkeys([*(self.config.model_families or ()), details.architecture])
            self.config = msgspec.structs.replace(self.config, model_families=list(families))

    def add_adapters(self, digests: Mapping[str, str]) -> None:
        """The adapters' files by name: GGUF files, or safetensors with what lies in the same folder."""
        model = next((self.blobs.path(layer.digest) for layer, _ in self.layers if layer.kind == "model"), None)
        if model is None:
            return  # whether there is a model is checked in the end
        folders = {PurePosixPath(path).parent for path in digests if path.lower().endswith(".safetensors")}
        for folder in dict.fromkeys(PurePosixPath(path).parent for path in digests):
            inside = {PurePosixPath(path).name: digests[path] for path in digests if PurePosixPath(path).parent == folder}
            if folder in folders:
                files = {name: self._uploaded(digest) for name, digest in inside.items()}
                self._append("adapter", convert_adapter(self.blobs, self.work, files, model, self.report))
                continue
            for name, digest in inside.items():
                self._add_adapter(name, digest, model)

    def _add_adapter(self, name: str, digest: str, model: Path) -> None:
        if self._details(name, digest).kind != "adapter":
            raise BadRequest(f"{name} is a GGUF file, but not of an adapter")
        check_adapter(name, self.blobs.path(digest), model)
        self._add_blob("adapter", digest)

    def add_draft(self, digests: Mapping[str, str], kind: str) -> None:
        """Another model that may guess for this one, in another *kind* of weights if one is named."""
        if not digests:
            return
        blob = self._draft(digests)
        if any(layer.kind == "model" and layer.digest == blob.digest for layer, _ in self.layers):
            raise BadRequest("DRAFT must be another model than FROM")
        quantised = quantise_blob(self.blobs, self.work, blob.digest, kind, self.report) if kind else None
        self._append("draft", quantised or blob)
        if quantised is not None and blob.is_new:  # it was only a step on the way
            self.folder.remove_unused([blob.digest], self.work)

    def _draft(self, digests: Mapping[str, str]) -> Blob:
        if any(path.lower().endswith(".safetensors") for path in digests):
            files = {path: self._uploaded(digest) for path, digest in digests.items()}
            return convert_checkpoint(self.blobs, self.work, files, self.report)[0]
        found = {path: self._details(path, digest) for path, digest in digests.items()}
        if all(details.n_splits > 1 for details in found.values()):
            return self._join(digests)
        for path, details in found.items():
            if details.kind != "model" or len(digests) > 1:
                raise BadRequest(f"{path} is no DRAFT: one language model is wanted, as a GGUF file or a folder of safetensors")
        digest = next(iter(digests.values()))
        return Blob(digest, self.blobs.n_bytes(digest), is_new=False)

    def add_texts(self, recipe: Recipe) -> None:
        if recipe.template:
            self._add("template", recipe.template.encode())
        if recipe.system:
            self._add("system", recipe.system.encode())
        for text in recipe.licenses:
            self._add("license", text.encode())
        options = {**self.parameters, **parameters.check(recipe.parameters)}
        if options:
            self._add("params", msgspec.json.encode(options) + b"\n")
        if recipe.messages:
            self._add("messages", msgspec.json.encode([dict(message) for message in recipe.messages]) + b"\n")

    def write(self, name: Name, recipe: Recipe, permit: Permit | None) -> StoredModel:
        if not any(layer.kind == "model" for layer, _ in self.layers):
            raise BadRequest("the files hold no model, only adapters or projectors")
        changes: dict[str, Any] = {key: value for key in ("renderer", "parser") if (value := getattr(recipe, key))}
        if recipe.requires:
            changes["requires"] = recipe.requires.removeprefix("v")
        changes |= info_fields(recipe.info)
        changes["source"] = recipe.source
        digests = [layer.digest for layer, _ in self.layers]
        content = configs.encode(msgspec.structs.replace(self.config, **changes), self.extra, digests)
        blob = self.blobs.add(content)
        config = Layer(CONFIG_TYPE, blob.digest, blob.n_bytes)
        for layer, is_new in (*self.layers, (config, blob.is_new)):
            self.report(Progress(f"{'creating new' if is_new else 'using existing'} layer {layer.digest}"))
        self.report(Progress("writing manifest"))
        manifest = Manifest(2, MANIFEST_TYPE, config, [layer for layer, _ in self.layers])
        created = self.folder.opened(self.folder.write_manifest(name, manifest, self.work, permit))
        self.report(Progress("success"))
        return created

    def _details(self, path: str, digest: str) -> FileDetails:
        blob = self._uploaded(digest)
        if _begins(blob) != GGUF_MAGIC:
            raise BadRequest("supplied file was not in GGUF format" if path.lower().endswith(".gguf") else "unknown type")
        self.report(Progress("parsing GGUF"))
        return read_details(blob)

    def _uploaded(self, digest: str) -> Path:
        self.work.claim([digest])
        if not self.blobs.has(digest):
            raise BadRequest(f'blob "{digest}" not found, upload it first')
        return self.blobs.path(digest)

    def _describe(self, digest: str) -> None:
        """Write the facts of a model's file into the configuration."""
        details = read_details(self.blobs.path(digest))
        self.config = msgspec.structs.replace(
            self.config,
            model_family=details.architecture,
            model_families=list(dict.fromkeys([details.architecture, *(self.config.model_families or ())])),
            model_type=details.parameter_size,
            file_type=details.file_type,
        )

    def _add(self, kind: str, content: bytes) -> None:
        self._append(kind, self.blobs.add(content))

    def _add_blob(self, kind: str, digest: str) -> None:
        self._append(kind, Blob(digest, self.blobs.n_bytes(digest), is_new=False))

    def _append(self, kind: str, blob: Blob) -> None:
        layer = Layer(LAYER_PREFIX + kind, blob.digest, blob.n_bytes)
        if all(layer != known for known, _ in self.layers):
            self.layers.append((layer, blob.is_new))


def _base(folder: ModelFolder, work: Work, text: str, fetch: Fetch | None) -> StoredModel:
    """The model to start from, all of it claimed."""
    for _ in range(_MAX_LOOKS):
        try:
            base = folder.get(text)
        except NotFound:
            if fetch is None:
                raise
            base = fetch(text)
        digests = [layer.digest for layer in base.manifest.blobs] if base.manifest else []
        work.claim(digests)
        if all(folder.blobs.has(digest) for digest in digests):
            return base
        work.drop(digests)  # it was deleted or replaced a moment ago
    raise FileFormatError(f"{base.name} is damaged: some of its blobs are missing, pull or create it again")


def _begins(path: Any) -> bytes:
    with path.open("rb") as file:
        return bytes(file.read(4))
