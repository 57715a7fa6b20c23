"""Which slot holds which state of which sequence: bookkeeping of recurrent states, no tensors.

A slot is written once, by the step that made its state, and then only read, so keeping a checkpoint costs no copy: its
slot is just not given back. Sequences share slots. Slot 0 holds the state before the first token, zeros, for good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

START = 0  # the slot of the state before any token

# States of fewer tokens than this, or than this after the last checkpoint, are not worth a slot.
MIN_TOKENS = 16

# A step should end so many tokens before the end of a prompt. The next turn of a conversation often departs just there:
# what begins the answer in the prompt, thinking for example, is not repeated in later prompts. So does the same prompt
# once more, of which at least one token is computed again.
PROMPT_TAIL = 8


@dataclass(frozen=True)
class State:
    """After *length* tokens; made by a step that computed n_rows of them."""

    length: int
    slot: int
    n_rows: int
    is_checkpoint: bool = False


class Checkpoints:
    """Of each sequence the newest state, the one before it, and up to n_kept older ones.

    The one before makes the newest step undone: it may have been aborted. An older state is kept where it is *interval*
    tokens after the last that was kept, near what seems the end of a prompt, and where another sequence took it. There is
    room for all newest and previous states, and for n_shared more; where that is too little, a sequence that holds much
    gives up its oldest.
    """

    def __init__(self, max_sequences: int, n_kept: int, interval: int, n_shared: int | None = None) -> None:
        most = n_kept * max_sequences
        self.n_slots = 1 + 2 * max_sequences + (most if n_shared is None else min(n_shared, most))
        self.states: list[list[State]] = [[] for _ in range(max_sequences)]
        self._step = 0
        self._advanced = [0] * max_sequences  # the last step that each took part in
        self._n_kept = n_kept
        self._interval = interval
        self._n_users = np.zeros(self.n_slots, np.int32)
        self._n_users[START] = 1
        self._free = list(range(self.n_slots - 1, 0, -1))

    def length(self, sequence: int) -> int:
        return self.states[sequence][-1].length if self.states[sequence] else 0

    def start_step(self) -> None:
        """What earlier steps wrote is valid now, except where it was cut."""
        self._step += 1

    def advance(self, sequence: int, n_rows: int) -> tuple[int, int]:
        """The slots to read the state from and to write the state after n_rows more tokens to."""
        states = self.states[sequence]
        if len(states) >= 2:
            self._settle(sequence)
        read = states[-1].slot if states else START
        while not self._free:
            self._give_up_one()
        self._advanced[sequence] = self._step
        write = self._free.pop()
        self._n_users[write] = 1
        states.append(State(self.length(sequence) + n_rows, write, n_rows))
        return read, write

    def _settle(self, sequence: int) -> None:
        """The state before the newest becomes a checkpoint, or goes."""
        states = self.states[sequence]
        if not self._is_worth_keeping(states):
            self._release(states.pop(-2))
            return
        states[-2] = replace(states[-2], is_checkpoint=True)
        if len(states) > self._n_kept + 1:
            self._release(states.pop(0))

    def _is_worth_keeping(self, states: Sequence[State]) -> bool:
        """Whether the one before the newest is."""
        candidate, newest = states[-2:]
        distance = candidate.length - (states[-3].length if len(states) > 2 else 0)
        ends_prompt = newest.n_rows <= PROMPT_TAIL and candidate.n_rows > newest.n_rows
        is_worth_it = distance >= MIN_TOKENS and (distance >= self._interval or ends_prompt)
        return bool(self._n_kept and (candidate.is_checkpoint or is_worth_it))

    def _give_up_one(self) -> None:
        """Release a state that only makes some prompt shorter: of who holds most of them, and unused for longest."""
        spare = [len(states) - self._n_needed(s) for s, states in enumerate(self.states)]
        loser = max(range(len(spare)), key=lambda s: (spare[s], -self._advanced[s]))
        assert spare[loser] > 0, "two slots of each sequence suffice for a step"
        self._release(self.states[loser].pop(0))

    def _n_needed(self, sequence: int) -> int:
        """The newest state, and in the step that made it the one before."""
        return 2 if self._advanced[sequence] == self._step else 1

    def restore_point(self, sequence: int, length: int) -> int:
        """The most tokens, up to length, after which the state is held; 0 always is."""
        return max((s.length for s in self.states[sequence] if s.length <= length), default=0)

    def cut(self, sequence: int, length: int) -> None:
        """Forget the states after more tokens."""
        states = self.states[sequence]
        while states and states[-1].length > length:
            self._release(states.pop())

    def share(self, source: int, target: int, length: int) -> None:
        """The target, which must be empty, gets the source's states after up to *length* tokens."""
        assert not self.states[target]
        held = self.states[source]
        shared = sum(s.length <= length for s in held)
        if shared and held[shared - 1].length >= MIN_TOKENS:
            held[shared - 1] = replace(held[shared - 1], is_checkpoint=True)
        self.states[target] = held[:shared]
        for state in self.states[target]:
            self._n_users[state.slot] += 1

    def worth_saving(self, sequence: int) -> list[State]:
        """All states but, once its step is over, one that would go in the next."""
        states = self.states[sequence]
        if len(states) < 2 or self._is_worth_keeping(states):
            return [replace(state, is_checkpoint=True) for state in states[:-1]] + states[-1:]
        return states[:-2] + states[-1:]

    def restore(self, sequence: int, saved: Sequence[State]) -> list[int]:
        """The sequence, which must be empty, gets slots for the last so many of these states, one at least: those slots.

        Of others only the room for the newest is taken: what they can resume at is as likely to be asked for.
        """
        assert not self.states[sequence]
        while not self._free:
            self._give_up_one()
        n_states = min(len(saved), len(self._free), self._n_kept + 2)
        slots = [self._free.pop() for _ in range(n_states)]
        self.states[sequence] = [replace(s, slot=slot) for s, slot in zip(saved[-n_states:], slots, strict=True)]
        self._n_users[slots] = 1
        return slots

    def _release(self, state: State) -> None:
        self._n_users[state.slot] -= 1
        if not self._n_users[state.slot]:
            self._free.append(state.slot)

    def check_integrity(self) -> None:
        """Raise AssertionError when the books contradict each other."""
        users = np.zeros(self.n_slots, np.int32)
        users[START] = 1
        for sequence, states in enumerate(self.states):
            lengths = [s.length for s in states]
            assert lengths == sorted(set(lengths)), f"states of sequence {sequence} are out of order: {lengths}"
            assert len(states) <= self._n_kept + 2, f"sequence {sequence} holds {len(states)} states"
            for state in states:
                assert state.slot != START, "the state before any token was written"
                users[state.slot] += 1
        assert (users == self._n_users).all(), "users of slots are miscounted"
        assert sorted(self._free) == np.flatnonzero(users == 0).tolist(), "free slots are not those without users"
