"""Choose how a model's prompts are made: a Go template where there is one, else Jinja, else a built-in form.

The server asks for text and never needs to know which language made it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from puna.errors import BadRequest
from puna.prompt import go_chat, jinja
from puna.prompt.chat import CHATML, PLAIN, render_chat

Message = Mapping[str, Any]
Tool = Mapping[str, Any]
Think = bool | str | None


class Renderer(Protocol):
    """Makes prompts for one model."""

    @property
    def capabilities(self) -> frozenset[str]:
        """What the template can express, of ``tools``, ``insert`` and ``thinking``."""
        ...

    def chat(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, think: Think = None) -> str:
        """The prompt that lets the model answer a conversation.

        Errors: TemplateError when the template fails on it.
        """
        ...

    def generate(self, prompt: str, system: str, suffix: str | None = None, think: Think = None) -> str:
        """The prompt for one instruction, or with *suffix* for the text between *prompt* and *suffix*.

        Errors: TemplateError when the template fails; BadRequest for a suffix that the template has no place for.
        """
        ...


class GoRenderer:
    def __init__(self, source: str) -> None:
        self._template = go_chat.parse(source)

    @property
    def capabilities(self) -> frozenset[str]:
        mentioned = {"tools": "Tools", "insert": "Suffix", "thinking": "Thinking"}
        return frozenset(name for name, field in mentioned.items() if self._template.mentions(field))

    def chat(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, think: Think = None) -> str:
        return go_chat.render_messages(self._template, messages, tools, think)

    def generate(self, prompt: str, system: str, suffix: str | None = None, think: Think = None) -> str:
        if not suffix:
            return self.chat(_instruction(prompt, system), None, think)
        if not self._template.mentions("Suffix"):
            raise BadRequest("this model does not support insert: its template has no place for a suffix")
        return go_chat.render_infill(self._template, prompt, suffix, think)


class JinjaRenderer:
    """*bos* and *eos* are the texts of those tokens, as the template prints them."""

    def __init__(self, source: str, bos: str, eos: str) -> None:
        jinja.check(source)
        self._source = source
        self._bos = bos
        self._eos = eos

    @property
    def capabilities(self) -> frozenset[str]:
        found = {"tools": r"\btools\b", "thinking": r"<think>|\benable_thinking\b|\breasoning_content\b"}
        return frozenset(name for name, pattern in found.items() if re.search(pattern, self._source))

    def chat(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, think: Think = None) -> str:
        variables: dict[str, Any] = {}
        if think is not None:  # families disagree on the name: Qwen says enable_thinking, DeepSeek and Granite thinking
            variables = {"enable_thinking": bool(think), "thinking": bool(think)}
        if isinstance(think, str):
            variables["reasoning_effort"] = think
        return render_chat(self._source, messages, bos_token=self._bos, eos_token=self._eos, tools=tools, **variables)

    def generate(self, prompt: str, system: str, suffix: str | None = None, think: Think = None) -> str:
        if suffix:
            raise BadRequest("this model does not support insert: a chat template has no place for a suffix")
        return self.chat(_instruction(prompt, system), None, think)


def _instruction(prompt: str, system: str) -> list[Message]:
    before: list[Message] = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": prompt}]


def make_renderer(go_template: str | None, jinja_template: str | None, bos: str, eos: str, has_im_start: bool) -> Renderer:
    """The renderer for a model, from the template of its layers or of the request, and that of its file.

    Without either it is ChatML where the vocabulary has ``<|im_start|>``, else ``role: content`` (see ``chat.PLAIN``).
    Errors: TemplateError naming the line, for a template that is malformed.
    """
    if go_template:
        return GoRenderer(go_template)
    return JinjaRenderer(jinja_template or (CHATML if has_im_start else PLAIN), bos, eos)
