"""Who of those who wait may start, and who gives way when the pool of cells is short: decisions, no computing.

The order of arrival bounds how long anybody waits. Whoever came first is never asked to give way; who gave way goes on
before anybody starts, the oldest first; and the first in the queue who finds no room keeps those behind it from taking it.
A request starts, or goes on, only where its prompt and some of an answer have room beside what the others may still need,
so that few are ever asked to give way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from puna.kvcache.cache import Sequences
from puna.runner.prefixes.slots import Slots
from puna.runner.scheduling.task import T, Task

# A request waits for another that computes the beginning of its prompt if that spares it this many tokens.
MIN_SHARED = 8

# Of a long queue only the first so many are looked at in one step.
QUEUE_WINDOW = 64

# Room is reckoned for so many tokens of an answer at least, where it may become as long as that.
MIN_ANSWER = 256

# How long answers are is learnt from so many.
N_ANSWERS = 32


class Answers:
    """How long answers have been lately: what is reckoned with for those that are being written."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=N_ANSWERS)

    def note(self, n_tokens: int) -> None:
        """An answer has ended."""
        self._lengths.append(n_tokens)

    @property
    def n_likely(self) -> int:
        """How many more tokens an answer may have; however many it has, since that says little about its end."""
        return max(MIN_ANSWER, sum(self._lengths) // max(len(self._lengths), 1))


class Room:
    """Whether the pool has room, now and for what those who run may still need."""

    def __init__(self, cache: Sequences, slots: Slots, answers: Answers, running: Iterable[Task]) -> None:
        self._cache = cache
        self.slots = slots
        self._n_likely = answers.n_likely
        self._running = [r for r in running if not r.is_done]

    def n_needed(self, request: Task, n_there: int) -> int:
        """Cells that a request may still take, of whose tokens so many are there."""
        return max(len(request.tokens) - n_there, 0) + min(request.n_to_write, self._n_likely)

    def n_promised(self, request: Task) -> int:
        """Cells that those who run beside this one may still take."""
        return sum(self.n_needed(r, r.n_computed) for r in self._going(request))

    def _going(self, request: Task) -> list[Task]:
        return [r for r in self._running if r is not request and not r.is_paused]

    def has_room(self, request: Task) -> bool:
        """For a request that is to start or go on; idle prefixes and those who gave way later leave theirs to it."""
        if not self._cache.n_cells or not self._going(request):
            return True
        n_there, holder = self.slots.share(request.tokens)
        if request.is_paused and request.n_computed >= n_there:
            n_there, holder = request.n_computed, request.slot
        n_required = self.n_promised(request) + self.n_needed(request, n_there)
        if self._cache.n_free >= n_required:
            return True
        younger = [r.slot for r in self._running if r.is_paused and (not request.is_paused or r.order > request.order)]
        if self._has_spare(n_required, younger, holder, n_there):
            return True
        self.slots.deduplicate(also_busy=True)
        return self._has_spare(n_required, younger, holder, n_there)

    def _has_spare(self, n_required: int, younger: Sequence[int], holder: int, n_there: int) -> bool:
        return self._cache.n_free + self.slots.n_spare(younger, holder, n_there) >= n_required


def next_to_start(waiting: Iterable[T], running: Sequence[Task], slots: Slots) -> T | None:
    """The first in the queue that gains nothing by waiting.

    A request whose prompt begins like one that is being computed right now waits until that is done, and then copies
    it: requests that arrive together with a common prefix compute it once. Those behind it in the queue may pass.
    """
    computing = {r.slot: r for r in running if r.n_computed < r.n_prompt and not r.is_done and not r.is_paused}
    for _, request in zip(range(QUEUE_WINDOW), waiting, strict=False):
        soon = _soon_shared(request, computing, slots) if computing else 0
        if soon < MIN_SHARED or soon < slots.cached(request.tokens) + MIN_SHARED:
            return request
    return None


def _soon_shared(request: Task, computing: Mapping[int, Task], slots: Slots) -> int:
    """Leading tokens that one of those, by slot, has in common and has still to compute a part of, if they are not few."""
    soon = 0
    for sequence, shared in slots.promised(request.tokens, MIN_SHARED):
        other = computing.get(sequence)
        if other is not None and other.n_computed < (n := min(shared, other.n_prompt)):
            soon = max(soon, n)
    return soon


def make_room(
    chosen: list[tuple[T, int]], running: Sequence[T], cache: Sequences, slots: Slots, queue: Iterable[list[int]] = ()
) -> list[tuple[T, int]]:
    """What of a step fits the pool.

    Copies that ended requests have left go first, then what else they have left, at last what prompts of the *queue* begin
    with; then copies of running requests. Only then does somebody give way: the one that came last. It keeps its place and
    its text, and of what it had computed as much as nobody else takes.
    """
    chosen = list(chosen)

    def n_short() -> int:
        return sum(count for _, count in chosen) - cache.n_free

    if n_short() <= 0:
        return chosen
    slots.deduplicate(also_busy=False)
    if n_short() > 0:
        spared = slots.holders(queue)
        while n_short() > 0 and slots.evict(spared):
            pass
    if n_short() > 0:
        slots.deduplicate(also_busy=True)
    while n_short() > 0:
        holding = [r for r in running if r.is_paused and r.n_computed]
        going = [r for r in running if not r.is_paused and not r.is_done]
        if holding:
            last = max(holding, key=lambda r: r.order)
            last.n_computed = slots.shrink(last.slot, n_short() if last.is_resumable else last.n_computed)
        elif len(going) > 1:
            last = max(going, key=lambda r: r.order)
            pause(last, slots)
            chosen = [(r, count) for r, count in chosen if r is not last]
        else:
            break  # the pool holds a whole context, so this does not happen; if it does, the step says so
    return chosen


def pause(request: Task, slots: Slots) -> None:
    slots.offload(request.slot)
    request.is_paused = True


def resume_paused(running: Sequence[T], room: Room, slots: Slots) -> None:
    """Let paused requests go on, oldest first, each as soon as it has room."""
    for request in sorted((r for r in running if r.is_paused), key=lambda r: r.order):
        if not room.has_room(request):
            return
        request.is_paused = False
        if request.is_resumable:
            n_needed = room.n_promised(request) + room.n_needed(request, len(request.tokens))
            request.n_computed = slots.regain(request.slot, request.tokens, n_needed=n_needed)
