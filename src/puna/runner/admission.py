"""Who of those who wait may start, and who gives way when the pool of cells is short: decisions, no computing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from puna.kvcache.cache import Sequences
from puna.runner.request import Request
from puna.runner.slots import Slots


class Pausable(Protocol):
    """Of a task that runs: what deciding who gives way needs."""

    order: int  # of admission
    slot: int
    n_computed: int
    is_paused: bool


T = TypeVar("T", bound=Pausable)

# A request waits for another that computes the beginning of its prompt if that spares it this many tokens.
MIN_SHARED = 8

# Of a long queue only the first so many are looked at in one step.
LOOKAHEAD = 64


def next_to_start(waiting: Iterable[Request], running: Sequence[Request], slots: Slots) -> Request | None:
    """The first in the queue that gains nothing by waiting.

    A request whose prompt begins like one that is being computed right now waits until that is done, and then copies
    it: requests that arrive together with a common prefix compute it once. Those behind it in the queue may pass.
    """
    computing = {r.slot: r for r in running if r.n_computed < r.n_prompt and not r.is_done and not r.is_paused}
    for _, request in zip(range(LOOKAHEAD), waiting, strict=False):
        soon = _soon_shared(request, computing, slots) if computing else 0
        if soon < MIN_SHARED or soon < slots.cached(request.tokens) + MIN_SHARED:
            return request
    return None


def _soon_shared(request: Request, computing: Mapping[int, Request], slots: Slots) -> int:
    """Leading tokens that one of those, by slot, has in common and has still to compute a part of, if they are not few."""
    soon = 0
    for sequence, shared in slots.promised(request.tokens, MIN_SHARED):
        other = computing.get(sequence)
        if other is not None and other.n_computed < (n := min(shared, other.n_prompt)):
            soon = max(soon, n)
    return soon


def make_room(chosen: list[tuple[T, int]], cache: Sequences, slots: Slots) -> list[tuple[T, int]]:
    """What of a step fits the pool: prefixes of ended requests go first, then the newest request gives way.

    It keeps its place and its text; what it had computed is computed again when there is room.
    """
    chosen = list(chosen)
    while chosen and cache.n_free < sum(count for _, count in chosen):
        if slots.evict():
            continue
        newest = max(chosen, key=lambda pair: pair[0].order)
        if len(chosen) == 1:
            newest[0].is_paused = True
            return []
        pause(newest[0], slots)
        chosen.remove(newest)
    return chosen


def pause(request: Pausable, slots: Slots) -> None:
    slots.empty(request.slot)
    request.n_computed = 0
    request.is_paused = True


def resume_paused(running: Sequence[Request], cache: Sequences, slots: Slots) -> None:
    """Let paused requests go on, oldest first, once all they hold fits again."""
    active = [r for r in running if not r.is_paused]
    for request in sorted((r for r in running if r.is_paused), key=lambda r: r.order):
        n_wanted = len(request.tokens) - request.n_computed + len(active)
        while cache.n_free < n_wanted and slots.evict():
            pass
        if cache.n_free < n_wanted and active:
            return
        if cache.n_free < n_wanted:
            # Nothing else runs, so nothing else will make room: the other paused ones still hold cells.
            for other in running:
                if other is not request and other.n_computed:
                    pause(other, slots)
        request.is_paused = False
        active.append(request)
