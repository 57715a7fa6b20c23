"""One loaded model as the scheduler, requests and /api/ps see it."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from puna import wire
from puna.llm.load import LoadRequirements
from puna.llm.model_runner import ModelRunner
from puna.llm.runner import Runner
from puna.settings import FOREVER


class Loadable(Protocol):
    """What the scheduler must know of a model."""

    @property
    def model_path(self) -> Path: ...


class State(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    CLOSING = "closing"


@dataclass(eq=False)
class Loaded:
    """One model and its runner. The scheduler owns the state; requests read ``runner`` and ``n_ctx``."""

    model: Loadable
    requirements: LoadRequirements
    keep_alive: float
    state: State = State.LOADING
    n_users: int = 0
    is_pinned: bool = False  # a request asked that it stays; that it is the server's default does not count
    must_unload: bool = False  # somebody asked for it; unlike other reasons to drain, this one stays
    process: Runner | None = None
    reply: wire.LoadReply | None = None  # once it has its memory
    idle_until: float = FOREVER  # in the loop's clock, while idle
    task: asyncio.Task[Runner] | None = None
    node: str = ""  # of a cluster
    timer: asyncio.TimerHandle | None = None

    def start_idling(self, expire: Callable[[Loaded], None]) -> None:
        """*expire* is called when its time is over, unless somebody uses it before."""
        loop = asyncio.get_running_loop()
        self.stop_timer()
        self.idle_until = loop.time() + self.keep_alive
        if self.keep_alive < FOREVER:
            self.timer = loop.call_later(self.keep_alive, expire, self)

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def running(self, now: float) -> Running:
        """*now*: in the loop's clock."""
        is_busy = self.n_users > 0 or self.state is State.LOADING
        left = self.keep_alive if is_busy else max(0.0, self.idle_until - now)
        is_closing = self.state in (State.DRAINING, State.CLOSING)
        memory = self.reply.memory if self.reply else None
        return Running(self.model, memory, self.n_ctx, 0.0 if is_closing else left, is_closing)

    @property
    def n_parallel(self) -> int:
        """Requests that are computed at once."""
        return self.options.n_parallel

    @property
    def is_on_gpus(self) -> bool:
        """Whether its end would free memory of GPUs, as far as is known."""
        memory = self.reply and self.reply.memory
        return not memory or memory.on_gpus > 0

    @property
    def options(self) -> wire.LoadOptions:
        """What it is, or is being, loaded with: the context may have become larger than what was requirements at least."""
        requirements = self.requirements.options
        n_ctx = self.reply.n_ctx if self.reply is not None else 0
        return msgspec.structs.replace(requirements, n_ctx=n_ctx) if n_ctx > requirements.n_ctx else requirements

    @property
    def runner(self) -> Runner:
        assert self.task is not None
        return self.task.result()

    @property
    def n_ctx(self) -> int:
        """Tokens that one request's prompt and answer may have."""
        return (self.reply and self.reply.n_ctx) or self.options.n_ctx

    @property
    def n_waiting(self) -> int:
        """Users that are not being served yet, besides the one whose load is under way."""
        return max(0, self.n_users - (1 if self.state is State.LOADING else self.options.n_parallel))


@dataclass(frozen=True)
class Place:
    """What a request is served by: a runner, and how many tokens its prompt and answer may have there."""

    runner: ModelRunner
    n_ctx: int
    load_ns: int  # from the request's arrival until it had its place


@dataclass(frozen=True)
class Running:
    """A loaded model as /api/ps shows it."""

    model: Loadable
    memory: wire.MemoryReport | None
    n_ctx: int
    seconds_left: float
    is_closing: bool
    node: str = ""  # of a cluster
