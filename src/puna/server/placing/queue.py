"""Requests that wait for a model, in the order in which they came."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from puna.errors import PunaError
from puna.llm.load import LoadRequirements
from puna.server.placing.loaded import Loadable, Loaded


@dataclass(eq=False)
class Waiter:
    model: Loadable
    requirements: LoadRequirements
    keep_alive: float | None
    placed: asyncio.Future[Loaded]

    @property
    def must_wait(self) -> bool:
        """Also who was given a model waits while that serves others."""
        return not self.placed.done() or self.placed.result().n_waiting > 0


class Queue:
    def __init__(self) -> None:
        self._waiters: list[Waiter] = []

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[Waiter]:
        """Over those that wait now, whatever becomes of them meanwhile."""
        return iter(list(self._waiters))

    def join(self, model: Loadable, requirements: LoadRequirements, keep_alive: float | None) -> Waiter:
        waiter = Waiter(model, requirements, keep_alive, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        return waiter

    def withdraw(self, waiter: Waiter) -> bool:
        """Whether it was still waiting."""
        if waiter not in self._waiters:
            return False
        self._waiters.remove(waiter)
        return True

    def drop_cancelled(self) -> None:
        self._waiters = [waiter for waiter in self._waiters if not waiter.placed.done()]

    def serve(self, waiter: Waiter, loaded: Loaded) -> None:
        self._waiters.remove(waiter)
        waiter.placed.set_result(loaded)

    def refuse(self, waiter: Waiter, error: PunaError) -> None:
        self._waiters.remove(waiter)
        if not waiter.placed.done():
            waiter.placed.set_exception(error)
