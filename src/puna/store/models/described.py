"""What the head of a model file says, as show tells it; remembered as long as the file stays what it is.

Reads no weights. How much is remembered is bounded by the tensors and keys in it, not by the number of files.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from puna.api.models import TensorDescription
from puna.errors import FileFormatError, NotFound
from puna.gguf.metadata import LazyArray
from puna.gguf.reader import GGUFFile

HIDDEN_KEYS = frozenset({"general.name", "tokenizer.chat_template"})
MAX_REMEMBERED = 250_000  # tensors and keys; each takes some hundred bytes

_Key = tuple[str | int, ...]


@dataclass(frozen=True)
class Description:
    """Metadata by key, with null for arrays unless they were asked for, and the tensors; both shared, so not to be changed."""

    info: dict[str, Any] = field(default_factory=dict)
    tensors: list[TensorDescription] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.info) + len(self.tensors)


class _Memory:
    """Descriptions of files, the one that was asked for longest ago first to go."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[_Key, Description] = OrderedDict()
        self._size = 0

    def get(self, key: _Key) -> Description | None:
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)

    def put(self, key: _Key, description: Description) -> None:
        if description.size > MAX_REMEMBERED:
            return
        with self._lock:
            self._forget(key)
            self._known[key] = description
            self._size += description.size
            while self._size > MAX_REMEMBERED:
                self._forget(next(iter(self._known)))

    def _forget(self, key: _Key) -> None:
        before = self._known.pop(key, None)
        self._size -= before.size if before else 0


_memory = _Memory()


def describe(path: Path | None, *, verbose: bool) -> Description:
    """Metadata and tensors of one file; nothing when there is none or it cannot be read. Arrays only when *verbose*."""
    if path is None:
        return Description()
    try:
        if verbose:  # a vocabulary is large, and seldom asked for
            return _read(path, verbose=True)
        found = path.stat()
        key = (str(path), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        description = _memory.get(key)
        if description is None:
            description = _read(path, verbose=False)
            _memory.put(key, description)
    except (NotFound, FileFormatError, OSError):
        return Description()
    return description


def _read(path: Path, *, verbose: bool) -> Description:
    with GGUFFile.open(path) as file:
        info = {key: _plain(value, verbose) for key, value in file.metadata.items() if key not in HIDDEN_KEYS}
        info["general.parameter_count"] = sum(tensor.n_elements for tensor in file.tensors.values())
        tensors = [
            TensorDescription(name=tensor.name, type=tensor.type.name, shape=list(tensor.shape))
            for tensor in file.tensors.values()
        ]
    return Description(dict(sorted(info.items())), tensors)


def _plain(value: Any, verbose: bool) -> Any:
    if isinstance(value, LazyArray):
        return [_plain(item, verbose) for item in value] if verbose else None
    if isinstance(value, float):
        return _shortest(value) if math.isfinite(value) else None  # JSON has no infinity
    return value


def _shortest(value: float) -> float:
    """A number that was stored with 32 bits, with the digits that 32 bits hold: 1e-05, not 9.999999747378752e-06."""
    single = np.float32(value) if abs(value) < 3e38 else None
    return float(str(single)) if single is not None and float(single) == value else value
