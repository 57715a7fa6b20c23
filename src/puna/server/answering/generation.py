"""One answer of a model, from the request's options to the last message of the runner; the APIs put it in their shapes.

Knows the scheduler, the runner's messages and how a conversation is cut to the context; no HTTP.

Source: Ollama's REST API; product description "Truncation to context".
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field, replace
from typing import TypeVar

from puna import wire
from puna.api.options import Options
from puna.llm.load import WantedLoad
from puna.llm.runner import Runner, error_from
from puna.prompt.output import Parser, Part
from puna.server.answering.interleaved import interleaved
from puna.server.http import request_id
from puna.server.metrics import Generation, Metrics
from puna.server.placing.loaded import Loaded
from puna.server.placing.scheduler import Scheduler
from puna.store.models.model import StoredModel

T = TypeVar("T")
MakePrompt = Callable[["Room"], Awaitable["Prompt"]]
MakeParser = Callable[[str], Parser | None]
MakeGrammar = Callable[[str], wire.Grammar | None]
MakeThoughts = Callable[[str], wire.Thoughts | None]

_SPECIAL_TOKENS = 4  # that a tokenizer may add around a text
_RANDOM = -1  # as a seed
_INT64 = 1 << 63
_MAX_CONTEXTS = 10  # an answer without a limit of its own ends after so many contexts' worth of tokens

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Room:
    """What a prompt is made for: the runner that counts tokens, and how many of them one request may have."""

    runner: Runner
    n_ctx: int

    @classmethod
    def of(cls, loaded: Loaded, wanted: WantedLoad) -> Room:
        return cls(loaded.runner, wanted.n_ctx_in(loaded.n_ctx))


@dataclass(frozen=True)
class Prompt:
    """What the model reads, and what of the conversation is not in it."""

    text: str
    n_messages_cut: int = 0
    n_tokens_cut: int = 0  # of those messages; of so many that not even their tokens were counted, at least so many
    warnings: list[str] = field(default_factory=list)  # what else of the request is not in it


@dataclass(frozen=True)
class Job:
    """Everything that is known before a model is loaded."""

    model: StoredModel
    options: Options
    wanted: WantedLoad
    make_prompt: MakePrompt
    metrics: Metrics
    keep_alive: float | None = None
    context: list[int] = field(default_factory=list)
    truncate: bool = True
    shift: bool = True
    return_tokens: bool = False
    salt: str = ""  # of the caller's key, if prompts of different keys are kept apart
    make_parser: MakeParser = lambda _: None  # for the output that follows a prompt
    make_grammar: MakeGrammar = lambda _: None  # for the same
    make_thoughts: MakeThoughts = lambda _: None  # for the same
    logprobs: bool = False
    top_logprobs: int = 0
    show_control_tokens: bool = False  # the parser needs them
    warnings: Sequence[str] = ()  # what of the request has no effect
    began_ns: int = field(default_factory=time.monotonic_ns)


@dataclass(frozen=True)
class Finished:
    """What came of a job, with durations in nanoseconds from its beginning."""

    done: wire.Done
    load_ns: int
    total_ns: int
    truncated_messages: int = 0  # that did not fit the context
    truncated_tokens: int = 0  # of them and of the rest of the prompt
    warnings: list[str] = field(default_factory=list)  # what of the request had no effect on the answer


@dataclass(frozen=True)
class Logprobs:
    """Those of tokens whose text, or the beginning of it, comes next; it may have come already, or be no part of the answer."""

    entries: list[wire.TokenLogprob]


ScoredPart = Part | Logprobs | Finished
Parts = AsyncGenerator[Part | Finished, None]
ScoredParts = AsyncGenerator[ScoredPart, None]
Choices = AsyncGenerator[tuple[int, ScoredPart], None]


async def run(scheduler: Scheduler, job: Job) -> Parts:
    """Thoughts, text and tool calls, then exactly one Finished. Closing the generator cancels the work wherever it is.

    Errors: what loading raises; RunnerDied; what the runner reports, as the error of its status.
    """
    async with aclosing(run_scored(scheduler, job)) as parts:
        async for part in parts:
            if not isinstance(part, Logprobs):
                yield part


async def run_scored(scheduler: Scheduler, job: Job) -> ScoredParts:
    """The same, with logprobs if the job asks for them."""
    async with aclosing(run_choices(scheduler, job, 1)) as choices:
        async for _, part in choices:
            yield part


async def run_choices(scheduler: Scheduler, job: Job, n: int) -> Choices:
    """So many answers to one prompt, their parts with the answers' numbers as they come; each ends with its own Finished.

    The prompt is made once, and computed once: the runner has the others wait for the first of several prompts that are
    alike, and copies what it has computed. An error of one answer ends all.
    """
    with ExitStack() as followed:
        seen = [followed.enter_context(job.metrics.generation(job.model, job.began_ns)) for _ in range(n)]
        async with scheduler.acquire(job.model, job.wanted, job.keep_alive) as loaded:
            for generation in seen:
                generation.placed()
            load_ns = time.monotonic_ns() - job.began_ns
            room = Room.of(loaded, job.wanted)
            prompt = await job.make_prompt(room)
            for warning in prompt.warnings:
                log.warning("%s: %s", job.model.name, warning)
            answers = [_answer(_seeded(job, i), prompt, room, load_ns, generation) for i, generation in enumerate(seen)]
            async with aclosing(interleaved(answers)) as parts:
                async for numbered in parts:
                    yield numbered


def _seeded(job: Job, number: int) -> Job:
    """Answers to the same prompt differ, also where a seed is given."""
    seed = job.options.seed
    if seed == _RANDOM or not number:
        return job
    following = (seed + number + (seed < _RANDOM <= seed + number) + _INT64) % (2 * _INT64) - _INT64
    return replace(job, options=replace(job.options, seed=following))


async def _answer(job: Job, prompt: Prompt, room: Room, load_ns: int, seen: Generation) -> ScoredParts:
    parser = job.make_parser(prompt.text)
    async with aclosing(room.runner.complete(completion_request(job, prompt.text, room.n_ctx))) as replies:
        async for reply in replies:
            if isinstance(reply, wire.Piece):
                seen.piece()
                if reply.logprobs:
                    yield Logprobs(reply.logprobs)
                for part in parser.feed(reply.content) if parser else (reply.content,):
                    yield part
            elif isinstance(reply, wire.Failed):
                raise error_from(reply)
            else:
                for part in parser.finish() if parser else ():
                    yield part
                seen.done(reply)
                n_tokens_cut = prompt.n_tokens_cut + reply.truncated_count
                if n_tokens_cut or prompt.n_messages_cut:
                    _log_cut(prompt.n_messages_cut, n_tokens_cut, room.n_ctx)
                total_ns = time.monotonic_ns() - job.began_ns
                warnings = [*job.warnings, *prompt.warnings]
                yield Finished(reply, load_ns, total_ns, prompt.n_messages_cut, n_tokens_cut, warnings)


def _log_cut(n_messages: int, n_tokens: int, n_ctx: int) -> None:
    log.warning(
        "the prompt did not fit the context of %d tokens: %d messages were left out, at least %d tokens in all",
        *(n_ctx, n_messages, n_tokens),
    )


def completion_request(job: Job, prompt: str, n_ctx: int) -> wire.CompletionRequest:
    """*n_ctx* is what the request may have, not what the runner has."""
    options = job.options
    limit = _MAX_CONTEXTS * n_ctx
    fills = options.num_predict == wire.FILL_CONTEXT
    sampling = {name: getattr(options, name) for name in wire.SamplingOptions.__struct_fields__}
    return wire.CompletionRequest(
        prompt=prompt,
        context=job.context,
        sampling=wire.SamplingOptions(**sampling),
        n_ctx=n_ctx,
        n_predict=options.num_predict if 0 <= options.num_predict <= limit or fills else limit,
        n_keep=options.num_keep,
        min_tokens=options.min_tokens,
        stop=options.stop,
        ignore_eos=options.ignore_eos,
        grammar=job.make_grammar(prompt),
        thoughts=job.make_thoughts(prompt),
        logprobs=job.logprobs,
        top_logprobs=job.top_logprobs,
        truncate=job.truncate,
        shift=job.shift,
        return_tokens=job.return_tokens,
        show_control_tokens=job.show_control_tokens,
        salt=job.salt,
        request_id=request_id.current(),
    )


async def fit(
    messages: Sequence[T], is_system: Callable[[T], bool], render: Callable[[list[T]], Awaitable[str]], room: Room
) -> Prompt:
    """The prompt of the longest end of a conversation that fits the context, system messages and the last one kept.

    Each step of the search renders and counts once; that a shorter conversation never has more tokens makes it a bisection.
    """

    def kept(begin: int) -> list[T]:
        return [message for number, message in enumerate(messages) if number >= begin or is_system(message)]

    if all(map(is_system, messages[:-1])):
        return Prompt(await render(list(messages)))  # nothing may be left out, so there is nothing to count

    n_most = 0  # tokens of the longest that was tried and does not fit

    async def rendered(begin: int) -> str:
        """The prompt from that message on; empty when it does not fit."""
        nonlocal n_most
        text = await render(kept(begin))
        if len(text.encode()) + _SPECIAL_TOKENS <= room.n_ctx:  # a token is a byte at least
            return text
        n = len(await room.runner.tokenize(text))
        n_most = max(n_most, n)
        return text if n <= room.n_ctx else ""

    # A message is a token at least: of more messages than that the first cannot be kept, however many were sent.
    first = max(0, len(messages) - room.n_ctx)
    if first == 0 and (text := await rendered(0)):
        return Prompt(text)
    low, high, best = max(1, first), len(messages) - 1, ""
    while low < high:
        middle = (low + high) // 2
        if text := await rendered(middle):
            high, best = middle, text
        else:
            low = middle + 1
    best = best or await render(kept(high))
    n_tokens_cut = n_most - len(await room.runner.tokenize(best)) if n_most > room.n_ctx else 0
    return Prompt(best, len(messages) - len(kept(high)), n_tokens_cut)
