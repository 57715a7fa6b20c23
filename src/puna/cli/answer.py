"""Write an answer while it streams: thinking between two markers, then the text; and the timings after it.

On a terminal the text is wrapped and thinking is grey, where it can be; into a pipe goes plain text and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TextIO

from puna.cli.format import go_duration
from puna.cli.progress import Spinner
from puna.cli.terminal import can_draw, columns, is_terminal, printable, wants_colour
from puna.cli.word_wrap import WordWrap

_GREY, _RESET = "\x1b[90m", "\x1b[0m"


class AnswerWriter:
    """Writes one answer to *out*."""

    def __init__(self, out: TextIO, *, word_wrap: bool = True, hide_thinking: bool = False) -> None:
        self._out = out
        self._terminal = is_terminal(out)
        self._wrap = WordWrap(columns) if can_draw(out) and word_wrap else None
        self._has_grey = can_draw(out) and wants_colour()
        self._hide_thinking = hide_thinking
        self._thinking = False
        self._last = ""

    def thinking(self, text: str) -> None:
        if self._hide_thinking or not text:
            return
        if not self._thinking:
            self._thinking = True
            self._write("Thinking...\n", grey=True)
        self._write(text, grey=True)

    def content(self, text: str) -> None:
        if not text:
            return
        if self._thinking:
            self._end_thinking()
        self._write(text)

    def tool_calls(self, calls: Iterable[Mapping[str, Any]]) -> None:
        """Say which tools the model tried to call: there are none in a terminal."""
        for call in calls:
            function = call.get("function") or {}
            arguments = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
            self.content(f"  Model called a non-existent function '{function.get('name', '')}()' with arguments: {arguments}\n")

    def finish(self) -> None:
        """End the answer: an empty line below it on a terminal, one line end in a pipe."""
        if self._thinking:
            self._end_thinking()
        if self._terminal:
            self._out.write("\n\n")
        elif self._last and self._last != "\n":
            self._out.write("\n")
        self._out.flush()

    def _end_thinking(self) -> None:
        self._thinking = False
        self._write(("" if self._last == "\n" else "\n") + "...done thinking.\n\n", grey=True)

    def _write(self, text: str, *, grey: bool = False) -> None:
        self._last = text[-1]
        if self._terminal:
            text = printable(text)
            if self._wrap:
                text = self._wrap.feed(text)
            if grey and self._has_grey:
                text = f"{_GREY}{text}{_RESET}"
        self._out.write(text)
        self._out.flush()


def write_events(
    events: Iterable[Mapping[str, Any]],
    writer: AnswerWriter,
    spinner: Spinner,
    keep: Callable[[str], None] = lambda _: None,
) -> Mapping[str, Any]:
    """Write what /api/generate or /api/chat streams, hand each piece of text to *keep*, and return the final event."""
    final: Mapping[str, Any] = {}
    for event in events:
        message = event.get("message") or {**event, "content": event.get("response")}
        thinking, content, calls = (message.get(key) for key in ("thinking", "content", "tool_calls"))
        if thinking or content or calls:
            spinner.stop()
        writer.thinking(str(thinking or ""))
        writer.content(str(content or ""))
        writer.tool_calls(calls or [])
        keep(str(content or ""))
        if event.get("done"):
            final = event
    return final


def timings(final: Mapping[str, Any]) -> str:
    """The summary of ``--verbose``; a line appears only if the server reported the number."""
    lines = []

    def add(label: str, value: str) -> None:
        lines.append(f"{label + ':':<22}{value}\n")

    def add_tokens(what: str) -> None:
        count, duration = final.get(f"{what.replace(' ', '_')}_count", 0), final.get(f"{what.replace(' ', '_')}_duration", 0)
        if count:
            add(f"{what} count", f"{count} token(s)")
        if duration:
            add(f"{what} duration", go_duration(duration))
        if count and duration:
            add(f"{what} rate", f"{count / duration * 1e9:.2f} tokens/s")

    for name in ("total", "load"):
        if final.get(f"{name}_duration"):
            add(f"{name} duration", go_duration(final[f"{name}_duration"]))
    add_tokens("prompt eval")
    add_tokens("eval")
    return "".join(lines)
