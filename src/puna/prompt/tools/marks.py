"""Between which marks a model writes its tool calls, as its template shows them.

Knows the marks of the common families; of others it takes what the Go template prints before a call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from puna.prompt.template_text import before_calls


@dataclass(frozen=True)
class Marks:
    begin: str
    end: str = ""  # without one a call ends with its last bracket
    is_control: bool = False  # the marks are control tokens, which runners leave out unless asked
    only_first: bool = False  # counts only where nothing but calls came before


_KNOWN = (
    Marks("<tool_call>", "</tool_call>"),
    Marks("<tool_calls>", "</tool_calls>"),
    Marks("<TOOLCALL>", "</TOOLCALL>"),
    Marks("<function_call>", "</function_call>"),
    Marks("<functioncall>", "</functioncall>"),
    Marks("<function=", "</function>"),
    Marks("<function_calls>", "</function_calls>"),
    Marks("[TOOL_CALLS]", is_control=True),
    Marks("<|python_tag|>", is_control=True),
    Marks("<|tool_call|>", "<|/tool_call|>", is_control=True),
    Marks("<|tool_call_start|>", "<|tool_call_end|>", is_control=True),
    Marks("<|START_ACTION|>", "<|END_ACTION|>", is_control=True),
    Marks("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", is_control=True),
    Marks("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", is_control=True),
    Marks("<|tool_call>", "<tool_call|>", is_control=True),
    Marks("<start_function_call>", "<end_function_call>", is_control=True),
    Marks("Action: ```json", "```"),
    Marks("functools["),
)
_USUAL = (Marks("<tool_call>", "</tool_call>"), Marks("<function=", "</function>"))
_FENCES = tuple(Marks(f"```{name}", "```", only_first=True) for name in ("json", "tool_call", "tool_code"))
_IS_KIND_OF_NAME = re.compile(r"[\w\s.:-]*")


def marks_in(go_template: str, jinja_template: str) -> tuple[Marks, ...]:
    """All marks to look for, none of which begins with another."""
    template = go_template or jinja_template
    named = tuple(marks for marks in _KNOWN if marks.begin in template or (marks.end and marks.end in template))
    found: list[Marks] = []
    for marks in (*named, *_from_go(go_template), *_USUAL, *_FENCES):
        if not any(marks.begin.startswith(other.begin) or other.begin.startswith(marks.begin) for other in found):
            found.append(marks)
    return tuple(found)


def _from_go(template: str) -> tuple[Marks, ...]:
    begin = before_calls(template).strip().rstrip("[ \n")
    first = begin.rpartition("\n")[2].strip()
    return () if len(first) < 3 or _IS_KIND_OF_NAME.fullmatch(first) else (Marks(first, _closing(first), is_control=True),)


def _closing(begin: str) -> str:
    """``</x>`` for ``<x>``."""
    match = re.fullmatch(r"<([A-Za-z_][\w-]*)>", begin)
    return f"</{match.group(1)}>" if match else ""
