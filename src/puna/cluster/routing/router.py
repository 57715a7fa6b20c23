"""Which replica of a model answers a request: the one that holds most of its beginning, unless that one is overloaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """A replica that could answer."""

    node: str
    n_held: int  # of the prompt's keys, from the first without a gap
    n_running: int  # requests that it has, those that wait for a place among them
    n_parallel: int  # requests that it computes at once
    n_sent: int = 0  # requests that it was ever given, which decides between equals


def is_overloaded(candidate: Candidate, least: int) -> bool:
    """Whether a request would wait there for about as long as one takes, while *least* are on another replica."""
    has_place = candidate.n_running < candidate.n_parallel
    return not has_place and candidate.n_running - least >= candidate.n_parallel


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """Errors: ValueError without candidates."""
    if not candidates:
        raise ValueError("there is nothing to choose from")
    least = min(candidate.n_running for candidate in candidates)
    usable = [candidate for candidate in candidates if not is_overloaded(candidate, least)]
    return min(usable, key=lambda c: (-c.n_held, c.n_running / c.n_parallel, c.n_sent, c.node))


def in_turn(candidates: Sequence[Candidate]) -> Candidate:
    """Whoever was given fewest: what is held and who is busy does not matter. What `choose` is measured against."""
    if not candidates:
        raise ValueError("there is nothing to choose from")
    return min(candidates, key=lambda c: (c.n_sent, c.node))


ROUTES: dict[str, Callable[[Sequence[Candidate]], Candidate]] = {"prefix": choose, "turns": in_turn}
