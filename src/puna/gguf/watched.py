"""A file that remembers which of its keys were asked for: whoever reads the rest can be told what nobody looked at."""

from __future__ import annotations

import copy
from typing import Any

from puna.gguf.metadata import Metadata
from puna.gguf.reader import GGUFFile


class WatchedMetadata(Metadata):
    """The same values. A key counts as read when its value was asked for, or whether it is there."""

    def __init__(self, metadata: Metadata) -> None:
        super().__init__(metadata.path, metadata.values_by_key)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def has(self, key: str) -> bool:
        self.read.add(self.full_key(key))
        return super().has(key)

    def _find(self, key: str, default: object) -> tuple[str, Any]:
        self.read.add(self.full_key(key))
        return super()._find(key, default)


class WatchedFile(GGUFFile):
    """A view of an open file, which stays the owner of what is mapped."""

    metadata: WatchedMetadata

    def __init__(self, file: GGUFFile) -> None:
        vars(self).update(vars(copy.copy(file)))
        self.metadata = WatchedMetadata(file.metadata)

    def close(self) -> None:
        return
