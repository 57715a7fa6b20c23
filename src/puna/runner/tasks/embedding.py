"""Requests for vectors and scores: a job per request, and a task per input, which may have images among its text.

A job lends one text at a time to the queue, in turn with other jobs, so that a long list delays nobody by more than a batch.
Texts begin from nothing and leave nothing: prompts that repeat are not what embeddings are asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from puna.errors import BadRequest, PunaError
from puna.model.pooling import Pooling
from puna.runner.failures import deliver
from puna.runner.images.in_sequence import ImageAt, groups, n_ready
from puna.runner.prefixes.groups import Group
from puna.runner.scheduling.schedule import Progress
from puna.runner.scheduling.task import Reason, Removed
from puna.runner.scheduling.workload import Rows
from puna.runner.tasks.inputs import Fitted
from puna.runner.tasks.seeing import NOTHING_SEEN, Seen
from puna.wire import EmbeddingReply, EmbeddingRequest, Failed

log = logging.getLogger(__name__)

Vector = npt.NDArray[np.float32]
Emit = Callable[[EmbeddingReply | Failed], None]

_SMALLEST_NORM = 1e-12


class EmbeddingJob:
    """One request's texts and their vectors; replies once, when all are there or one has failed."""

    def __init__(
        self,
        wire: EmbeddingRequest,
        fitted: Sequence[Fitted],
        pooling: Pooling,
        emit: Emit,
        seen: Seen = NOTHING_SEEN,
        *,
        has_probabilities: bool = False,
    ) -> None:
        self.pooling = pooling
        self.n_looked_at = seen.n_looked_at
        self._seen = seen
        self._wire = wire
        self._emit = emit
        self._has_probabilities = has_probabilities
        self._texts = fitted
        self._n_truncated = sum(text.n_cut for text in fitted)
        self._n_tokens = sum(len(text.tokens) for text in fitted)
        self._n_lent = 0
        self._n_missing = len(fitted)
        self._vectors: list[list[float]] = [[]] * len(fitted)
        self.is_cancelled = False
        self.is_done = False

    @property
    def n_left(self) -> int:
        """Texts that nobody has taken yet."""
        return len(self._texts) - self._n_lent

    def take_text(self) -> EmbeddedText:
        text = EmbeddedText(self, self._n_lent, self._texts[self._n_lent])
        self._n_lent += 1
        return text

    def accept(self, index: int, vector: Vector) -> None:
        """Take a text's pooled vector; the last one ends the job."""
        if self.is_done:
            return
        if not np.isfinite(vector).all():
            self.fail(BadRequest("embedding contains NaN or Inf values"), status=400)
            return
        if 0 < self._wire.dimensions < len(vector):
            vector = vector[: self._wire.dimensions]
        if self._wire.normalize and self._wire.query is None:
            vector = vector / max(float(np.linalg.norm(vector)), _SMALLEST_NORM)
        self._vectors[index] = short(vector).tolist()
        self._n_missing -= 1
        if not self._n_missing:
            reply = EmbeddingReply(
                embeddings=self._vectors,
                prompt_eval_count=self._n_tokens,
                truncated_count=self._n_truncated,
                has_probabilities=self._has_probabilities,
            )
            self._end(reply)

    def finish(self, reason: Reason) -> None:
        """End it early; the only reason there is, is that nobody wants the answer any more."""
        self.fail(PunaError("the request was cancelled"), status=499)

    def fail(self, error: BaseException, status: int = 500) -> None:
        """Never raises."""
        if not self.is_done:
            self.is_cancelled = True
            self._end(Failed(error=str(error) or type(error).__name__, status=status))

    def _end(self, reply: EmbeddingReply | Failed) -> None:
        self.is_done = True
        try:
            self._seen.give_back()
        except BaseException:
            log.exception("images could not be given back")
        deliver(self._emit, reply)


class EmbeddedText:
    """``tokens`` are those of the text; the first ``n_computed`` of them have been computed."""

    def __init__(self, job: EmbeddingJob, index: int, text: Fitted) -> None:
        self.tokens = text.tokens
        self.images: Sequence[ImageAt] = text.images
        self.groups: Sequence[Group] = groups(text.images)
        self.n_looked_at = job.n_looked_at
        self.n_ctx = len(text.tokens)
        self.n_computed = 0
        self.slot = -1
        self.order = 0  # of admission
        self.last_turn = 0  # that it had, see puna.runner.scheduling.turns
        self.is_paused = False  # gave way to others, until the pool has room
        self._job = job
        self._index = index
        self._has_ended = False
        self._sum: Vector | None = None

    @property
    def progress(self) -> Progress:
        return Progress(self.n_computed, self.n_ready(self.n_computed), 0, self.groups)

    @property
    def is_done(self) -> bool:
        return self._has_ended or self._job.is_done

    @property
    def is_cancelled(self) -> bool:
        return self._job.is_cancelled

    @is_cancelled.setter
    def is_cancelled(self, value: bool) -> None:
        self._job.is_cancelled = value

    n_generated = n_to_write = 0
    reuses_prefixes = False
    is_resumable = False  # the sum is over all its tokens: it begins again when some of them are lost

    @property
    def n_prompt(self) -> int:
        return len(self.tokens)

    def n_ready(self, n_computed: int) -> int:
        return n_ready(self.images, n_computed, len(self.tokens), self.n_looked_at)

    def place(self, slot: int, n_cached: int) -> None:
        self.slot = slot

    def shift(self) -> Removed:
        raise AssertionError("a text fits the context, and does not grow")

    def output_rows(self, begin: int, n_tokens: int) -> range:
        """Those that pooling needs."""
        match self._job.pooling:
            case Pooling.MEAN:
                return range(n_tokens)
            case Pooling.LAST:
                return range(n_tokens - 1, n_tokens) if begin + n_tokens == len(self.tokens) else range(0)
            case _:
                return range(1) if begin == 0 else range(0)

    def add(self, n_tokens: int, rows: Rows) -> None:
        """So many more of its tokens have been computed; *rows* are the hidden states that pooling needs of them."""
        if len(rows):
            total = rows.sum(axis=0)
            self._sum = total if self._sum is None or self.n_computed == 0 else self._sum + total
        self.n_computed += n_tokens
        if self.n_computed == len(self.tokens):
            self._complete()

    def _complete(self) -> None:
        assert self._sum is not None
        self._end()
        n_added = len(self.tokens) if self._job.pooling is Pooling.MEAN else 1
        self._job.accept(self._index, self._sum / np.float32(n_added))

    def _end(self) -> None:
        self._has_ended = True
        self.n_computed = 0  # what the cache holds of it is given up

    def finish(self, reason: Reason) -> None:
        self._end()
        self._job.finish(reason)

    def fail(self, error: BaseException, status: int = 500) -> None:
        self._end()
        self._job.fail(error, status)


def short(values: Vector) -> npt.NDArray[np.float64]:
    """The same numbers with as few decimal digits as tell them from their neighbours: half the JSON."""
    wide = values.astype(np.float64)
    exponents = np.floor(np.log10(np.abs(wide), where=wide != 0, out=np.zeros_like(wide)))
    result = wide
    for n_digits in (9, 8, 7):  # nine suffice for every float32, seven mostly do
        factors = 10.0 ** (n_digits - 1 - exponents)
        rounded = np.round(wide * factors) / factors
        result = np.where(rounded.astype(np.float32) == values, rounded, result)
    return result
