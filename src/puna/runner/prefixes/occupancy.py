"""What sequences hold, told in numbers to whoever looks on: how much, for whom, and what they share; never what stands there.

Takes nothing from the engine's thread, which works on meanwhile: the numbers may be of several moments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from puna.runner.prefixes.host_cache import HostCache
from puna.runner.prefixes.slots import Slots
from puna.wire import MAX_TOLD, HeldSequence, Occupancy, SavedPrefix, SharedPrefix


class Occupant(Protocol):
    """A request that runs in a sequence."""

    slot: int
    is_paused: bool

    @property
    def n_prompt(self) -> int: ...
    @property
    def n_generated(self) -> int: ...


def look(slots: Slots, running: Sequence[Occupant], n_computed: int = 0) -> Occupancy:
    """*n_computed*: tokens that were computed so far."""
    occupants = {task.slot: task for task in running}
    outline = slots.outline(MAX_TOLD + 1)
    held = sorted((slot for slot in slots.slots if slot.length or slot.sequence in occupants), key=lambda s: -s.last_used)
    sequences = [
        _told(slot.sequence, slot.length, slot.last_used, outline.ends.get(slot.sequence, -1), occupants.get(slot.sequence))
        for slot in held[:MAX_TOLD]
    ]
    prefixes = [SharedPrefix(parent=n.parent, begin=n.begin, end=n.end, sequences=n.n_members) for n in outline.nodes[:MAX_TOLD]]
    saved, n_saved = _saved(slots.host_cache)
    n_left_out = len(held) - len(sequences) + len(outline.nodes) - len(prefixes) + n_saved - len(saved)
    return Occupancy(computed=n_computed, sequences=sequences, prefixes=prefixes, host_cache=saved, n_left_out=n_left_out)


def _told(sequence: int, n_tokens: int, last_used: int, node: int, occupant: Occupant | None) -> HeldSequence:
    node = node if node < MAX_TOLD else -1
    if occupant is None:
        return HeldSequence(sequence=sequence, tokens=n_tokens, last_used=last_used, node=node)
    return HeldSequence(
        sequence=sequence,
        tokens=n_tokens,
        last_used=last_used,
        node=node,
        state="paused" if occupant.is_paused else "running",
        prompt=occupant.n_prompt,
        generated=occupant.n_generated,
    )


def _saved(host_cache: HostCache | None) -> tuple[list[SavedPrefix], int]:
    """Those told, and how many there are."""
    entries = host_cache.entries() if host_cache else []
    return [SavedPrefix(tokens=len(e.tokens), bytes=e.n_bytes) for e in entries[: -MAX_TOLD - 1 : -1]], len(entries)
