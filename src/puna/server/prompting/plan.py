"""What the model is to be given and how its output is to be read: all about a prompt but its text.

The text is rendered when there is a runner, since that alone can count how much of a conversation fits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from puna import wire
from puna.api.generate import ChatRequest, GenerateRequest
from puna.prompt.ending import Ending, answer_prefix_of, ending_of
from puna.prompt.exchange import PromptRequest
from puna.prompt.output_format import OutputFormat
from puna.server.checking.check import CheckedRequest
from puna.server.prompting.images import PlacedImages
from puna.server.prompting.template import continues_texts, output_format, source_of
from puna.server.prompting.turns import Turn, assemble, said, turn_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Output:
    """How what follows the prompt is to be read."""

    format: OutputFormat | None = None  # None: as it comes
    answer_prefix: str = ""  # what the prompt holds of the answer already
    tools: Sequence[dict[str, Any]] = ()
    has_thinking: bool = False  # the model may think before it answers
    is_final_message: bool = False  # of the harmony format, begun for a grammar that is about what follows its header


@dataclass(frozen=True)
class PromptPlan:
    request: CheckedRequest
    content: str | PromptRequest  # the text itself, or what it is rendered from
    output: Output
    is_cut_to_fit: bool = False  # a conversation that is too long loses its oldest messages
    context: list[int] = field(default_factory=list)  # tokens before the prompt
    returns_tokens: bool = False
    images: Sequence[wire.Image] = ()  # what stands for them in the content
    warnings: list[str] = field(default_factory=list)  # what of the request has no effect

    @property
    def has_foreign_template(self) -> bool:
        """Whether others wrote what makes the prompt."""
        return isinstance(self.content, PromptRequest) and not self.content.source.is_own


async def plan(request: CheckedRequest) -> PromptPlan:
    """Errors: BadRequest for a conversation that cannot end as the request says."""
    native = request.native
    made = await (_of_chat(request, native) if isinstance(native, ChatRequest) else _of_generate(request, native))
    warnings = request.warnings
    if "think_budget" in native.options and not made.output.has_thinking:
        warnings = [*warnings, 'option "think_budget" has no effect: the model does not think']
    for warning in warnings:
        log.warning("%s", warning)
    return replace(made, warnings=warnings)


async def _of_chat(request: CheckedRequest, native: ChatRequest) -> PromptPlan:
    placed = PlacedImages()
    turns = assemble(request.model, [turn_of(message, placed) for message in native.messages])
    ending = ending_of(
        turns, add_generation_prompt=native.add_generation_prompt, continue_final_message=native.continue_final_message
    )
    source = await asyncio.to_thread(source_of, request.model)
    return PromptPlan(
        request,
        PromptRequest(source, turns, native.tools, request.think, ending),
        _output(request, output_format(request.model), turns, ending, native.tools),
        is_cut_to_fit=native.truncate,
        images=placed.images,
    )


async def _of_generate(request: CheckedRequest, native: GenerateRequest) -> PromptPlan:
    placed = PlacedImages()
    if request.is_raw:
        prompt = placed.in_raw(native.prompt, native.images)
        return PromptPlan(request, prompt, Output(), context=native.context, images=placed.images)
    return PromptPlan(
        request,
        await asyncio.to_thread(_content, request, native, placed),
        _output(request, output_format(request.model, native.template)),
        is_cut_to_fit=native.truncate and not native.template,
        context=native.context,
        returns_tokens=True,
        images=placed.images,
    )


def _content(request: CheckedRequest, native: GenerateRequest, placed: PlacedImages) -> str | PromptRequest:
    model = request.model
    if native.suffix:
        source = source_of(model, native.template)
        return PromptRequest(source, think=request.think, prefix=native.prompt, suffix=native.suffix)
    turn = said("user", native.prompt, native.images, placed)
    if not (native.template or model.messages) and continues_texts(model):
        return "\n\n".join(text for text in (native.system or model.system, turn["content"]) if text)
    source = source_of(model, native.template)
    turns = assemble(model, [turn], native.system, with_messages=not native.context)
    return PromptRequest(source, turns, think=request.think)


def _output(
    request: CheckedRequest,
    written: OutputFormat,
    turns: Sequence[Turn] = (),
    ending: Ending = Ending.ANSWER,
    tools: Sequence[dict[str, Any]] = (),
) -> Output:
    answer_prefix = answer_prefix_of(turns, ending, written.tags)
    may_think = not answer_prefix or written.tags.are_open_in("", answer_prefix)
    return Output(
        written,
        answer_prefix,
        tools,
        has_thinking=may_think and (bool(request.think) or written.is_harmony),
        is_final_message=written.is_harmony and request.grammar is not None,
    )
