"""A stored model, opened: where its files are and what its layers say.

Knows the store's layers and, through FileDetails, the model file's facts; loads and runs nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from puna.errors import FileFormatError, NotFound, StoreError, UnsupportedModel
from puna.store.disk.config import ModelConfig
from puna.store.disk.manifests import Manifest
from puna.store.models.capabilities import capabilities
from puna.store.models.details import FileDetails, read_details


@dataclass(frozen=True)
class StoredModel:
    """One model; made by Store.get, Store.list and Store.from_file. Immutable, so it may be shared between threads."""

    name: str  # shortest display form, or a path for a bare file
    full_name: str  # with host and namespace
    digest: str  # hex, of the manifest's bytes; empty for a bare file
    n_bytes: int
    modified_at: float  # seconds since 1970
    weights_path: Path | None  # None for a stub that stands for a model on another server
    projector_paths: tuple[Path, ...] = ()
    adapter_paths: tuple[Path, ...] = ()
    draft_path: Path | None = None  # a small model that may guess what this one says; kept for engines that let it
    template: str = ""  # Go template of the template layer; empty: the file's own chat template counts
    system: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)  # options of the params layer
    messages: tuple[dict[str, Any], ...] = ()
    licenses: tuple[str, ...] = ()
    config: ModelConfig = field(default_factory=ModelConfig)
    config_extra: dict[str, Any] = field(default_factory=dict)
    parent: str = ""  # the model this one was created from
    manifest: Manifest | None = None

    @property
    def model_path(self) -> Path:
        """The GGUF file with the weights.

        Errors: UnsupportedModel when there is none.
        """
        if self.weights_path is None:
            raise UnsupportedModel(f"{self.name} has no weights here: it stands for a model on another server")
        return self.weights_path

    @property
    def file(self) -> FileDetails | None:
        """Facts from the model file; None when there is none, or when it cannot be read now."""
        return _details(self.weights_path) if self.weights_path is not None else None

    @property
    def chat_template(self) -> str:
        """The Jinja template inside the model file, or nothing."""
        return self.file.chat_template if self.file else ""

    @property
    def has_template(self) -> bool:
        """Without one a model was not made for conversations, or nobody says how: it continues texts."""
        return bool(self.config.renderer or self.template or self.chat_template)

    @property
    def capabilities(self) -> list[str]:
        """What the model can do; found out once, but not while its file cannot be read."""
        return self._capabilities if self.file is not None else self._judged(None)

    @functools.cached_property
    def _capabilities(self) -> list[str]:
        return self._judged(self.file)

    def _judged(self, file: FileDetails | None) -> list[str]:
        has_projector = bool(self.projector_paths)
        projector = _details(self.projector_paths[0]) if has_projector else None
        return capabilities(file, self.template, self.config, has_projector=has_projector, projector=projector)

    @property
    def family(self) -> str:
        return self.config.model_family or (self.file.architecture if self.file else "")

    @property
    def families(self) -> list[str] | None:
        return self.config.model_families or ([self.family] if self.family else None)

    @property
    def parameter_size(self) -> str:
        return self.config.model_type or (self.file.parameter_size if self.file else "")

    @property
    def quantization_level(self) -> str:
        stated = self.config.file_type
        if stated and stated.lower() != "unknown":
            return stated
        return self.file.file_type if self.file else stated

    @property
    def context_length(self) -> int:
        """Tokens the model was trained for; 0 when unknown."""
        return self.config.context_length or (self.file.context_length if self.file else 0)

    @property
    def embedding_length(self) -> int:
        return self.config.embedding_length or (self.file.embedding_length if self.file else 0)

    @property
    def details(self) -> dict[str, Any]:
        """The ``details`` object of the API."""
        return {
            "parent_model": self.parent,
            "format": self.config.model_format or ("gguf" if self.file else ""),
            "family": self.family,
            "families": self.families,
            "parameter_size": self.parameter_size,
            "quantization_level": self.quantization_level,
        }


def _details(path: Path) -> FileDetails | None:
    """None when the file cannot be read now."""
    try:
        return read_details(path)
    except (NotFound, FileFormatError, StoreError):
        return None
