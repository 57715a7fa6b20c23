"""How a model writes thinking and tool calls, judged from its template; makes the parser for one output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from puna.prompt.harmony import HarmonyParser, is_harmony
from puna.prompt.output import Parser, Part, Thinking, joined
from puna.prompt.thinking import Tags, ThinkingParser, tags_in
from puna.prompt.tools.calls import Tools
from puna.prompt.tools.marks import Marks, marks_in
from puna.prompt.tools.parser import ToolParser


@dataclass(frozen=True)
class OutputFormat:
    tags: Tags
    marks: tuple[Marks, ...]
    is_harmony: bool = False
    is_plain: bool = False  # whatever it writes is text
    has_tools: bool = False  # known to be written so, where the format was named
    can_think: bool = False  # the same
    hides_thinking: bool = False  # thinking comes though no request wants it, and is then no part of the answer

    @classmethod
    def of(cls, go_template: str, jinja_template: str, family: str = "") -> OutputFormat:
        harmony = is_harmony(go_template or jinja_template) or family in ("gptoss", "gpt-oss")
        return cls(tags_in(go_template, jinja_template), marks_in(go_template, jinja_template), harmony)

    def needs_control_tokens(self, *, think: bool, tools: bool) -> bool:
        """Whether the runner must show control tokens for the parser to see the marks."""
        in_tools = tools and any(mark.is_control for mark in self.marks)
        in_thinking = (think or self.hides_thinking) and self.tags.begin.startswith(("[", "<|"))
        return not self.is_plain and (self.is_harmony or in_tools or in_thinking)

    def parser(self, prompt: str, *, think: bool, tools: Sequence[Mapping[str, Any]], answer_prefix: str = "") -> Parser | None:
        """None when there is nothing to tell apart. *answer_prefix*: what the prompt holds of the answer already."""
        if self.is_plain:
            return None
        named = Tools(tools)
        calling = ToolParser(self.marks, named) if named else None
        thinking: Parser | None = None
        if think or self.hides_thinking:
            thinking = ThinkingParser(self.tags, prompt, answer_prefix)
        if self.hides_thinking and not think:
            thinking = _Answer(thinking) if thinking else None
        if self.is_harmony:
            thinking = HarmonyParser(prompt, named, shows_thinking=think)
        if thinking and calling:
            return _Chain(thinking, calling)
        return thinking or calling


class _Answer:
    """What another parser finds, without thinking."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser

    def feed(self, text: str) -> list[Part]:
        return [part for part in self._parser.feed(text) if not isinstance(part, Thinking)]

    def finish(self) -> list[Part]:
        return [part for part in self._parser.finish() if not isinstance(part, Thinking)]


class _Chain:
    """Calls are looked for in what is no thinking."""

    def __init__(self, first: Parser, second: Parser) -> None:
        self._first = first
        self._second = second

    def feed(self, text: str) -> list[Part]:
        return self._pass_on(self._first.feed(text))

    def finish(self) -> list[Part]:
        return joined([*self._pass_on(self._first.finish()), *self._second.finish()])

    def _pass_on(self, parts: list[Part]) -> list[Part]:
        found: list[Part] = []
        for part in parts:
            found += self._second.feed(part) if isinstance(part, str) else [part]
        return joined(found)
