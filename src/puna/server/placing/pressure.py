"""A load that lacks memory, and the models that make room for it: one after the other, until it fits or none may leave.

Which model leaves is the scheduler's decision.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from puna.server.placing.admission import Others
from puna.server.placing.loaded import Loaded, State
from puna.server.placing.table import LoadedModels


class MemoryPressure:
    """*place* is called when a model shall leave, and when it no longer needs to."""

    def __init__(self, models: LoadedModels, place: Callable[[], None]) -> None:
        self._models = models
        self._place = place
        self._n_gone = 0
        self._changed = asyncio.Event()
        self.lacks_gpus: bool | None = None  # whether a load lacks memory of GPUs, or of the host; None: none lacks any

    def others(self, starved: Loaded) -> Others:
        """What one load sees of the other models."""
        return Others(
            self._models.held,
            lambda on_gpus: self._may_go(starved, on_gpus=on_gpus),
            lambda on_gpus: self._make_room(starved, on_gpus=on_gpus),
        )

    def changed(self) -> None:
        self._changed.set()

    def eased(self) -> None:
        """A model has gone, and what it leaves may be enough."""
        self._n_gone += 1
        self.lacks_gpus = None
        self._changed.set()

    def _may_go(self, starved: Loaded, *, on_gpus: bool) -> bool:
        """Whether another model's memory may become free; one that waits for memory itself has none to give."""
        return any(
            loaded.state is State.CLOSING or (loaded.reply is not None and not loaded.is_pinned)
            for loaded in self._models.values()
            if loaded is not starved and (loaded.is_on_gpus or not on_gpus)
        )

    async def _make_room(self, starved: Loaded, *, on_gpus: bool) -> None:
        n_gone = self._n_gone
        self.lacks_gpus = on_gpus
        try:
            self._place()
            while self._n_gone == n_gone and self._may_go(starved, on_gpus=on_gpus):
                self._changed.clear()
                await self._changed.wait()
        finally:
            self.lacks_gpus = None
            self._place()  # who was to leave and has not may stay
