"""Weights declared as dataclass fields, and bound to a file's tensors by name.

A field states its name in the file, an alternative, what the weight is used for and whether it may be missing:
``output: Linear = gguf("output", alt="token_embd")``. Binding walks the declarations once and reports every missing
name together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields, is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from puna.errors import MissingTensors
from puna.ml.backend import Backend, Use

M = TypeVar("M")


def gguf(name: str, *, alt: str = "", use: Use | None = None, optional: bool = False) -> Any:
    """A field stored in the file under the prefix *name*, or *alt* when there is no such tensor.

    A field with *use* is a tensor; without it a group of tensors, or a list of groups numbered from 0.
    """
    return field(metadata={"gguf": name, "alt": alt, "use": use, "optional": optional})


def bind(cls: type[M], backend: Backend, names: frozenset[str] | set[str], counts: Mapping[str, int]) -> M:
    """Build *cls* from the tensors of a file.

    *names* are all tensors of the file, *counts* the length of each list field.
    Errors: MissingTensors with every name that is neither there nor optional.
    """
    binder = _Binder(backend, names, counts)
    found: M = binder.group(cls, "")
    if binder.missing:
        raise MissingTensors(binder.missing)
    return found


class _Binder:
    def __init__(self, backend: Backend, names: frozenset[str] | set[str], counts: Mapping[str, int]) -> None:
        self.backend = backend
        self.names = names
        self.groups = {name[: i + 1] for name in names for i, c in enumerate(name) if c == "."}
        self.counts = counts
        self.missing: list[str] = []

    def group(self, cls: type[Any], prefix: str) -> Any:
        hints = get_type_hints(cls)
        values: dict[str, Any] = {}
        for item in fields(cls):
            values[item.name] = self._field(hints[item.name], item.name, item.metadata, prefix)
        return cls(**values)

    def _field(self, hint: Any, name: str, meta: Mapping[str, Any], prefix: str) -> Any:
        if meta.get("use"):
            return self._tensor(meta, prefix)
        kind = next((k for k in (hint, *get_args(hint)) if is_dataclass(k)), None)
        if get_origin(hint) is list:
            return [self.group(kind, f"{prefix}{meta['gguf']}.{i}.") for i in range(self.counts[name])]  # type: ignore[arg-type]
        if not meta:
            return self.group(kind, prefix)  # type: ignore[arg-type]
        candidates = [f"{prefix}{n}." for n in (meta["gguf"], meta["alt"]) if n]
        chosen = next((c for c in candidates if c in self.groups), None)
        if chosen is None and meta["optional"]:
            return None
        return self.group(kind, chosen or candidates[0])  # type: ignore[arg-type]

    def _tensor(self, meta: Mapping[str, Any], prefix: str) -> Any:
        candidates = [prefix + n for n in (meta["gguf"], meta["alt"]) if n]
        chosen = next((c for c in candidates if c in self.names), None)
        if chosen is not None:
            return self.backend.tensor(chosen, meta["use"])
        if not meta["optional"]:
            self.missing.append(candidates[0])
        return None
