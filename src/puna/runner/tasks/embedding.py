"""Requests for vectors and scores: a job per request, a text per input, and the step that computes texts of several jobs
together.

To the engine a text is much like a request for an answer: it waits, gets a sequence, is computed in steps, ends. A job
lends one text at a time to the queue, in turn with other jobs, so that a long list delays nobody by more than a batch.
Texts begin from nothing and leave nothing: prompts that repeat are not what embeddings are asked for.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from puna.errors import BadRequest, ContextOverflow, PunaError
from puna.gguf.reader import GGUFFile
from puna.kvcache.batch import batch
from puna.model.pooling import Pooling
from puna.runner.failures import deliver
from puna.runner.scheduling.schedule import Progress
from puna.runner.step.forward import Compute
from puna.runner.tasks.completion import Reason, Request
from puna.tokenizer.tokenizer import Tokenizer
from puna.wire import EmbeddingReply, EmbeddingRequest, Failed

Vector = npt.NDArray[np.float32]
Emit = Callable[[EmbeddingReply | Failed], None]

# Texts share a batch up to this many tokens. More would only make attention, which is over the whole batch, dearer.
PACKED_TOKENS = 512

# Of an encoder; a place costs nothing there, since nothing is cached.
MAX_TEXTS = 128

_SMALLEST_NORM = 1e-12

# In templates for ranking.
_CONTROL = re.compile(r"(<\|[^|<>]+\|>)")
_PLACEHOLDER = re.compile(r"\{(query|document)\}")


class EmbeddingJob:
    """One request's texts and their vectors; replies once, when all are there or one has failed."""

    def __init__(
        self,
        wire: EmbeddingRequest,
        tokenizer: Tokenizer,
        n_ctx: int,
        emit: Emit,
        separator: Sequence[int] = (),
        template: str = "",
        has_probabilities: bool = False,
    ) -> None:
        """*separator* and *template* say how a query and a text become a prompt, see Pairs and TemplatedPairs."""
        if not wire.inputs:
            raise BadRequest("there is no input")
        self._wire = wire
        self._emit = emit
        self._has_probabilities = has_probabilities
        if wire.n_ctx < 0:
            raise BadRequest(f"n_ctx must not be negative: {wire.n_ctx}")
        n_ctx = min(wire.n_ctx or n_ctx, n_ctx)
        if wire.query is None:
            fitted = [tokenize(text, i, tokenizer, n_ctx, wire.truncate) for i, text in enumerate(wire.inputs)]
        else:
            templated = TemplatedPairs(template, wire.query, tokenizer, n_ctx) if template else None
            pairs = templated or Pairs(wire.query, tokenizer, n_ctx, separator)
            fitted = [pairs.tokenize(text, i, wire.truncate) for i, text in enumerate(wire.inputs)]
        self._tokens = [text.tokens for text in fitted]
        self._n_truncated = sum(text.n_cut for text in fitted)
        self._n_tokens = sum(map(len, self._tokens))
        self._n_ctx = n_ctx
        self._n_lent = 0
        self._n_missing = len(self._tokens)
        self._vectors: list[list[float]] = [[]] * len(self._tokens)
        self.is_cancelled = False
        self.is_done = False

    @property
    def n_left(self) -> int:
        """Texts that nobody has taken yet."""
        return len(self._tokens) - self._n_lent

    def take_text(self) -> EmbeddedText:
        text = EmbeddedText(self, self._n_lent, self._tokens[self._n_lent], self._n_ctx)
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
            self.is_done = True
            reply = EmbeddingReply(
                embeddings=self._vectors,
                prompt_eval_count=self._n_tokens,
                truncated_count=self._n_truncated,
                has_probabilities=self._has_probabilities,
            )
            deliver(self._emit, reply)

    def finish(self, reason: Reason) -> None:
        """End it early; the only reason there is, is that nobody wants the answer any more."""
        self.fail(PunaError("the request was cancelled"), status=499)

    def fail(self, error: BaseException, status: int = 500) -> None:
        """Never raises."""
        if not self.is_done:
            self.is_done = self.is_cancelled = True
            deliver(self._emit, Failed(error=str(error) or type(error).__name__, status=status))


class EmbeddedText:
    """``tokens`` are those of the text; the first ``n_computed`` of them have been computed."""

    def __init__(self, job: EmbeddingJob, index: int, tokens: list[int], n_ctx: int) -> None:
        self.tokens = tokens
        self.n_ctx = n_ctx
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
        return Progress(self.n_computed, len(self.tokens))

    @property
    def is_done(self) -> bool:
        return self._has_ended or self._job.is_done

    @property
    def is_cancelled(self) -> bool:
        return self._job.is_cancelled

    @is_cancelled.setter
    def is_cancelled(self, value: bool) -> None:
        self._job.is_cancelled = value

    goes_on = False  # the sum is over all its tokens: it begins again when some of them are lost
    n_to_write = 0

    def add(self, total: Vector) -> None:
        """Sum of hidden states of the tokens from n_computed on; from 0 also when it had to begin again."""
        self._sum = total if self._sum is None or self.n_computed == 0 else self._sum + total

    def complete(self, pooling: Pooling) -> None:
        """All of it has been computed and the rows that pooling needs were added."""
        assert self._sum is not None
        self._end()
        n_added = len(self.tokens) if pooling is Pooling.MEAN else 1
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


class Fitted(NamedTuple):
    """An input as it fits the context."""

    tokens: list[int]
    n_cut: int = 0  # tokens that were left out


def tokenize(text: str | list[int], index: int, tokenizer: Tokenizer, n_ctx: int, truncate: bool) -> Fitted:
    """The tokens of an input, cut at the end to what the context holds; special tokens at the end stay.

    Errors: BadRequest for an input without tokens or with tokens outside the vocabulary; ContextOverflow.
    """
    if isinstance(text, str):
        tokens = tokenizer.encode(text)
    else:
        tokens = text
        bad = next((t for t in tokens if not 0 <= t < tokenizer.n_tokens), None)
        if bad is not None:
            raise BadRequest(f"input {index} has the token {bad}, which is not in the vocabulary of {tokenizer.n_tokens}")
    if not tokens:
        raise BadRequest(f"input {index} is empty")
    if len(tokens) <= n_ctx:
        return Fitted(tokens)
    if not truncate:
        raise ContextOverflow(len(tokens), n_ctx)
    n_end = n_special_at_end(tokens, tokenizer.encode(text, add_special=False)) if isinstance(text, str) else 0
    return Fitted([*tokens[: n_ctx - n_end], *tokens[len(tokens) - n_end :]], len(tokens) - n_ctx)


class Pairs:
    """Texts as a cross encoder reads them: the query, what separates the two, the text; each with its special tokens.

    ``[CLS] query [SEP] text [SEP]`` of BERT and ``<s> query </s></s> text </s>`` of RoBERTa are both the query as the
    tokenizer wraps it, *separator*, and the text without what begins a text. Control tokens written in a text are text.
    """

    def __init__(self, query: str, tokenizer: Tokenizer, n_ctx: int, separator: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._n_ctx = n_ctx
        probe = tokenizer.encode("a", add_special=False)
        wrapped = tokenizer.encode("a")
        self._end = wrapped[len(wrapped) - n_special_at_end(wrapped, probe) :]
        self._begin = wrapped[: len(wrapped) - len(probe) - len(self._end)]
        self._middle = [*self._end, *separator]
        self._query = self._plain(query)

    def _plain(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False, parse_special=False)

    def tokenize(self, text: str | list[int], index: int, truncate: bool) -> Fitted:
        """Errors: BadRequest for tokens in a text's place; ContextOverflow."""
        if not isinstance(text, str):
            raise BadRequest(f"input {index} must be a text, to be judged against a query")
        query, document = self._query, self._plain(text)
        room = self._n_ctx - len(self._begin) - len(self._middle) - len(self._end)
        n_cut = max(0, len(query) + len(document) - room)
        if n_cut:
            if not truncate or room < 2:
                raise ContextOverflow(self._n_ctx - room + len(query) + len(document), self._n_ctx)
            query = query[: max(room // 2, room - len(document))]
            document = document[: room - len(query)]
        return Fitted([*self._begin, *query, *self._middle, *document, *self._end], n_cut)


class TemplatedPairs:
    """Texts as a ranking decoder reads them: query and text in the template that its file has for that.

    Control tokens written in query or text are text.
    """

    def __init__(self, template: str, query: str, tokenizer: Tokenizer, n_ctx: int) -> None:
        self._parts = _CONTROL.split(template)  # every second one is a control token
        self._query = query
        self._tokenizer = tokenizer
        self._n_ctx = n_ctx

    def _tokens(self, document: str) -> list[int]:
        texts = {"query": self._query, "document": document}
        tokens: list[int] = []
        for i, part in enumerate(self._parts):
            is_control = i % 2 == 1
            filled = part if is_control else _PLACEHOLDER.sub(lambda found: texts[found[1]], part)
            tokens += self._tokenizer.encode(filled, add_special=False, parse_special=is_control)
        return tokens

    def tokenize(self, text: str | list[int], index: int, truncate: bool) -> Fitted:
        """Errors: BadRequest for tokens in a text's place; ContextOverflow."""
        if not isinstance(text, str):
            raise BadRequest(f"input {index} must be a text, to be judged against a query")
        tokens = self._tokens(text)
        n_tokens = len(tokens)
        while len(tokens) > self._n_ctx:
            if not (truncate and text):
                raise ContextOverflow(len(tokens), self._n_ctx)
            # About as many characters fewer as there are tokens too many.
            text = text[: int(len(text) * self._n_ctx / len(tokens))]
            tokens = self._tokens(text)
        return Fitted(tokens, n_tokens - len(tokens))


def pair_separator(file: GGUFFile, tokenizer: Tokenizer) -> list[int]:
    """What stands between query and text beside the special tokens that end a text.

    A WordPiece tokenizer ends a text with the separator already; of the others the file says whether one comes on top.
    """
    meta = file.metadata
    token = meta.integer("tokenizer.ggml.seperator_token_id", -1)  # so spelt in the format
    is_asked = meta.boolean("tokenizer.ggml.add_sep_token", False) and meta.string("tokenizer.ggml.model", "") != "bert"
    return [token] if is_asked and 0 <= token < tokenizer.n_tokens else []


def n_special_at_end(tokens: list[int], plain: list[int]) -> int:
    """How many tokens were put after those of the text itself."""
    n_added = len(tokens) - len(plain)
    begins = [begin for begin in range(n_added + 1) if tokens[begin : begin + len(plain)] == plain]
    return n_added - begins[0] if begins else 0


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


Waiting = Request | EmbeddingJob
Task = Request | EmbeddedText


def take(waiting: deque[Waiting]) -> Task:
    """The next to be computed. A job gives one text and goes to the end of the queue with the rest."""
    head = waiting.popleft()
    if isinstance(head, Request):
        return head
    text = head.take_text()
    if head.n_left:
        waiting.append(head)
    return text


def fills_no_batch(running: Iterable[Task]) -> bool:
    """Whether another text would have a use: one that is taken up later leaves its turn to whoever comes meanwhile."""
    return sum(len(text.tokens) - text.n_computed for text in running) < PACKED_TOKENS


def schedule_whole(requests: Sequence[Progress], n_batch: int) -> list[int]:
    """As ``schedule``, for texts that must be in one batch as a whole: in order, whoever fits.

    The first has a step to itself if it is longer than a batch, so nobody is passed over for ever.
    """
    counts = [0] * len(requests)
    left = n_batch
    for i, request in enumerate(requests):
        if i == 0 or request.n_behind <= left:
            counts[i] = request.n_behind
            left = max(left - request.n_behind, 0)
    return counts


@dataclass
class Rows:
    """Rows of a batch, text after text."""

    tokens: list[int]
    positions: list[int]
    sequences: list[int]
    outputs: list[int]
    owners: list[tuple[EmbeddedText, int]]  # who gets outputs from here on: text, first of its outputs


def collect(pooling: Pooling, chosen: Sequence[tuple[EmbeddedText, int]]) -> Rows:
    """The batch of a step; outputs are only the rows that pooling needs."""
    rows = Rows([], [], [], [], [])
    for text, count in chosen:
        first, begin, end = len(rows.tokens), text.n_computed, text.n_computed + count
        rows.tokens += text.tokens[begin:end]
        rows.positions += range(begin, end)
        rows.sequences += [text.slot] * count
        n_outputs = len(rows.outputs)
        if pooling is Pooling.MEAN:
            rows.outputs += range(first, first + count)
        elif pooling is Pooling.LAST:
            rows.outputs += [first + count - 1] if end == len(text.tokens) else []
        else:
            rows.outputs += [first] if begin == 0 else []
        if len(rows.outputs) > n_outputs:
            rows.owners.append((text, n_outputs))
    return rows


def embed(forward: Compute, pooling: Pooling, chosen: Sequence[tuple[EmbeddedText, int]]) -> None:
    """One step: count tokens of each text, which may bring it to its end."""
    rows = collect(pooling, chosen)
    # A graph without outputs would have no end; a row that nobody wants is cheap.
    hidden = forward(batch(rows.tokens, rows.positions, rows.sequences, rows.outputs or [len(rows.tokens) - 1]))
    if hidden is None:
        for text, _ in chosen:
            text.finish("cancelled")
        return
    if rows.owners:
        for (text, _), total in zip(rows.owners, np.add.reduceat(hidden, [n for _, n in rows.owners]), strict=True):
            text.add(total)
    for text, count in chosen:
        text.n_computed += count
        if text.n_computed == len(text.tokens):
            text.complete(pooling)
