"""What an answer must look like: from a request's fields to the grammar that the runner compiles, and the limits of thought.

Knows no grammar from inside; whether one can be followed, the runner says.
"""

from __future__ import annotations

import json
from typing import Any

from puna.api.generate import ChatRequest, GenerateRequest
from puna.errors import BadRequest, PunaError
from puna.prompt import harmony
from puna.prompt.output_format import OutputFormat
from puna.prompt.thinking import Tags
from puna.prompt.tools.forced import call_schema
from puna.wire import Grammar, Thoughts


def grammar_of(request: ChatRequest | GenerateRequest) -> Grammar | None:
    """Errors: PunaError for a format that is neither "json" nor a schema; BadRequest for more than one wish."""
    wishes = [grammar for grammar in (_of_format(request), _regex(request), _lark(request)) if grammar is not None]
    if len(wishes) > 1:
        raise BadRequest("an answer can follow only one of format, regex and lark")
    return wishes[0] if wishes else None


def forcing(native: dict[str, Any], forced_tool: str | None) -> dict[str, Any]:
    """A native request whose answer must be a call of that tool, where one is named (see puna.prompt.tools.forced).

    Errors: ValueError when there is no such tool.
    """
    return native if forced_tool is None else {**native, "format": call_schema(native["tools"], forced_tool)}


def _of_format(request: ChatRequest | GenerateRequest) -> Grammar | None:
    value = request.format
    if value is None or value == "":
        return None
    if value == "json":
        return Grammar(kind="json")
    if isinstance(value, dict):
        return Grammar(kind="json_schema", text=json.dumps(value))
    raise PunaError(f'invalid format: {json.dumps(value)[:200]}; expected "json" or a valid JSON Schema object')


def _regex(request: ChatRequest | GenerateRequest) -> Grammar | None:
    return Grammar(kind="regex", text=request.regex) if request.regex else None


def _lark(request: ChatRequest | GenerateRequest) -> Grammar | None:
    return Grammar(kind="lark", text=request.lark) if request.lark else None


def with_thoughts(grammar: Grammar | None, tags: Tags | None, prompt: str, begun: str = "") -> Grammar | None:
    """The grammar for what follows a prompt, where the model may think between *tags* before it answers.

    *begun*: what the prompt holds of the answer already.
    """
    if grammar is None or tags is None:
        return grammar
    begin = "" if tags.are_open_in(prompt, begun) else tags.begin
    return Grammar(kind=grammar.kind, text=grammar.text, thought_begin=begin, thought_end=tags.end)


def thoughts_of(output: OutputFormat, prompt: str, budget: int, begun: str = "") -> Thoughts:
    """How a model of this format marks its thoughts in what follows a prompt, and how many tokens of them it may write."""
    if output.is_harmony:
        begin, end, ending = harmony.THOUGHT_BEGIN, harmony.THOUGHT_END, harmony.TO_ANSWER
        return Thoughts(begin=begin, end=end, ending=ending, repeats=True, budget=budget)
    tags = output.tags
    return Thoughts(begin=tags.begin, end=tags.end, is_open=tags.are_open_in(prompt, begun), budget=budget)
