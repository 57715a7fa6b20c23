"""The grammar and the bounds of thinking for what follows one prompt, as the runner takes them."""

from __future__ import annotations

from puna.prompt import harmony
from puna.prompt.output_format import OutputFormat
from puna.prompt.thinking import Tags
from puna.server.prompting.plan import PromptPlan
from puna.wire import Grammar, Thinking


def grammar_for(plan: PromptPlan, prompt: str) -> Grammar | None:
    request, output = plan.request, plan.output
    may_think = output.format is not None and output.has_thinking and request.think and not output.is_final_message
    return with_thinking(
        request.grammar, output.format.tags if output.format and may_think else None, prompt, output.answer_prefix
    )


def thinking_for(plan: PromptPlan, prompt: str) -> Thinking | None:
    output = plan.output
    if output.format is None or not output.has_thinking or output.is_final_message:
        return None
    return thinking_of(output.format, prompt, plan.request.options.think_budget, output.answer_prefix)


def with_thinking(grammar: Grammar | None, tags: Tags | None, prompt: str, answer_prefix: str = "") -> Grammar | None:
    """The grammar for what follows a prompt, where the model may think between *tags* before it answers.

    *answer_prefix*: what the prompt holds of the answer already.
    """
    if grammar is None or tags is None:
        return grammar
    begin = "" if tags.are_open_in(prompt, answer_prefix) else tags.begin
    return Grammar(kind=grammar.kind, text=grammar.text, thinking_begin=begin, thinking_end=tags.end)


def thinking_of(output: OutputFormat, prompt: str, budget: int, answer_prefix: str = "") -> Thinking:
    """How a model of this format marks its thinking in what follows a prompt, and how many tokens it may have."""
    if output.is_harmony:
        begin, end, ending = harmony.THINKING_BEGIN, harmony.THINKING_END, harmony.TO_ANSWER
        return Thinking(begin=begin, end=end, ending=ending, repeats=True, budget=budget)
    tags = output.tags
    return Thinking(begin=tags.begin, end=tags.end, is_open=tags.are_open_in(prompt, answer_prefix), budget=budget)
