"""Completions: what a model is asked for that gives logits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from puna.runner.images.sight import Sight
from puna.runner.scheduling.admission import Room, next_to_start
from puna.runner.scheduling.task import Part
from puna.runner.scheduling.workload import Rows, Workload
from puna.runner.step.sampling import has_number, sample
from puna.runner.tasks.completion import Completion
from puna.runner.tasks.pooling import no_embeddings, no_ranking
from puna.runner.tasks.seeing import Seeing
from puna.sample.transforms import Floats
from puna.tokenizer.tokenizer import Tokenizer
from puna.wire import CompletionReply, CompletionRequest, EmbeddingReply, EmbeddingRequest, Failed, ImagesRequest


class Generation(Workload[Completion, Completion]):
    streams = True
    takes_whole_texts = False

    def __init__(self, tokenizer: Tokenizer, n_ctx: int, sight: Sight | None = None, blindness: str = "") -> None:
        """*sight* and *blindness* as Seeing has them."""
        self._tokenizer = tokenizer
        self._n_ctx = n_ctx
        self._seeing = Seeing(n_ctx, sight, blindness)

    def complete(self, request: CompletionRequest, emit: Callable[[CompletionReply], None]) -> Completion:
        seen = self._seeing.take(request.images, request.salt, request.n_ctx)
        try:
            return Completion(request, self._tokenizer, self._n_ctx, emit, seen)
        except BaseException:
            seen.give_back()
            raise

    def image_tokens(self, request: ImagesRequest) -> list[int]:
        return self._seeing.n_tokens(request)

    def embed(self, request: EmbeddingRequest, emit: Callable[[EmbeddingReply | Failed], None]) -> Completion:
        raise no_embeddings() if request.query is None else no_ranking()

    def prompts(self, waiting: Sequence[Completion]) -> list[list[int]]:
        return [completion.tokens for completion in waiting]

    def start_next(self, waiting: deque[Completion], running: Sequence[Completion], room: Room) -> Completion | None:
        completion = next_to_start(waiting, running, room.slots)
        if completion is None or not room.has_room(completion):
            return None
        waiting.remove(completion)
        return completion

    def accept(self, parts: Sequence[Part[Completion]], outputs: Sequence[Rows]) -> None:
        """Sample a token for each whose tokens have all been computed."""
        finishing: list[Completion] = []
        logits: list[Floats] = []
        for (completion, _, n_tokens), rows in zip(parts, outputs, strict=True):
            completion.n_computed += n_tokens
            row = rows[-1]
            if not has_number(row):
                # What this step computed is never seen again: nobody has copied it yet, and the slot is emptied with it.
                completion.n_computed = 0
                completion.fail(completion.sampler.no_token())
            elif completion.n_computed == len(completion.tokens):
                finishing.append(completion)
                logits.append(row)
        sample(logits, finishing)
