"""Separate what a model thinks from what it answers, as the text streams by.

Thinking stands at the very beginning of an output, between two tags; white space after either tag belongs to neither side.
Text that may still turn out to be a tag is held back.

Source: product description, "Thinking extraction".
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from puna.prompt.output import Part, Thinking, overlap
from puna.prompt.template_text import around_thinking


@dataclass(frozen=True)
class Tags:
    begin: str = "<think>"
    end: str = "</think>"
    space: str = "\n"  # between them and what is thought

    def are_open_in(self, prompt: str, answer_prefix: str = "") -> bool:
        """Whether the prompt has begun thinking, which the model goes on with; *answer_prefix*: what it holds of the answer."""
        if answer_prefix:
            _, begin, thinking = answer_prefix.rpartition(self.begin)
            return bool(begin) and self.end not in thinking
        return prompt.rstrip().endswith(self.begin)


_KNOWN = (
    Tags(),
    Tags("<thinking>", "</thinking>"),
    Tags("[THINK]", "[/THINK]"),
    Tags("<|START_THINKING|>", "<|END_THINKING|>"),
    Tags("<seed:think>", "</seed:think>"),
)


def tags_in(go_template: str, jinja_template: str) -> Tags:
    """The text directly before and after the thinking in the Go template, else tags that a template names, else the usual."""
    around = around_thinking(go_template)
    if around:
        return Tags(*around)
    template = go_template or jinja_template
    return next((tags for tags in _KNOWN if tags.begin in template or tags.end in template), Tags())


class _State(enum.Enum):
    BEFORE = enum.auto()  # only white space so far
    AFTER_BEGIN = enum.auto()
    THINKING = enum.auto()
    AFTER_END = enum.auto()
    ANSWERING = enum.auto()


class ThinkingParser:
    """One output. *prompt* is what the model continues: it may end with the opening tag already, or hold more of the answer."""

    def __init__(self, tags: Tags, prompt: str, answer_prefix: str = "") -> None:
        self._tags = tags
        self._leading: list[str] = []  # white space so far, where nothing else came
        self._held = ""
        is_open = tags.are_open_in(prompt, answer_prefix)
        if answer_prefix:
            self._state = _State.THINKING if is_open else _State.ANSWERING
        else:
            self._state = _State.AFTER_BEGIN if is_open else _State.BEFORE

    def feed(self, text: str) -> list[Part]:
        """What is known to be thinking or text after *text* has come."""
        self._held += text
        found: list[Part] = []
        while self._step(found):
            pass
        return [part for part in found if part not in ("", Thinking(""))]

    def finish(self) -> list[Part]:
        """What was held back, now that no more comes."""
        rest, self._held = self._held, ""
        if self._state is _State.BEFORE:
            rest = "".join([*self._leading, rest])
        if not rest or self._state in (_State.AFTER_BEGIN, _State.AFTER_END):
            return []
        return [Thinking(rest) if self._state is _State.THINKING else rest]

    def _step(self, found: list[Part]) -> bool:
        """Take what can be taken from the held text; True when the state changed and there may be more."""
        match self._state:
            case _State.BEFORE:
                return self._look_for_begin()
            case _State.AFTER_BEGIN | _State.AFTER_END:
                return self._skip_space()
            case _State.THINKING:
                return self._look_for_end(found)
            case _State.ANSWERING:
                found.append(self._held)
                self._held = ""
                return False

    def _look_for_begin(self) -> bool:
        start = self._held.lstrip()
        self._leading.append(self._held[: len(self._held) - len(start)])
        self._held = start
        if start.startswith(self._tags.begin):
            self._held = start[len(self._tags.begin) :]
            self._state = _State.AFTER_BEGIN
        elif self._tags.begin.startswith(start):
            return False
        else:
            self._held = "".join([*self._leading, start])
            self._state = _State.ANSWERING
        return True

    def _skip_space(self) -> bool:
        self._held = self._held.lstrip()
        if not self._held:
            return False
        self._state = _State.THINKING if self._state is _State.AFTER_BEGIN else _State.ANSWERING
        return True

    def _look_for_end(self, found: list[Part]) -> bool:
        thinking, tag, rest = self._held.partition(self._tags.end)
        if tag:
            found.append(Thinking(thinking))
            self._held = rest
            self._state = _State.AFTER_END
            return True
        n_held = overlap(self._held, self._tags.end)
        found.append(Thinking(self._held[: len(self._held) - n_held]))
        self._held = self._held[len(self._held) - n_held :]
        return False
