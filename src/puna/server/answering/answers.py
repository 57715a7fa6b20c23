"""The answers of a model that has a place, from the runner's messages to the parts that the APIs put in their shapes."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import aclosing

from puna import wire
from puna.llm.runner import error_from
from puna.prompt.output import Parser
from puna.server.answering.completion import completion_request
from puna.server.answering.fitting import Prompt
from puna.server.answering.interleaved import interleaved
from puna.server.answering.parts import Choices, Finished, Logprobs, Parts
from puna.server.metrics import Generation

log = logging.getLogger(__name__)


def answers(prompt: Prompt, generations: Sequence[Generation]) -> Choices:
    """As many answers to the prompt as there are *generations* to measure, their parts with the answers' numbers as they come.

    Each ends with its own Finished. The prompt is computed once: the runner has the others wait for the first of several
    prompts that are alike, and copies what it has computed. An error of one answer ends all.

    Errors: RunnerDied; what the runner reports, as the error of its status.
    """
    for warning in prompt.warnings:
        log.warning("%s: %s", prompt.plan.request.model.name, warning)
    return interleaved([_answer(prompt, number, generation) for number, generation in enumerate(generations)])


async def _answer(prompt: Prompt, number: int, generation: Generation) -> Parts:
    """Thinking, text and tool calls, with logprobs if the request asks for them, then exactly one Finished."""
    parser = _parser(prompt)
    async with aclosing(prompt.place.runner.complete(completion_request(prompt, number))) as replies:
        async for reply in replies:
            if isinstance(reply, wire.Piece):
                generation.piece()
                if reply.logprobs:
                    yield Logprobs(reply.logprobs)
                for part in parser.feed(reply.content) if parser else (reply.content,):
                    yield part
            elif isinstance(reply, wire.Failed):
                raise error_from(reply)
            else:
                for part in parser.finish() if parser else ():
                    yield part
                generation.done(reply)
                yield _finished(prompt, reply)


def _parser(prompt: Prompt) -> Parser | None:
    """None where there is nothing to tell apart."""
    output, think = prompt.plan.output, bool(prompt.plan.request.think)
    if output.format is None:
        return None
    return output.format.parser(prompt.text, think=think, tools=output.tools, answer_prefix=output.answer_prefix)


def _finished(prompt: Prompt, done: wire.Done) -> Finished:
    place, plan, n_messages_cut = prompt.place, prompt.plan, prompt.fitted.n_messages_cut
    n_tokens_cut = prompt.fitted.n_tokens_cut + done.truncated_count
    if n_tokens_cut or n_messages_cut:
        log.warning(
            "the prompt did not fit the context of %d tokens: %d messages were left out, at least %d tokens in all",
            *(place.n_ctx, n_messages_cut, n_tokens_cut),
        )
    total_ns = time.monotonic_ns() - plan.request.caller.began_ns
    warnings = [*plan.warnings, *prompt.warnings]
    return Finished(done, place.load_ns, total_ns, n_messages_cut, n_tokens_cut, warnings)
