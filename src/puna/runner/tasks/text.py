"""From token pieces to text that may be shown: whole characters, nothing of a stop sequence.

Knows nothing of tokens, requests or time. Pieces are bytes, since a token may hold part of a character.

The outcome does not depend on how the text is cut into pieces. Of all stop sequences in it the one that begins earliest
wins, and of several that begin there the shortest. So a complete stop sequence waits while a longer one that began before
it may still complete.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import NamedTuple


class Emit(NamedTuple):
    text: str  # safe to send
    stopped: bool  # a stop sequence is complete: nothing follows


class _Stop:
    """One stop sequence and how much of it the text so far ends with (Knuth, Morris and Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.n_matched = 0
        self._fallback = [0] * len(text)  # [i]: the longest proper prefix of text that text[:i+1] ends with
        for i in range(1, len(text)):
            n = self._fallback[i - 1]
            while n and text[i] != text[n]:
                n = self._fallback[n - 1]
            self._fallback[i] = n + 1 if text[i] == text[n] else 0

    def find_ends(self, text: str) -> int:
        """Read on; where in *text* the first completed occurrence ends, or -1."""
        stop, n, first = self.text, self.n_matched, -1
        i, length = 0, len(text)
        while i < length:
            if not n:
                i = text.find(stop[0], i)
                if i < 0:
                    break
            while n and text[i] != stop[n]:
                n = self._fallback[n - 1]
            if text[i] == stop[n]:
                n += 1
            i += 1
            if n == len(stop):
                if first < 0:
                    first = i
                n = self._fallback[n - 1]
        self.n_matched = n
        return first


class TextStream:
    """The text of one answer."""

    def __init__(self, stop: Iterable[str] = ()) -> None:
        self.stopped = False
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = [_Stop(text) for text in dict.fromkeys(stop) if text]
        self._first_characters = {s.text[0] for s in self._stops}
        self._held = ""  # read but not emitted: it may turn out to be a stop sequence
        self._n_read = 0  # characters; the held text is the last of them
        self._stop_begin = -1  # where the earliest complete stop sequence begins
        self._stop_text = ""

    @property
    def stop_sequence(self) -> str:
        """The one that ended the text: of several that begin there, the shortest. Empty while there is none."""
        return self._stop_text if self.stopped else ""

    @property
    def is_whole(self) -> bool:
        """Whether the text so far ends with a whole character."""
        return not self._decoder.getstate()[0]

    @property
    def n_read(self) -> int:
        """Characters so far, those that are held included."""
        return self._n_read

    def feed(self, piece: bytes, *, may_stop: bool = True) -> Emit:
        """Add a piece; what can be emitted now. After a stop nothing more is.

        No stop sequence is looked for in pieces that may not stop; those come before all others.
        """
        if self.stopped:
            return Emit("", True)
        text = self._decoder.decode(piece)
        if not may_stop:
            self._n_read += len(text)
            return Emit(text, False)
        if not self._held and self._first_characters.isdisjoint(text):
            self._n_read += len(text)
            return Emit(text, False)
        return self._match(text)

    def finish(self) -> str:
        """What was held back, at the end of the answer: an incomplete character becomes U+FFFD.

        If it contains a stop sequence after all, the text ends there and ``stopped`` is set.
        """
        if self.stopped:
            return ""
        emitted, stopped = self._match(self._decoder.decode(b"", final=True))
        if stopped:
            return emitted
        rest, self._held = self._held, ""
        if self._stop_begin >= 0:
            self.stopped = True
            rest = rest[: self._stop_begin - (self._n_read - len(rest))]
        return emitted + rest

    def _match(self, text: str) -> Emit:
        for stop in self._stops:
            end = stop.find_ends(text)
            if end >= 0:
                begin = self._n_read + end - len(stop.text)
                if self._stop_begin < 0 or (begin, len(stop.text)) < (self._stop_begin, len(self._stop_text)):
                    self._stop_begin, self._stop_text = begin, stop.text
        self._held += text
        self._n_read += len(text)
        # An unfinished stop sequence begins here at the earliest.
        maybe_begin = self._n_read - max((s.n_matched for s in self._stops), default=0)
        self.stopped = 0 <= self._stop_begin <= maybe_begin
        cut = (self._stop_begin if self.stopped else maybe_begin) - (self._n_read - len(self._held))
        emitted = self._held[:cut]
        self._held = "" if self.stopped else self._held[cut:]
        return Emit(emitted, self.stopped)
