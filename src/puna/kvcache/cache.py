"""What models and the runner may ask of a key/value cache. The two audiences do not mix.

Once per step the runner calls ``start_forward``. The model, while it builds its graph, calls ``layer``, ``put`` and
``get`` for each layer. A graph fits every later step whose ``shape`` is equal; such a step only calls ``set_inputs``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from puna.errors import PunaError
from puna.kvcache.batch import Batch
from puna.ml.attention import AttentionRange
from puna.ml.backend import Context
from puna.ml.tensor import Tensor

# Room for any number of tokens.
UNLIMITED = 1 << 62


class NotSupported(PunaError):
    """The cache cannot do this; the caller computes the tokens again."""


@dataclass(frozen=True)
class Limits:
    max_sequences: int
    n_ctx: int  # positions one sequence may reach
    n_batch: int  # tokens in one step at most
    n_pool: int = 0  # tokens that all sequences together may hold; 0: n_ctx each
    n_outputs: int = 0  # rows of one step that may be outputs, of whichever sequences; 0: one of each
    n_encoded: int = 0  # vectors of an image that cross attention may look at, of each sequence; 0: there are no eyes

    @property
    def n_cells(self) -> int:
        return max(self.n_pool or self.n_ctx * self.max_sequences, self.n_ctx)

    @property
    def max_outputs(self) -> int:
        return min(self.n_outputs or self.max_sequences, self.n_batch)


@dataclass(frozen=True)
class Attended(AttentionRange):
    """A range as the cache holds it; all of a layer are turned alike."""

    key_turn: int = 0  # how many channels of the keys are turned together, and so must the queries' be,
    value_turn: int = 0  # and of the values: what is mixed from them must be turned back


class Sequences(Protocol):
    """What the runner asks about sequences, of whichever engine."""

    @property
    def n_cells(self) -> int:
        """Tokens that all sequences together can hold; 0: there is no such bound, each has room of its own."""

    @property
    def n_free(self) -> int:
        """Tokens that there is room for now, whichever sequences they are of; UNLIMITED without a bound."""

    def n_freed(self, sequences: Collection[int], kept_by: int = -1, n_kept: int = 0) -> int:
        """Tokens that there would be more room for if these sequences forgot all they hold.

        But for the first *n_kept* positions of one of them, if that is said.
        """

    def copy_prefix(self, source: int, target: int, length: int, *, by_reference: bool = False) -> None:
        """The target forgets what it holds and then holds of the source's positions [0, length) what later rows need.

        How far it can resume, resume_point tells. By reference it takes no room of the pool, but is read more slowly.
        """

    def share_prefix(self, source: int, target: int, length: int) -> None:
        """The two hold the same tokens in positions [0, length): let that take room once, where it takes room of the pool."""

    def can_resume(self, sequence: int, position: int) -> bool:
        """Whether a token at this position would find all it attends to, once later positions are removed."""

    def remove(self, sequence: int, begin: int, end: int | None = None, *, n_positions: int = 0) -> None:
        """Forget positions [begin, end), to the end when it is None.

        Removing to the end never fails, but where that leaves nothing to resume from, all positions go. Ask
        resume_point before. A range in the middle either goes, and later positions move down, or nothing changes.
        *n_positions* are those that M-RoPE gave to what goes, where there is an image in it; 0: one for each token.
        Errors: NotSupported for a range in the middle.
        """

    def length(self, sequence: int) -> int:
        """The position that the next token gets: one past the last one held, 0 when nothing is."""

    def check_integrity(self) -> None:
        """Raise AssertionError when what the cache knows contradicts itself: a bug in it."""


class Cache(Sequences, Protocol):
    # For models.

    def layer(self, index: int) -> None:
        """Put and get that follow are about this layer."""

    def put(self, ctx: Context, key: Tensor, value: Tensor) -> None:
        """Store the batch's keys and values.

        Shapes: [head_dim, n_kv_heads, n_tokens].
        """

    def get(self, ctx: Context) -> list[Attended]:
        """History and batch as the rows see them, covering all rows in order."""

    # For the runner.

    def start_forward(self, batch: Batch) -> Hashable:
        """Give the batch's tokens cells; the shape that a graph for this step must have.

        Errors: CacheFull; then nothing has changed.
        """

    def start_reserve(self, n_tokens: int) -> Hashable:
        """As start_forward for the largest batch, for measuring; no cell is taken."""

    def look_ahead(self, batch: Batch) -> Hashable | None:
        """The shape that a step of this batch would have if it came next, while another step is still being computed.

        A graph may then be built for it; no cell is taken, and start_forward decides anew. None where it cannot be told.
        """

    def make_inputs(self, ctx: Context) -> None:
        """Create the inputs of a new graph, for the shape asked for last; the model builds on them."""

    inputs: object  # those made last; whoever keeps several graphs puts those of the one that comes next here

    def set_inputs(self, ctx: Context) -> None:
        """Fill them; before every compute."""


class Saved(Protocol):
    """What a sequence held, in the host's memory: for the cache that it is of, and never changed."""

    @property
    def n_bytes(self) -> int: ...
    def resume_point(self, position: int) -> int:
        """As the function of this name, for a sequence that gets all of it back; 0 at least."""


@runtime_checkable
class SavingCache(Sequences, Protocol):
    """A cache whose sequences can leave it and come back. Nothing may be computed meanwhile."""

    def saved_bytes(self, sequence: int, *, lean: bool = False) -> int:
        """What save would take; 0 where there is nothing to save or it cannot be saved."""

    def save(self, sequence: int, *, lean: bool = False) -> Saved:
        """A copy of all that the sequence holds and a later row may need; *lean*: without what windows have forgotten.

        Errors: MemoryError.
        """

    def restore(self, sequence: int, saved: Saved, length: int) -> None:
        """A sequence that is empty holds the first *length* tokens again, which is a resume point, and what it can resume at.

        Of recurrent states only those that there is room for: that at *length*, then the later ones first. Rows of layers
        without a window may lie in other places, so that sums over them are rounded otherwise where they were not in order.

        Errors: CacheFull; then nothing has changed.
        """


@runtime_checkable
class RememberingCache(Protocol):
    """A cache that may forget, and may then keep what it forgets of prompts in the host's memory."""

    forgets: bool

    def remember(self, max_bytes: int, spare: Callable[[], int]) -> None:
        """Keep up to so many bytes, and no more than *spare* says that the machine has beside them."""

    @property
    def remembered_bytes(self) -> int: ...


@runtime_checkable
class CheckpointCache(Protocol):
    """A cache that may know a point to resume from where it cannot resume at the one asked for."""

    def prepare_restore(self, sequence: int, position: int) -> int:
        """The furthest position up to this one that can be resumed at: all of it, a checkpoint, or 0. Changes nothing."""


@runtime_checkable
class StepEndCache(Protocol):
    """A cache in which a sequence can resume only where a step ended."""

    @property
    def prompt_tail(self) -> int:
        """A step should end so many tokens before the end of a prompt; 0: it does not matter where."""


class CachePart(Cache, CheckpointCache, Protocol):
    """A cache that can stand beside others, each for some layers: it tells before whether an operation would succeed."""

    def check_room(self, batch: Batch) -> None:
        """Errors: CacheFull if start_forward would raise it."""

    def check_remove(self, sequence: int, begin: int, end: int) -> None:
        """Errors: NotSupported if remove would raise it."""


def resume_point(cache: Sequences, sequence: int, position: int) -> int:
    """How many of the first *position* tokens need not be computed again; the caller removes what follows them."""
    if isinstance(cache, CheckpointCache):
        return cache.prepare_restore(sequence, position)
    return position if cache.can_resume(sequence, position) else 0
