"""What a template may cost: steps, time, and text produced.

Templates come with models that anybody may have written, so none of them may keep the server busy or fill its memory.
A Budget counts for one rendering; whoever interprets a template reports every step and every text it makes.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NoReturn

from puna.errors import TemplateError

MAX_TEMPLATE_CHARS = 1 << 18
MAX_TEXT_CHARS = 1 << 22
MAX_ITEMS = 200_000
MAX_STEPS = 1_000_000
MAX_SECONDS = 5.0
_ITEMS_PER_STEP = 8
_COPIES = 64  # of the input, and of one text of the greatest length, that may be made on the way


class Budget:
    """Counts down while one template is rendered; *n_input* is the number of characters of the conversation."""

    def __init__(self, n_input: int = 0, *, max_steps: int = MAX_STEPS, max_seconds: float = MAX_SECONDS) -> None:
        self.max_text = max(MAX_TEXT_CHARS, 4 * n_input)
        self._steps_left = max_steps
        self._max_steps = max_steps
        self._chars_left = _COPIES * max(MAX_TEXT_CHARS // 4, n_input)
        self._deadline = time.monotonic() + max_seconds

    def step(self, n: int = 1) -> None:
        """Errors: TemplateError when steps or time are used up."""
        self._steps_left -= n
        if self._steps_left < 0:
            _too_much(f"more than {self._max_steps} steps")
        if (n > 1 or self._steps_left % 256 == 0) and time.monotonic() > self._deadline:
            _too_much("it takes too long")

    def text(self, n_chars: int) -> None:
        """Account for a text of *n_chars* that is about to be made, or was made.

        Errors: TemplateError when it is too long, or when all texts together are.
        """
        self._chars_left -= n_chars
        if n_chars > self.max_text or self._chars_left < 0:
            _too_much(f"a text longer than {self.max_text} characters" if n_chars > self.max_text else "too much text")

    def admit(self, value: Any) -> Any:
        """Account for a value a template has made and return it.

        Containers are weighed as they would print: an item counts once for each place that refers to it. Their texts are not
        copies, so they are held against the limit for one text, not added to what was made.
        Errors: TemplateError when it is too large.
        """
        if isinstance(value, str):
            self.text(len(value))
        elif isinstance(value, CONTAINERS):
            self.weight(value)
        return value

    def weight(self, value: Any) -> int:
        """Characters in all texts of a value.

        Errors: TemplateError when it has more than MAX_ITEMS items, or more characters than one text may have.
        """
        n_items = n_chars = 0
        waiting: list[Any] = [value]
        while waiting:
            top = waiting.pop()
            n_items += 1
            if isinstance(top, str):
                n_chars += len(top)
            elif isinstance(top, Mapping):
                if len(top) + len(waiting) > MAX_ITEMS:
                    _too_much(f"a value with more than {MAX_ITEMS} items")
                waiting.extend(top.keys())
                waiting.extend(top.values())
            elif isinstance(top, Collection) and isinstance(top, CONTAINERS):
                if len(top) + len(waiting) > MAX_ITEMS:
                    _too_much(f"a value with more than {MAX_ITEMS} items")
                waiting.extend(top)
            if n_items > MAX_ITEMS:
                _too_much(f"a value with more than {MAX_ITEMS} items")
            if n_chars > self.max_text:
                _too_much(f"a text longer than {self.max_text} characters")
        self.step(n_items // _ITEMS_PER_STEP)
        return n_chars


CONTAINERS: tuple[type, ...] = (list, tuple, set, frozenset, dict, type({}.items()), type({}.keys()), type({}.values()))


def count_chars(values: Iterable[Any]) -> int:
    """Characters in all texts of plain data (lists, dicts and what JSON knows)."""
    total = 0
    waiting = list(values)
    while waiting:
        top = waiting.pop()
        if isinstance(top, str):
            total += len(top)
        elif isinstance(top, Mapping):
            waiting.extend(top.keys())
            waiting.extend(top.values())
        elif isinstance(top, list | tuple):
            waiting.extend(top)
    return total


def check_template_length(source: str) -> None:
    """Errors: TemplateError for a template that is longer than any real one."""
    if len(source) > MAX_TEMPLATE_CHARS:
        raise TemplateError(f"the template has {len(source)} characters; more than {MAX_TEMPLATE_CHARS} are not accepted")


def _too_much(what: str) -> NoReturn:
    raise TemplateError(f"the template does too much: {what}")
