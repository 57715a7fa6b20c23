"""One answer of a model, from the request's options to the last message of the runner; the APIs put it in their shapes.

Knows the scheduler, the runner's messages and how a conversation is cut to the context; no HTTP.

Source: Ollama's REST API; product description "Truncation to context".
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeVar

from puna import wire
from puna.api.options import Options
from puna.llm.load import WantedLoad
from puna.llm.runner import Runner, error_from
from puna.prompt.output import Parser, Part
from puna.server import request_id
from puna.server.loaded import Loaded
from puna.server.metrics import Generation, Metrics
from puna.server.scheduler import Scheduler
from puna.store.model import StoredModel

T = TypeVar("T")
MakePrompt = Callable[[Loaded], Awaitable[str]]
MakeParser = Callable[[str], Parser | None]
MakeGrammar = Callable[[str], wire.Grammar | None]
MakeThoughts = Callable[[str], wire.Thoughts | None]

_SPECIAL_TOKENS = 4  # that a tokenizer may add around a text
_MAX_CONTEXTS = 10  # an answer without a limit of its own ends after so many contexts' worth of tokens


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
    make_parser: MakeParser = lambda _: None  # for the output that follows a prompt
    make_grammar: MakeGrammar = lambda _: None  # for the same
    make_thoughts: MakeThoughts = lambda _: None  # for the same
    logprobs: bool = False
    top_logprobs: int = 0
    show_control_tokens: bool = False  # the parser needs them
    began_ns: int = field(default_factory=time.monotonic_ns)


@dataclass(frozen=True)
class Finished:
    """What came of a job, with durations in nanoseconds from its beginning."""

    done: wire.Done
    load_ns: int
    total_ns: int


@dataclass(frozen=True)
class Logprobs:
    """Those of tokens whose text, or the beginning of it, comes next; it may have come already, or be no part of the answer."""

    entries: list[wire.TokenLogprob]


Parts = AsyncGenerator[Part | Finished, None]
ScoredParts = AsyncGenerator[Part | Logprobs | Finished, None]


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
    with job.metrics.generation(job.model, job.began_ns) as seen:
        async with (
            scheduler.acquire(job.model, job.wanted, job.keep_alive) as loaded,
            aclosing(_parts(loaded, job, seen)) as parts,
        ):
            async for part in parts:
                yield part


async def _parts(loaded: Loaded, job: Job, seen: Generation) -> ScoredParts:
    seen.placed()
    load_ns = time.monotonic_ns() - job.began_ns
    prompt = await job.make_prompt(loaded)
    parser = job.make_parser(prompt)
    async with aclosing(loaded.runner.complete(completion_request(job, prompt, loaded.n_ctx))) as replies:
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
                yield Finished(reply, load_ns, time.monotonic_ns() - job.began_ns)


def completion_request(job: Job, prompt: str, n_ctx: int) -> wire.CompletionRequest:
    options = job.options
    limit = _MAX_CONTEXTS * n_ctx
    sampling = {name: getattr(options, name) for name in wire.SamplingOptions.__struct_fields__}
    return wire.CompletionRequest(
        prompt=prompt,
        context=job.context,
        sampling=wire.SamplingOptions(**sampling),
        n_predict=options.num_predict if 0 <= options.num_predict <= limit else limit,
        n_keep=options.num_keep,
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
        request_id=request_id.current(),
    )


async def fit(
    messages: Sequence[T], is_system: Callable[[T], bool], render: Callable[[list[T]], Awaitable[str]], runner: Runner, n_ctx: int
) -> str:
    """The prompt of the longest end of a conversation that fits the context, system messages and the last one kept.

    Each step of the search renders and counts once; that a shorter conversation never has more tokens makes it a bisection.
    """

    def kept(begin: int) -> list[T]:
        return [message for number, message in enumerate(messages) if number >= begin or is_system(message)]

    if all(map(is_system, messages[:-1])):
        return await render(list(messages))  # nothing may be left out, so there is nothing to count

    # A message is a token at least: of more messages than that the first cannot be kept, however many were sent.
    first = max(0, len(messages) - n_ctx)
    if first == 0:
        prompt = await render(kept(0))
        if await _fits(prompt, runner, n_ctx):
            return prompt
    low, high, best = max(1, first), len(messages) - 1, ""
    while low < high:
        middle = (low + high) // 2
        prompt = await render(kept(middle))
        if await _fits(prompt, runner, n_ctx):
            high, best = middle, prompt
        else:
            low = middle + 1
    return best if best and low == high else await render(kept(max(0, len(messages) - 1)))


async def _fits(prompt: str, runner: Runner, n_ctx: int) -> bool:
    if len(prompt.encode()) + _SPECIAL_TOKENS <= n_ctx:  # a token is a byte at least
        return True
    return len(await runner.tokenize(prompt)) <= n_ctx
