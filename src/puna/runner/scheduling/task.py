"""What the engine and its scheduler know of a request: while it waits, while it runs, and in one step.

A request that waits becomes one task or several: a completion is a task itself, a request for vectors lends one text after
another. A task has a sequence of the cache and is computed in steps. Knows no kind of task.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from puna.runner.images.in_sequence import ImageAt
from puna.runner.prefixes.groups import Group
from puna.runner.scheduling.schedule import Progress

Reason = Literal["stop", "length", "cancelled"]


class Removed(NamedTuple):
    """The tokens [begin, end) of a sequence, and so many positions along the axes of M-RoPE."""

    begin: int
    end: int
    n_positions: int


class Waiting(Protocol):
    """A request in the queue. To finish it or let it fail never raises."""

    is_cancelled: bool

    def finish(self, reason: Reason) -> None: ...
    def fail(self, error: BaseException, status: int = 500) -> None: ...


class Task(Protocol):
    """``tokens`` are all that is known of its sequence; the first ``n_computed`` of them are in the cache of ``slot``."""

    tokens: list[int]
    groups: Sequence[Group]
    images: Sequence[ImageAt]
    n_ctx: int  # tokens that it may have at most; it may be one beyond, until the next step
    n_computed: int
    slot: int
    order: int  # of admission
    last_turn: int  # that it had, see puna.runner.scheduling.turns
    is_paused: bool  # gave way to others, until the pool has room

    @property
    def n_prompt(self) -> int:
        """Tokens that it came with."""

    @property
    def n_generated(self) -> int:
        """Tokens that it has added."""

    @property
    def n_to_write(self) -> int:
        """How many more tokens the cache may have to hold, of which none is known yet."""

    @property
    def reuses_prefixes(self) -> bool:
        """Whether it takes over what others have computed, and leaves to others what it computes."""

    @property
    def is_resumable(self) -> bool:
        """Whether it goes on from whatever is left of what it had computed; else it begins again."""

    @property
    def is_cancelled(self) -> bool: ...
    @property
    def is_done(self) -> bool: ...
    @property
    def progress(self) -> Progress: ...
    @property
    def n_looked_at(self) -> int:
        """Where its images are looked at by cross attention, so many of their rows at once; else 0."""

    def n_ready(self, n_computed: int) -> int:
        """How many of its tokens may be computed when so many are: as far as its images are encoded."""

    def place(self, slot: int, n_cached: int) -> None:
        """It starts, in this sequence of the cache, which has the first so many of its tokens."""

    def shift(self) -> Removed:
        """It has more tokens than it may: leave out some that are not the last. Those that went, as they were numbered."""

    def output_rows(self, begin: int, n_tokens: int) -> range:
        """Of a step over so many tokens from *begin* on: the rows whose output it needs, counted from *begin*."""

    def finish(self, reason: Reason) -> None: ...
    def fail(self, error: BaseException, status: int = 500) -> None: ...


W = TypeVar("W", bound=Waiting)
T = TypeVar("T", bound=Task)


class Part(NamedTuple, Generic[T]):
    """Of a step: the tokens [begin, end) of one task."""

    task: T
    begin: int
    n_tokens: int

    @property
    def end(self) -> int:
        return self.begin + self.n_tokens
