"""One forward pass through libllama: a batch in, logits or vectors out. Nothing reaches libllama that it would abort on."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from puna.compat.cache import their_positions
from puna.compat.segments import Kind, part, segments
from puna.errors import PunaError
from puna.kvcache.batch import N_AXES, Batch, runs, text_axes
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
        found: list[tuple[npt.NDArray[np.int32], Floats]] = []
        for kind, rows in segments(batch):
            of_kind = batch if len(rows) == batch.n_tokens else part(batch, rows)
            if not self._compute(kind, of_kind):
                return None
            if of_kind.n_outputs:
                found.append((rows[of_kind.outputs], self._read(of_kind).copy()))
        if len(found) == 1:
            return found[0][1]
        # Of several parts, each has some of the outputs.
        order = np.argsort(np.concatenate([rows for rows, _ in found]))
        return np.concatenate([values for _, values in found])[order]

    def _compute(self, kind: Kind, batch: Batch) -> bool:
        """False when it was aborted."""
        context, books = self._machine.context, self._books
        # Turning keys is part of the step. Where that broke off, some would be turned twice.
        must_finish = books is not None and books.has_moved
        if must_finish:
            context.set_abortable(False)
        with captured() as lines:
            status = self._decode(kind, batch)
        if must_finish:
            context.set_abortable(True)
        if status != DECODED:
            if books is not None and status != NO_ROOM:
                books.recover(batch)
            if status == ABORTED:
                return False
            said = next((line.text for line in lines if line.is_complaint), "")
            raise PunaError(f"libllama could not compute a batch of {batch.n_tokens} tokens (status {status}): {said}")
        if books is not None:
            books.add(batch)
        return True

    def _decode(self, kind: Kind, batch: Batch) -> int:
        context, has_axes = self._machine.context, self._machine.model.has_axes
        wanted = np.zeros(batch.n_tokens, np.int8)
        wanted[batch.outputs] = 1
        positions = their_positions(batch)
        if kind is Kind.TOKENS:
            return context.decode(batch.tokens, positions, batch.sequences, wanted)
        assert batch.embedded is not None
        if has_axes:
            positions = text_axes(batch.positions) if batch.axes is None else batch.axes
        both = kind is Kind.BOTH_WAYS
        return context.decode_rows(batch.embedded.values, positions, batch.sequences, wanted, sees_both_ways=both)

    def _check(self, batch: Batch) -> None:
        """Errors: CacheFull; PunaError naming what would end the process inside libllama, or give nonsense."""
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
        self._check_embedded(batch)
        if self._books:
            self._books.check_room(batch)

    def _check_embedded(self, batch: Batch) -> None:
        if batch.axes is not None and batch.axes.shape != (N_AXES, batch.n_tokens):
            raise PunaError(f"positions of shape {list(batch.axes.shape)} for a batch of {batch.n_tokens} tokens")
        if batch.embedded is None:
            return
        rows, shape = batch.embedded.rows, batch.embedded.values.shape
        if self._books is None or self._read not in (self._logits, self._hidden):
            raise PunaError("a model that is given whole texts is given tokens, not embeddings")
        if shape != (len(rows), self._machine.model.n_embd_in):
            wanted = [len(rows), self._machine.model.n_embd_in]
            raise PunaError(f"embeddings of shape {list(shape)} where the model takes {wanted}")
        if (np.diff(rows) <= 0).any() or not 0 <= rows[0] <= rows[-1] < batch.n_tokens:
            raise PunaError(f"rows given as embeddings are not in order, or not among the {batch.n_tokens} of the batch")
        for begin, end in batch.bidirectional:
            if not 0 <= begin < end <= batch.n_tokens or not np.isin(np.arange(begin, end), rows).all():
                raise PunaError("rows that see each other both ways are not all given as embeddings")

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
