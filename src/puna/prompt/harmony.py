"""The harmony format of the gpt-oss models: every message of the output names its channel and its recipient.

Channel ``analysis`` is thinking, messages to ``functions.x`` are tool calls, all else is text.

Source: OpenAI's description of the harmony response format; product description, "Thinking extraction".
"""

from __future__ import annotations

import re

from puna.prompt.output import Call, Part, Thinking, joined, overlap
from puna.prompt.thinking import Tags
from puna.prompt.tools.calls import Tools, call_of

_START, _MESSAGE = "<|start|>", "<|message|>"
_HEADER_MARKS = (_START, "<|channel|>", "<|constrain|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START, "<|channel|>")
_ROLE = "assistant"

MAX_HEADER_CHARS = 512  # what has no end within them is no header
_STRETCH = 256

# How thinking begins, how it ends, and what brings the answer after it.
THINKING_BEGIN, THINKING_END = "<|channel|>analysis<|message|>", "<|end|>"
FINAL_BEGIN = "<|channel|>final<|message|>"
TO_ANSWER = f"<|end|><|start|>assistant{FINAL_BEGIN}"
TAGS = Tags(THINKING_BEGIN, TO_ANSWER, space="")  # around thinking that a prompt has begun
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def is_harmony(template: str) -> bool:
    return "<|channel|>" in template and _MESSAGE in template


def is_within_message(prompt: str) -> bool:
    """Whether the prompt has begun a message, header and all."""
    _, start, rest = prompt.rpartition(_START)
    return bool(start) and _MESSAGE in rest


class HarmonyParser:
    """One output. *prompt* is what the model continues: it may end within a header, or within a message."""

    def __init__(self, prompt: str, tools: Tools, *, shows_thinking: bool) -> None:
        self._tools = tools
        self._shows_thinking = shows_thinking
        self._header: str | None = None  # the header being read; None inside a message
        self._channel, self._recipient = "final", ""
        self._held = ""
        self._body: list[str] = []  # of a message to a tool
        _, start, header = prompt.rpartition(_START)
        if start and _MESSAGE in header:
            self._open(header.partition(_MESSAGE)[0])
        elif start:
            self._header = header

    def feed(self, text: str) -> list[Part]:
        found: list[Part] = []
        for begin in range(0, len(text), _STRETCH):  # what is held stays short, however much comes at once
            self._held += text[begin : begin + _STRETCH]
            while self._step(found):
                pass
        return joined(found)

    def finish(self) -> list[Part]:
        found: list[Part] = []
        rest, self._held = self._held, ""
        if self._header is None:
            self._add(rest, found)
            self._close(found)
        elif rest.strip() and not any(mark in rest for mark in _HEADER_MARKS):
            found.append(rest)  # no header at all: a model that forgot the format
        return joined(found)

    def _step(self, found: list[Part]) -> bool:
        """Take what can be taken from the held text; True when there may be more."""
        return self._read_header() if self._header is not None else self._read_message(found)

    def _read_header(self) -> bool:
        assert self._header is not None
        before, mark, _ = self._held[: MAX_HEADER_CHARS + len(_MESSAGE)].partition(_MESSAGE)
        if "<|channel|>" not in self._header and not _may_be_header(before, is_whole=bool(mark)):
            self._header = None
        elif mark:
            self._open(self._header + before)
            self._held = self._held[len(before) + len(mark) :]
        elif len(before) >= MAX_HEADER_CHARS + len(_MESSAGE):
            self._header = None
        else:
            return False
        return True

    def _open(self, header: str) -> None:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._header = None
        self._channel = channel.group(1) if channel else "final"
        self._recipient = recipient.group(1) if recipient else ""

    def _read_message(self, found: list[Part]) -> bool:
        at, end = min(((self._held.find(end), end) for end in _ENDS if end in self._held), default=(-1, ""))
        if at < 0:
            n_held = max(overlap(self._held, end) for end in _ENDS)
            cut = len(self._held) - n_held
            self._add(self._held[:cut], found)
            self._held = self._held[cut:]
            return False
        self._add(self._held[:at], found)
        self._held = self._held[at + len(end) :]
        self._close(found)
        self._header = end if end == "<|channel|>" else ""
        return True

    def _add(self, text: str, found: list[Part]) -> None:
        if self._recipient.startswith("functions.") or self._tools.find(self._recipient):
            self._body.append(text)
        elif self._channel == "analysis":
            if self._shows_thinking:
                found.append(Thinking(text))
        else:
            found.append(text)

    def _close(self, found: list[Part]) -> None:
        """The message is complete: if it was for a tool, its text is the arguments."""
        body, recipient = "".join(self._body), self._recipient
        if recipient and (body or self._tools.find(recipient)):
            call: Call | None = call_of(recipient, body, self._tools)
            found.append(call if call else body)
        self._body.clear()
        self._channel, self._recipient = "final", ""


def _may_be_header(text: str, *, is_whole: bool) -> bool:
    """Whether a header is, or may begin, so: the role, a recipient, the first mark. What is no header stays none."""
    rest = text.lstrip()
    after_role = rest.removeprefix(_ROLE).lstrip()
    if is_whole:
        return not after_role or after_role.startswith(("to=", *_HEADER_MARKS))
    marks = ("to=", *_HEADER_MARKS, _MESSAGE)
    return _ROLE.startswith(rest) or any(mark.startswith(after_role) or after_role.startswith(mark) for mark in marks)
