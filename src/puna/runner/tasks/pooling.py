"""Vectors, and scores: what a model is asked for that gives hidden states of whole texts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from puna.errors import BadRequest, UnsupportedModel
from puna.gguf.reader import GGUFFile
from puna.model.pooling import Pooling
from puna.runner.images.sight import Sight
from puna.runner.scheduling.admission import Room
from puna.runner.scheduling.packing import fills_no_batch
from puna.runner.scheduling.task import Part
from puna.runner.scheduling.workload import Rows, Workload
from puna.runner.tasks.embedding import EmbeddedText, EmbeddingJob, Emit
from puna.runner.tasks.inputs import Fitted, tokenize
from puna.runner.tasks.pairs import Pairs, TemplatedPairs, pair_separator
from puna.runner.tasks.seeing import Seeing
from puna.tokenizer.tokenizer import Tokenizer
from puna.wire import CompletionReply, CompletionRequest, EmbeddingRequest, ImagesRequest


class PoolingWorkload(Workload[EmbeddingJob, EmbeddedText]):
    """Takes texts of all jobs in turn; what the requests are, subclasses know."""

    streams = False

    def __init__(self, tokenizer: Tokenizer, n_ctx: int, pooling: Pooling, *, takes_whole_texts: bool) -> None:
        self.takes_whole_texts = takes_whole_texts
        self._tokenizer = tokenizer
        self._n_ctx = n_ctx
        self._pooling = pooling

    def complete(self, request: CompletionRequest, emit: Callable[[CompletionReply], None]) -> EmbeddingJob:
        raise BadRequest("this model computes embeddings, it does not generate text")

    def prompts(self, waiting: Sequence[EmbeddingJob]) -> list[list[int]]:
        return []

    def start_next(self, waiting: deque[EmbeddingJob], running: Sequence[EmbeddedText], room: Room) -> EmbeddedText | None:
        return take(waiting) if fills_no_batch(running) else None

    def accept(self, parts: Sequence[Part[EmbeddedText]], outputs: Sequence[Rows]) -> None:
        for part, rows in zip(parts, outputs, strict=True):
            part.task.add(part.n_tokens, rows)


class Embedding(PoolingWorkload):
    """Inputs become vectors."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        n_ctx: int,
        pooling: Pooling,
        *,
        takes_whole_texts: bool,
        sight: Sight | None = None,
        blindness: str = "",
    ) -> None:
        """*sight* and *blindness* as Seeing has them."""
        super().__init__(tokenizer, n_ctx, pooling, takes_whole_texts=takes_whole_texts)
        self._seeing = Seeing(n_ctx, sight, blindness)

    def embed(self, request: EmbeddingRequest, emit: Emit) -> EmbeddingJob:
        if request.query is not None:
            raise no_ranking()
        if self._pooling is Pooling.NONE:
            raise no_embeddings()
        n_ctx = checked_n_ctx(request, self._n_ctx)
        seen = self._seeing.take(request.images, request.salt, n_ctx)
        try:
            fitted = [
                tokenize(text, i, self._tokenizer, n_ctx, request.truncate, seen.images) for i, text in enumerate(request.inputs)
            ]
            return EmbeddingJob(request, fitted, self._pooling, emit, seen)
        except BaseException:
            seen.give_back()
            raise

    def image_tokens(self, request: ImagesRequest) -> list[int]:
        return self._seeing.n_tokens(request)


class Ranking(PoolingWorkload):
    """Inputs are judged against a query."""

    def __init__(self, tokenizer: Tokenizer, n_ctx: int, file: GGUFFile, *, takes_whole_texts: bool) -> None:
        # Of a model in which tokens see what came before them, the last one has read both query and text.
        pooling = Pooling.RANK if takes_whole_texts else Pooling.LAST
        super().__init__(tokenizer, n_ctx, pooling, takes_whole_texts=takes_whole_texts)
        self._separator = pair_separator(file, tokenizer)
        self._template = file.metadata.string("tokenizer.chat_template.rerank", "")
        self._has_probabilities = file.architecture.startswith("qwen3")  # their head ends in softmax

    def embed(self, request: EmbeddingRequest, emit: Emit) -> EmbeddingJob:
        if request.query is None:
            raise no_embeddings()
        if request.images:
            raise UnsupportedModel("images are not supported: texts alone are ranked")
        n_ctx = checked_n_ctx(request, self._n_ctx)
        pairs = self._pairs(request.query, n_ctx)
        fitted: list[Fitted] = [pairs.tokenize(text, i, request.truncate) for i, text in enumerate(request.inputs)]
        return EmbeddingJob(request, fitted, self._pooling, emit, has_probabilities=self._has_probabilities)

    def _pairs(self, query: str, n_ctx: int) -> Pairs | TemplatedPairs:
        if self._template:
            return TemplatedPairs(self._template, query, self._tokenizer, n_ctx)
        return Pairs(query, self._tokenizer, n_ctx, self._separator)


def checked_n_ctx(request: EmbeddingRequest, n_ctx: int) -> int:
    """How many tokens an input may have. Errors: BadRequest."""
    if not request.inputs:
        raise BadRequest("there is no input")
    if request.n_ctx < 0:
        raise BadRequest(f"n_ctx must not be negative: {request.n_ctx}")
    return min(request.n_ctx or n_ctx, n_ctx)


def no_ranking() -> UnsupportedModel:
    return UnsupportedModel("this model does not support ranking: its file has no rank head")


def no_embeddings() -> UnsupportedModel:
    return UnsupportedModel("this model does not support embeddings")


def take(waiting: deque[EmbeddingJob]) -> EmbeddedText:
    """The next to be computed. A job gives one text and goes to the end of the queue with the rest."""
    job = waiting.popleft()
    text = job.take_text()
    if job.n_left:
        waiting.append(job)
    return text
