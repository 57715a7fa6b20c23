"""What a server asks of whoever finds a place for its requests: on this machine (scheduler.py), or on several (puna.cluster)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from puna import wire
from puna.llm.discovery import Machine
from puna.llm.load import LoadRequirements
from puna.llm.model_runner import ModelRunner, Watched
from puna.server.labels import Labels
from puna.server.numbers import Totals
from puna.server.placing.loaded import Loadable, Running, State

if TYPE_CHECKING:
    from prometheus_client.registry import Collector


class Acquired(Protocol):
    """A model that a request may use."""

    @property
    def runner(self) -> ModelRunner: ...
    @property
    def n_ctx(self) -> int: ...


class Shown(Protocol):
    """A loaded model for whoever looks on."""

    @property
    def model(self) -> Loadable: ...
    @property
    def node(self) -> str: ...
    @property
    def state(self) -> State: ...
    @property
    def reply(self) -> wire.LoadReply | None: ...
    @property
    def n_ctx(self) -> int: ...
    @property
    def n_parallel(self) -> int: ...
    @property
    def process(self) -> Watched | None: ...
    def running(self, now: float) -> Running: ...


class Table(Protocol):
    """All models that take memory or are about to, and what their runners have counted, those that have ended included."""

    @property
    def labels(self) -> Labels: ...
    @property
    def totals(self) -> Totals: ...
    def is_pinned(self, model_path: Path) -> bool: ...
    def reply_of(self, model_path: Path) -> wire.LoadReply | None: ...
    def running(self) -> list[Running]: ...
    def runners(self) -> Sequence[tuple[Loadable, Watched]]: ...
    def shown(self) -> Iterable[Shown]: ...
    @property
    def n_waiting(self) -> int: ...


class Placement(Protocol):
    @property
    def machine(self) -> Machine: ...
    @property
    def models(self) -> Table: ...
    @property
    def queue(self) -> Sized: ...
    @property
    def collectors(self) -> Sequence[Collector]:
        """Numbers of its own, beside those of its models."""
        ...

    def open(self) -> None:
        """Called once, in the event loop that it serves."""

    def acquire(
        self, model: Loadable, requirements: LoadRequirements, keep_alive: float | None = None, *, leaves_pinned: bool = False
    ) -> AbstractAsyncContextManager[Acquired]: ...
    def unload(self, model_path: Path) -> None: ...
    async def close(self) -> None: ...
