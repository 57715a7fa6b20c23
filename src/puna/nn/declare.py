"""Weights declared as dataclass fields, and bound to a file's tensors by name.

A field states its name in the file, an alternative, what its axes are, what the weight is used for and whether it may be
missing: ``output: Linear = gguf("output", alt="token_embd", dims="embd vocab")``. Binding walks the declarations once,
reports every missing name together, and refuses a tensor of another shape: that would end the process in the library.

Axes are named, the contiguous one first. A name that the model's options know has their length; any other gets its
length from the first tensor that has it, and all others of the layer must agree (``ff``). ``3*embd`` is a multiple.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import field, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from puna.errors import FileFormatError, MissingTensors
from puna.gguf.reader import GGUFFile
from puna.gguf.types import TensorType
from puna.ml.backend import Backend, Use
from puna.nn.adapter import Adapters

M = TypeVar("M")

_MATRICES = (Use.MATRIX, Use.EXPERTS, Use.ROWS)


def gguf(name: str, *, alt: str = "", dims: str = "", use: Use | None = None, optional: bool = False, skip: int = 0) -> Any:
    """A field stored in the file under the prefix *name*, or where there is no such tensor the first there is of *alt*, which
    are names with spaces between.

    A field with *use* is a tensor; without it a group of tensors, or a list of groups numbered from 0. A tensor in a
    group has the group's axes but the first *skip*. A field that is not declared with this function is a group under
    the same prefix; where its type is a union, the file decides: ``mlp: SwiGLU | Experts``, ``mlp: SwiGLU | None``.
    """
    meta = {"gguf": name, "alt": alt.split(), "dims": dims.split(), "use": use, "optional": optional, "skip": skip}
    return field(metadata=meta)


def encoding(name: str) -> Any:
    """A field for how the file encodes the tensor *name* of the same group."""
    return field(default=TensorType.F32, metadata={"encodes": name})


def bind(
    cls: type[M],
    backend: Backend,
    file: GGUFFile,
    counts: Mapping[str, int],
    dims: Mapping[str, int] | None = None,
    layer_dims: Callable[[int], Mapping[str, int]] = lambda _layer: {},
) -> M:
    """Build *cls* from the tensors of a file.

    *counts* are the lengths of the list fields, *dims* those of the axes, *layer_dims* those that differ by layer.
    Errors: MissingTensors with every name that is neither there nor optional; FileFormatError naming a tensor whose shape
    does not fit.
    """
    binder = _Binder(backend, file, counts, layer_dims)
    found: M = binder.group(cls, "", [], dict(dims or {}))
    if binder.missing:
        raise MissingTensors(binder.missing)
    return found


def axes(cls: type[Any], file: GGUFFile, counts: Mapping[str, int]) -> dict[str, list[str]]:
    """What *cls* calls the axes of each tensor that it would take from the file; tensors without names are left out."""
    binder = _Binder(_NoWeights(), file, counts, lambda _layer: {})
    binder.group(cls, "", [], {})
    return binder.axes


class _NoWeights:
    """In a backend's place, for binding that only looks."""

    def tensor(self, name: str, use: Use) -> None:
        return None

    def joined(self, names: list[str]) -> None:
        return None

    def low_rank(self, name: str, use: Use) -> tuple[()]:
        return ()


class _Binder:
    def __init__(
        self,
        backend: Backend | _NoWeights,
        file: GGUFFile,
        counts: Mapping[str, int],
        layer_dims: Callable[[int], Mapping[str, int]],
    ) -> None:
        self.backend = backend
        self.file = file
        self.groups = {name[: i + 1] for name in file.tensors for i, c in enumerate(name) if c == "."}
        self.counts = counts
        self.layer_dims = layer_dims
        self.joined: dict[str, Any] = {}  # parts of joined matrices, by the names of the tensors
        self.missing: list[str] = []
        self.axes: dict[str, list[str]] = {}  # by tensor

    def group(self, cls: type[Any], prefix: str, axes: list[str], lengths: dict[str, int]) -> Any:
        hints = _hints(cls)  # type: ignore[arg-type]  # classes are hashable
        values: dict[str, Any] = {}
        self._join(cls, prefix)
        for item in fields(cls):
            if "adapts" in item.metadata:
                changes = self.backend.low_rank(prefix + item.metadata["adapts"], item.metadata["use"])
                values[item.name] = Adapters(changes)
                continue
            if "encodes" in item.metadata:
                info = self.file.tensors.get(prefix + item.metadata["encodes"])
                values[item.name] = info.type if info else TensorType.F32  # that it is missing is found elsewhere
                continue
            values[item.name] = self._field(hints[item.name], item.name, item.metadata, prefix, axes, lengths)
        return cls(**values)

    def _field(self, hint: Any, name: str, meta: Mapping[str, Any], prefix: str, axes: list[str], lengths: dict[str, int]) -> Any:
        if meta.get("use"):
            return self._tensor(meta, prefix, axes, lengths)
        kinds: list[Any] = [k for k in (hint, *get_args(hint)) if is_dataclass(k)]
        kind = kinds[0]
        if get_origin(hint) is list:
            return [
                self.group(kind, f"{prefix}{meta['gguf']}.{i}.", [], {**lengths, **self.layer_dims(i)})
                for i in range(self.counts[name])
            ]
        if not meta:
            # Several kinds, or one or none: the first that the file has a part of.
            there = next((k for k in kinds if self._has_any(k, prefix)), None)
            if there is None and type(None) in get_args(hint):
                return None
            return self.group(there or kind, prefix, [], lengths)
        candidates = [f"{prefix}{n}." for n in (meta["gguf"], *meta["alt"])]
        chosen = next((c for c in candidates if c in self.groups), None)
        if chosen is None and meta["optional"]:
            return None
        return self.group(kind, chosen or candidates[0], meta["dims"], lengths)

    def _join(self, cls: type[Any], prefix: str) -> None:
        """A class names in ``joins`` the fields whose matrices multiply the same input."""
        wanted = getattr(cls, "joins", ())
        names = [f"{prefix}{item.metadata['gguf']}.weight" for item in fields(cls) if item.name in wanted]
        if names and all(name in self.file.tensors for name in names):
            self.joined |= zip(names, self.backend.joined(names) or (), strict=False)

    def _has_any(self, cls: type[Any], prefix: str) -> bool:
        """Whether the file has one of the tensors that such a group needs."""
        needed = [item.metadata for item in fields(cls) if "gguf" in item.metadata and not item.metadata["optional"]]
        names = [prefix + n for meta in needed for n in (meta["gguf"], *meta["alt"])]
        return any(n in self.file.tensors or n + "." in self.groups for n in names)

    def _tensor(self, meta: Mapping[str, Any], prefix: str, axes: list[str], lengths: dict[str, int]) -> Any:
        candidates = [prefix + n for n in (meta["gguf"], *meta["alt"])]
        chosen = next((c for c in candidates if c in self.file.tensors), None)
        if chosen is not None:
            own = meta["dims"] or axes[meta["skip"] :]
            if own:
                self.axes[chosen] = own
                self._check(chosen, own, lengths)
            if meta["use"] in (Use.OPERAND, Use.VECTOR) and self.file.tensors[chosen].type is not TensorType.F32:
                raise FileFormatError(f"{self.file.path}: tensor {chosen} is {self.file.tensors[chosen].type.name}, not F32")
            if meta["use"] in _MATRICES and not self.file.tensors[chosen].type.is_multiplied:
                kind = self.file.tensors[chosen].type.name
                raise FileFormatError(f"{self.file.path}: tensor {chosen} is a matrix in {kind}, in which nothing is multiplied")
            return self.joined.pop(chosen, None) or self.backend.tensor(chosen, meta["use"])
        if not meta["optional"]:
            self.missing.append(candidates[0])
        return None

    def _check(self, name: str, axes: list[str], lengths: dict[str, int]) -> None:
        found = self.file.tensors[name].shape
        wanted = []
        for axis, length in zip(axes, (*found, *[1] * len(axes)), strict=False):
            factor, base = _multiple(axis)
            if not base:
                wanted.append(factor)
                continue
            if base not in lengths and length % factor == 0:
                lengths[base] = length // factor
            wanted.append(factor * lengths.get(base, 0))
        while len(wanted) > len(found) and wanted[-1] == 1:
            wanted.pop()
        if tuple(wanted) != found:
            calls_for = f"the metadata calls for {wanted} ({', '.join(axes)})"
            raise FileFormatError(f"{self.file.path}: tensor {name} has the shape {list(found)}, {calls_for}")


@cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    """Evaluating annotations takes longer than all else, and a model has a group of the same class in each layer."""
    return get_type_hints(cls)


def _multiple(axis: str) -> tuple[int, str]:
    """``embd`` is (1, embd), ``3*embd`` (3, embd), ``4`` (4, '')."""
    match = re.fullmatch(r"(?:(\d+)\*?)?([a-z_]\w*)?", axis)
    assert match, axis
    return int(match[1] or 1), match[2] or ""
