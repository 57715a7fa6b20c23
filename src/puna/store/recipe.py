"""What a model is to be made of, as clients and sources say it; checked as far as that goes before any file is touched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from puna.errors import BadRequest
from puna.gguf.quantise import kind_named
from puna.prompt.families.registry import FAMILIES
from puna.prompt.parsers import PARSERS
from puna.store.disk.blobs import parse_digest
from puna.store.models import parameters
from puna.store.models.modelfile import ROLES, SEMVER

_INFO_TYPES: dict[str, tuple[str, str]] = {  # field of a request's info: field of the configuration, type
    "model_family": ("model_family", "string"),
    "base_name": ("base_name", "string"),
    "quantization_level": ("file_type", "string"),
    "parameter_size": ("model_type", "string"),
    "context_length": ("context_length", "number"),
    "embedding_length": ("embedding_length", "number"),
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a model is made of. Exactly one of *base* and *files* gives the weights."""

    base: str = ""  # name of a model; pulled when it is not there
    files: Mapping[str, str] | None = None  # relative path: digest
    adapters: Mapping[str, str] = field(default_factory=dict)
    drafts: Mapping[str, str] = field(default_factory=dict)  # of another model, which is kept beside this one
    template: str = ""
    system: str = ""
    licenses: tuple[str, ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()
    renderer: str = ""
    parser: str = ""
    requires: str = ""
    quantize: str = ""
    draft_quantize: str = ""
    info: Mapping[str, Any] = field(default_factory=dict)
    source: dict[str, str] | None = None  # kept in the configuration: where the weights came from

    def check(self) -> None:
        """Everything that can be said before any file is touched.

        Errors: BadRequest; PunaError for a quantisation that does not exist; OptionTypeError.
        """
        if not self.base and self.files is None:
            raise BadRequest("neither 'from' or 'files' was specified")
        self._check_files()
        for message in self.messages:
            if message.get("role") not in (*ROLES, "tool"):
                raise BadRequest('message role must be one of "system", "user", or "assistant"')
        if self.requires and not SEMVER.fullmatch(self.requires):
            raise BadRequest("requires must be a valid semver (e.g. 0.14.0)")
        for kind, name, known in (("renderer", self.renderer, FAMILIES), ("parser", self.parser, PARSERS)):
            if name and name not in known:
                raise BadRequest(f'unknown {kind} "{name}"; there are {", ".join(known)}')
        for kind in filter(None, (self.quantize, self.draft_quantize)):
            kind_named(kind)
        parameters.check(self.parameters)
        info_fields(self.info)

    def _check_files(self) -> None:
        for path, digest in [*(self.files or {}).items(), *self.adapters.items(), *self.drafts.items()]:
            _check_path(path)
            parse_digest(digest)
        if not self.base and not self.files:
            raise BadRequest("unknown type")
        if self.draft_quantize and not self.drafts:
            raise BadRequest("--draft-quantize requires a DRAFT model")


def _check_path(path: str) -> None:
    pure = PurePosixPath(path)
    is_clean = bool(path) and str(pure) == path and not pure.is_absolute() and ".." not in pure.parts and path != "."
    if not is_clean or "\0" in path or "\\" in path or PureWindowsPath(path).drive:
        raise BadRequest("file path must be relative")


def info_fields(info: Mapping[str, Any]) -> dict[str, Any]:
    """Changes to the configuration.

    Errors: BadRequest naming the field of the wrong type.
    """
    changes: dict[str, Any] = {}
    for key, (target, kind) in _INFO_TYPES.items():
        value = info.get(key)
        if value is None:
            continue
        if kind == "string" and not isinstance(value, str):
            raise BadRequest(f'info field "{key}" must be a string')
        if kind == "number":
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise BadRequest(f'info field "{key}" must be a number')
            if value < 0 or value != int(value):
                raise BadRequest(f'info field "{key}" must be a non-negative integer')
            value = int(value)
        changes[target] = value
    names = info.get("capabilities")
    if names is not None:
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise BadRequest('info field "capabilities" must be a list of strings')
        changes["capabilities"] = names
    return changes
