"""Tell tool calls from text as a model's output streams by.

A section between two marks, or brackets right at the beginning, is held back until it is complete. If it holds calls
they become parts of their own, else the whole section is given back as text. Characters are taken one by one, so that
the outcome cannot depend on how the output was cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from puna.prompt.output import Call, Part, joined
from puna.prompt.tools.calls import Tools, find_calls
from puna.prompt.tools.marks import Marks

_BARE = Marks("")
_BETWEEN = " \t\r\n,;"  # may stand before, between and after calls
_OPENING, _CLOSING = "{[(", "}])"
_BEFORE_QUOTE = tuple(" \n([{,:=")  # elsewhere it is an apostrophe
_INNER_MARKS = ("[ARGS]", "[CALL_ID]")
_LONGEST_MARK = 64


class ToolParser:
    def __init__(self, marks: Sequence[Marks], tools: Tools) -> None:
        self._tools = tools
        self._marks = [mark for mark in marks if len(mark.begin) < _LONGEST_MARK]
        self._first_characters = {mark.begin[0] for mark in self._marks}
        self._is_first = True  # nothing but calls came so far
        self._has_called = False
        self._between: list[str] = []  # held: belongs to the text after it, if there is any
        self._minds_strings = True  # a closing mark within a string closes nothing
        self._held = ""  # may be the beginning of a mark
        self._section: _Section | None = None

    def feed(self, text: str) -> list[Part]:
        is_plain = not (self._is_first or self._held or self._section or self._between)
        if is_plain and self._first_characters.isdisjoint(text):
            return [text] if text else []
        found: list[Part] = []
        for character in text:
            self._take(character, found)
        return joined(found)

    def finish(self) -> list[Part]:
        found: list[Part] = []
        while self._section is not None:
            self._end_section(self._section, found)
        rest = "".join(self._between) + self._held
        self._between, self._held = [], ""
        if rest.strip(_BETWEEN) or not self._has_called:
            found.append(rest)
        return joined(found)

    def _take(self, character: str, found: list[Part]) -> None:
        if self._section is not None:
            self._section.add(character)
            if self._section.is_complete:
                self._end_section(self._section, found)
            return
        self._held += character
        while self._held and self._section is None and not self._is_undecided(found):
            self._pass_one(found)

    def _is_undecided(self, found: list[Part]) -> bool:
        """Whether the held text may still become a mark; if it is one already, its section begins."""
        for mark in self._marks:
            if mark.only_first and not self._is_first:
                continue
            if self._held == mark.begin:
                self._held = ""
                self._begin_section(mark, "")
                return True
            if mark.begin.startswith(self._held):
                return True
        return False

    def _pass_one(self, found: list[Part]) -> None:
        """The first held character begins no mark: brackets at the beginning are a section, all else is text."""
        character = self._held[0]
        if self._is_first and character in "{[":
            body, self._held = self._held, ""
            self._begin_section(_BARE, body)
            return
        self._held = self._held[1:]
        if self._is_first and character in (_BETWEEN if self._has_called else " \t\r\n"):
            self._between.append(character)
            return
        found += [*self._between, character]
        self._between, self._is_first = [], False

    def _begin_section(self, marks: Marks, body: str) -> None:
        self._section = _Section(marks, minds_strings=self._minds_strings)
        for character in body:
            self._section.add(character)

    def _end_section(self, section: _Section, found: list[Part]) -> None:
        self._section = None
        parts, rest = section.parts(self._tools)
        if any(isinstance(part, Call) for part in parts):
            found += parts
            self._between, self._is_first, self._has_called = [], True, True
        else:
            found += [*self._between, *parts]
            self._between, self._is_first = [], False
        if rest:
            self._minds_strings = False  # this model's quotes do not match: nothing is read more than twice
        for character in rest:
            self._take(character, found)
        if section.begins_another:
            self._begin_section(section.marks, "")


class _Section:
    """The text from a mark on."""

    def __init__(self, marks: Marks, *, minds_strings: bool) -> None:
        self.marks = marks
        self._minds_strings = minds_strings
        self.is_complete = False
        self.begins_another = False  # the opening mark came again in place of the closing one
        self._body: list[str] = []
        self._tail = ""
        self._depth = 1 if marks.begin.endswith("[") else 0
        self._is_data = False  # begins with a bracket: marks inside strings do not count
        self._has_begun = marks.begin.endswith("[")
        self._quote = ""
        self._is_escaped = False

    def add(self, character: str) -> None:
        self._body.append(character)
        self._tail = (self._tail + character)[-_LONGEST_MARK:]
        if not self._has_begun and not character.isspace():
            self._has_begun = True
            self._is_data = self._minds_strings and character in "{["
        if self._quote:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == self._quote:
                self._quote = ""
        else:
            self._add_outside_strings(character)

    def _add_outside_strings(self, character: str) -> None:
        end = self.marks.end
        if (character == '"' and (self._is_data or (not end and self._depth))) or (
            character == "'" and not end and self._depth and self._tail[-2:-1] in _BEFORE_QUOTE
        ):
            self._quote = character
        elif end:
            self.begins_another = self._tail.endswith(self.marks.begin)
            self.is_complete = self.begins_another or self._tail.endswith(end)
        elif character in _OPENING:
            self._depth += 1
        elif character in _CLOSING and self._depth:
            self._depth -= 1
            self.is_complete = self._depth == 0 and not self._tail.endswith(_INNER_MARKS)

    def parts(self, tools: Tools) -> tuple[list[Part], str]:
        """Calls and texts, and what is still to be read as any output."""
        text = "".join(self._body)
        opening, closing = self.marks.begin, self.marks.end
        if self.begins_another:
            closing = opening
        body = text.removesuffix(closing) if closing else text
        rest = ""
        found = self._find(body, tools)
        if not found and closing and not self.is_complete and closing in body:  # a string that never ended
            body, _, rest = body.partition(closing)
            found = self._find(body, tools)
            if not found:
                rest = ""
        if found:
            return list(found), rest
        return [opening + (text.removesuffix(opening) if self.begins_another else text)], ""

    def _find(self, body: str, tools: Tools) -> list[Call | str]:
        if self.marks.begin == "<function=":
            return find_calls(f"<function={body}</function>", tools)
        if self.marks.begin == "functools[":
            return find_calls(f"[{body}", tools)
        return find_calls(body, tools, is_marked=bool(self.marks.begin))
