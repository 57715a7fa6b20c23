"""Choose how a model's prompts are made: a renderer by name, a Go template, a Jinja template, or a built-in form.

A request for a prompt is plain data, so that it can be rendered in another process: templates come with models and with
requests, and none may hold the server up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from puna.errors import BadRequest, TemplateError
from puna.prompt import go_chat, harmony, jinja
from puna.prompt.chat import CHATML, PLAIN, joined_images, render_chat
from puna.prompt.ending import Ending, Message, continued
from puna.prompt.exchange import PromptRequest, Rendered, Source, Think, Tool
from puna.prompt.families.registry import FAMILIES
from puna.prompt.thinking import tags_in


def render(request: PromptRequest) -> Rendered:
    """Errors: TemplateError when the template is malformed or fails; BadRequest for what it has no place for."""
    renderer = _renderer(request.source)
    if request.suffix:
        return Rendered(renderer.infill(request.prefix, request.suffix, request.think))
    return renderer.chat(request.messages, request.tools, request.think, request.ending)


class Renderer(Protocol):
    """Makes prompts for one model."""

    def chat(self, messages: Sequence[Message], tools: Sequence[Tool], think: Think, ending: Ending) -> Rendered: ...

    def infill(self, prefix: str, suffix: str, think: Think) -> str: ...


@functools.lru_cache(maxsize=64)
def _renderer(source: Source) -> Renderer:
    """Errors: TemplateError naming the line; BadRequest for a renderer that is not known."""
    if source.renderer:
        return FamilyRenderer(source.renderer)
    if source.go_template:
        return GoRenderer(source.go_template)
    builtin = CHATML if source.has_im_start else PLAIN
    return JinjaRenderer(source.jinja_template or builtin, source.bos, source.eos)


class FamilyRenderer:
    """Code of Puna's own for one family of models."""

    def __init__(self, name: str) -> None:
        if name not in FAMILIES:
            raise BadRequest(f'unknown renderer "{name}"; there are {", ".join(FAMILIES)}')
        self._name = name

    def chat(self, messages: Sequence[Message], tools: Sequence[Tool], think: Think, ending: Ending) -> Rendered:
        return Rendered(FAMILIES[self._name].render(joined_images(messages), tools, think, ending))

    def infill(self, prefix: str, suffix: str, think: Think) -> str:
        raise BadRequest(f"this model does not support insert: the renderer {self._name} has no place for a suffix")


class GoRenderer:
    def __init__(self, source: str) -> None:
        self._template = go_chat.parse(source)
        self._tags = tags_in(source, "")

    def chat(self, messages: Sequence[Message], tools: Sequence[Tool], think: Think, ending: Ending) -> Rendered:
        if ending is Ending.NOTHING:
            raise BadRequest("add_generation_prompt: a template in Go's language always ends where the model goes on")
        return _without_tools_if_they_fail(lambda given: self._ended(messages, given, think, ending), tools)

    def _ended(self, messages: Sequence[Message], tools: Sequence[Tool], think: Think, ending: Ending) -> str:
        def rendered(turns: Sequence[Message]) -> str:
            return go_chat.render_messages(self._template, turns, tools or None, think)

        prompt = rendered(messages)
        text = str(messages[-1].get("content") or "") if messages and messages[-1].get("role") == "assistant" else ""
        is_open = bool(text) and prompt.endswith(text)  # many such templates leave the last answer open by themselves
        if ending is Ending.CONTINUE:
            return prompt if is_open else continued(messages, self._tags, lambda turns, _: rendered(turns))
        if is_open and not messages[-1].get("tool_calls"):
            raise BadRequest("add_generation_prompt: this model's template continues the last answer")
        return prompt

    def infill(self, prefix: str, suffix: str, think: Think) -> str:
        if not self._template.mentions("Suffix"):
            raise BadRequest("this model does not support insert: its template has no place for a suffix")
        return go_chat.render_infill(self._template, prefix, suffix, think)


class JinjaRenderer:
    def __init__(self, source: str, bos: str, eos: str) -> None:
        jinja.check(source)
        self._source = source
        self._bos = bos
        self._eos = eos
        self._tags = harmony.TAGS if harmony.is_harmony(source) else tags_in("", source)

    def chat(self, messages: Sequence[Message], tools: Sequence[Tool], think: Think, ending: Ending) -> Rendered:
        variables: dict[str, Any] = {}
        if think is not None:  # families disagree on the name: Qwen says enable_thinking, DeepSeek and Granite thinking
            variables = {"enable_thinking": bool(think), "thinking": bool(think)}
        if isinstance(think, str):
            variables["reasoning_effort"] = think

        def rendered(given: Sequence[Tool]) -> str:
            def one(turns: Sequence[Message], end: Ending) -> str:
                begins = end is Ending.ANSWER
                return render_chat(
                    self._source,
                    turns,
                    bos_token=self._bos,
                    eos_token=self._eos,
                    tools=given,
                    add_generation_prompt=begins,
                    **variables,
                )

            return continued(messages, self._tags, one) if ending is Ending.CONTINUE else one(messages, ending)

        return _without_tools_if_they_fail(rendered, tools)

    def infill(self, prefix: str, suffix: str, think: Think) -> str:
        raise BadRequest("this model does not support insert: a chat template has no place for a suffix")


def _without_tools_if_they_fail(rendered: Callable[[Sequence[Tool]], str], tools: Sequence[Tool]) -> Rendered:
    """A template that fails on tools may do without them, but not without saying so."""
    try:
        return Rendered(rendered(tools))
    except TemplateError as error:
        if not tools:
            raise
        try:
            return Rendered(rendered(()), [f"the model does not know of the tools, on which its template fails: {error}"])
        except TemplateError:
            raise error from None
