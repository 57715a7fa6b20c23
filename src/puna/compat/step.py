"""One forward pass through libllama: a batch in, logits or vectors out. Nothing reaches libllama that it would abort on."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from puna.errors import PunaError
from puna.kvcache.batch import Batch, runs
from puna.kvcache.cache import Limits
from puna.native.decoder import ABORTED, DECODED, NO_ROOM, Context, Model
from puna.native.log import captured

Floats = npt.NDArray[np.float32]


class Books(Protocol):
    """The cache, as a step keeps it in agreement with libllama's memory."""

    has_moved: bool

    def length(self, sequence: int) -> int: ...
    def check_room(self, batch: Batch) -> None: ...
    def add(self, batch: Batch) -> None: ...
    def recover(self, batch: Batch) -> None: ...


class Machine(Protocol):
    """The model in memory."""

    @property
    def model(self) -> Model: ...
    @property
    def context(self) -> Context: ...


class Forward:
    """*books* is None where nothing outlives a step; *has_rows* is how many rows of one batch may be asked for.

    *output*: logits of the rows asked for; their hidden states; or, for each row asked for, the vector (or the scores)
    that libllama made of all of its sequence's tokens.
    """

    def __init__(self, machine: Machine, limits: Limits, books: Books | None, *, max_rows: int, output: str) -> None:
        self._machine = machine
        self._limits = limits
        self._books = books
        self._max_rows = max_rows
        self._read = {"logits": self._logits, "hidden": self._hidden, "pooled": self._pooled, "scores": self._scores}[output]

    def __call__(self, batch: Batch) -> Floats | None:
        """[n_outputs, n_vocab], or as many wide as the vectors; None when the compute was aborted.

        The batch's tokens stay in the cache either way.
        Errors: CacheFull; then nothing has changed. PunaError for a batch that libllama cannot compute.
        """
        self._check(batch)
        context, books = self._machine.context, self._books
        # Turning keys is part of the step. Where that broke off, some would be turned twice.
        must_finish = books is not None and books.has_moved
        if must_finish:
            context.set_abortable(False)
        wanted = np.zeros(batch.n_tokens, np.int8)
        wanted[batch.outputs] = 1
        with captured() as lines:
            status = context.decode(batch.tokens, batch.positions, batch.sequences, wanted)
        if must_finish:
            context.set_abortable(True)
        if status != DECODED:
            if books is not None and status != NO_ROOM:
                books.recover(batch)
            if status == ABORTED:
                return None
            said = next((line.text for line in lines if line.is_complaint), "")
            raise PunaError(f"libllama could not compute a batch of {batch.n_tokens} tokens (status {status}): {said}")
        if books is not None:
            books.add(batch)
        return self._read(batch).copy()

    def _check(self, batch: Batch) -> None:
        """Errors: CacheFull; PunaError naming what would end the process inside libllama, or give nonsense."""
        if batch.embedded is not None:
            raise PunaError("libllama computes tokens or embeddings in a batch, and here it is given tokens")
        limits, n_vocab = self._limits, self._machine.model.n_vocab
        n = batch.n_tokens
        if not 0 < n <= limits.n_batch or len(batch.positions) != n or len(batch.sequences) != n:
            raise PunaError(f"a batch of {n} tokens; from 1 to {limits.n_batch} can be computed at once")
        if not 0 < batch.n_outputs <= self._max_rows:
            raise PunaError(f"{batch.n_outputs} rows were asked for; from 1 to {self._max_rows} can be")
        _check_range("row", batch.outputs, n)
        _check_range("token", batch.tokens, n_vocab)
        _check_range("sequence", batch.sequences, limits.max_sequences)
        _check_range("position", batch.positions, limits.n_ctx)
        if (np.diff(batch.outputs) <= 0).any():
            raise PunaError("the rows asked for are not in order")
        groups = runs(batch.sequences)
        if len({sequence for sequence, _, _ in groups}) < len(groups):
            raise PunaError("the rows of a sequence do not stand together")
        for sequence, begin, end in groups:
            length = self._books.length(sequence) if self._books else 0
            if (batch.positions[begin:end] != np.arange(length, length + end - begin)).any():
                raise PunaError(f"sequence {sequence} goes on at {length}, not at {batch.positions[begin]}")
        if self._books:
            self._books.check_room(batch)

    def _logits(self, batch: Batch) -> Floats:
        return self._machine.context.logits(batch.n_outputs, self._machine.model.n_vocab)

    def _hidden(self, batch: Batch) -> Floats:
        rows: Floats = self._machine.context.hidden(batch.n_tokens, self._machine.model.n_embd)[batch.outputs]
        return rows

    def _pooled(self, batch: Batch) -> Floats:
        return self._of_sequences(batch, self._machine.model.n_embd)

    def _scores(self, batch: Batch) -> Floats:
        return self._of_sequences(batch, self._machine.model.n_classes)

    def _of_sequences(self, batch: Batch, width: int) -> Floats:
        return np.stack([self._machine.context.pooled(int(s), width) for s in batch.sequences[batch.outputs]])

    def close(self) -> None:
        """The machine holds everything."""


def _check_range(what: str, values: npt.NDArray[np.int32], end: int) -> None:
    if len(values) and not 0 <= int(values.min()) <= int(values.max()) < end:
        raise PunaError(f"a {what} of a batch is outside 0..{end - 1}")
