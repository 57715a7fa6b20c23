"""How many tokens of an answer are thinking, and how thinking ends when its budget is spent.

Thinking is marked by text that may be cut anywhere into tokens, or by control tokens; both are looked for as bytes.
Knows nothing of requests or of what a template looks like.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections import deque

from puna.errors import BadRequest
from puna.tokenizer.tokenizer import Tokenizer
from puna.wire import Thinking

_SPACE = b" \t\r\n"


class _State(enum.Enum):
    BEFORE = enum.auto()  # thinking may begin
    THINKING = enum.auto()
    AFTER = enum.auto()  # none will begin any more


class ThinkingMeter:
    """Follows one answer, token by token."""

    def __init__(self, wire: Thinking, tokenizer: Tokenizer) -> None:
        if not wire.end or not (wire.begin or (wire.is_open and not wire.repeats)):
            raise BadRequest("thinking: begin and end must not be empty")
        self._begin, self._end = wire.begin.encode(), wire.end.encode()
        self._repeats, self._budget = wire.repeats, wire.budget
        self._state = _State.THINKING if wire.is_open else _State.BEFORE
        self._held = b""  # read, and perhaps part of the tag that is looked for
        self._n_read = 0  # bytes
        self._begins: list[int] = []  # where the tokens of the current thinking begin, in bytes
        self._n_complete = 0  # tokens of thinking that has ended
        self._ending = tokenizer.encode(wire.ending or wire.end, add_special=False) if self._budget >= 0 else []
        self._forced: deque[int] = deque()

    @property
    def n_tokens(self) -> int:
        """Tokens of thinking so far, tags excepted."""
        return self._n_complete + len(self._begins)

    @property
    def forced_token(self) -> int | None:
        """What must come next because the budget is spent; None: whatever the model likes."""
        if not self._forced and self._state is _State.THINKING and 0 <= self._budget <= self.n_tokens:
            self._forced.extend(self._ending)
        return self._forced[0] if self._forced else None

    def accept(self, token: int, piece: bytes) -> None:
        """Take a token; *piece* is its text, that of a control token included."""
        was_forced = bool(self._forced) and self._forced[0] == token
        if was_forced:
            self._forced.popleft()
        if self._state is _State.THINKING:
            self._begins.append(self._n_read)
        self._n_read += len(piece)
        if self._state is not _State.AFTER:
            self._held += piece
            while self._step():
                pass
        if was_forced and not self._forced and self._state is _State.THINKING:
            # The vocabulary has no tokens that give this text exactly: thinking is over all the same.
            del self._begins[-len(self._ending) :]
            self._close()

    def _step(self) -> bool:
        """Look for the tag that changes the state; True when there may be another in what is held."""
        if self._state is _State.THINKING:
            return self._look_for_end()
        return self._state is _State.BEFORE and self._look_for_begin()

    def _look_for_begin(self) -> bool:
        if self._repeats:
            _, tag, rest = self._held.partition(self._begin)
            if not tag:
                self._held = self._held[-(len(self._begin) - 1) :] if len(self._begin) > 1 else b""
                return False
        else:
            start = self._held.lstrip(_SPACE)
            if not start.startswith(self._begin):
                if not self._begin.startswith(start):
                    self._state, self._held = _State.AFTER, b""
                return False
            rest = start[len(self._begin) :]
        self._state, self._held = _State.THINKING, rest
        return True

    def _look_for_end(self) -> bool:
        at = self._held.find(self._end)
        if at < 0:
            n_kept = min(len(self._held), len(self._end) - 1)
            self._held = self._held[len(self._held) - n_kept :]
            return False
        n_behind = len(self._held) - at  # bytes from the tag on
        rest = self._held[at + len(self._end) :]
        del self._begins[bisect_left(self._begins, self._n_read - n_behind) :]
        self._close()
        self._held = rest
        return self._repeats

    def _close(self) -> None:
        self._n_complete += len(self._begins)
        self._begins.clear()
        self._held = b""
        self._state = _State.BEFORE if self._repeats else _State.AFTER
