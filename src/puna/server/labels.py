"""Which labels models and machines have in numbers that are shown: names, up to a number of them.

Files have one label for all, since whoever reads numbers need not learn where they lie.
"""

from __future__ import annotations

from puna.store.models.model import StoredModel

FILE_LABEL = "(file)"
OTHER_LABEL = "(other)"
MAX_LABELS = 100  # names that were ever asked for; every one is remembered, and sent at every look


class Labels:
    def __init__(self) -> None:
        self._known: set[str] = set()

    def of(self, model: object) -> str:
        if not isinstance(model, StoredModel) or not model.digest:  # no manifest
            return FILE_LABEL
        return self.named(model.name)

    def named(self, name: str) -> str:
        if name not in self._known and len(self._known) >= MAX_LABELS:
            return OTHER_LABEL
        self._known.add(name)
        return name
