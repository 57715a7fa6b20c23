"""All models that take memory or are about to, by their files: what is said of them together."""

from __future__ import annotations

import asyncio
from pathlib import Path

from puna import wire
from puna.host import private_bytes
from puna.llm.budget import Held
from puna.llm.runner import Runner
from puna.server.labels import Labels
from puna.server.numbers import Totals
from puna.server.placing.loaded import Loadable, Loaded, Running, State


class LoadedModels(dict[Path, Loaded]):
    def __init__(self) -> None:
        super().__init__()
        self.labels, self.totals = Labels(), Totals()

    def is_pinned(self, model_path: Path) -> bool:
        """Whether a request has asked that the model stays."""
        loaded = self.get(model_path)
        return loaded is not None and loaded.is_pinned

    def reply_of(self, model_path: Path) -> wire.LoadReply | None:
        """What the model's runner said to its load; None while it is not loaded."""
        loaded = self.get(model_path)
        return loaded.reply if loaded is not None else None

    def running(self) -> list[Running]:
        """As /api/ps shows them, the one that stays longest first."""
        now = asyncio.get_running_loop().time()
        return sorted((loaded.running(now) for loaded in self.values()), key=lambda item: item.seconds_left, reverse=True)

    def runners(self) -> list[tuple[Loadable, Runner]]:
        """Those that are ready, with their models."""
        ready = (State.READY, State.DRAINING)
        return [(loaded.model, loaded.runner) for loaded in self.values() if loaded.state in ready]

    def shown(self) -> list[Loaded]:
        """All of them, in no order."""
        return list(self.values())

    def held(self) -> list[Held]:
        """The memory of those that have been given theirs."""
        return [
            Held(loaded.reply.memory, private_bytes(loaded.process.pid))
            for loaded in self.values()
            if loaded.process is not None and loaded.reply is not None and loaded.reply.memory is not None
        ]

    @property
    def n_waiting(self) -> int:
        """Requests that have a model but are not being served yet."""
        return sum(loaded.n_waiting for loaded in self.values())

    @property
    def n_closing(self) -> int:
        return sum(loaded.state is State.CLOSING for loaded in self.values())

    def evictable(self, *, on_gpus: bool = False) -> list[Loaded]:
        """Those that may ever leave for another; with *on_gpus* those whose end would free memory of GPUs."""
        return [loaded for loaded in self.values() if not loaded.is_pinned and (loaded.is_on_gpus or not on_gpus)]


def first_to_leave(models: list[Loaded]) -> Loaded | None:
    """Of the idle models the one that expires first, else the busy one kept shortest."""
    ready = [loaded for loaded in models if loaded.state is State.READY]
    idle = [loaded for loaded in ready if loaded.n_users == 0]
    if idle:
        return min(idle, key=lambda loaded: (loaded.idle_until, str(loaded.model.model_path)))
    return min(ready, key=lambda loaded: (loaded.keep_alive, str(loaded.model.model_path)), default=None)
