from __future__ import annotations

from typing import Any, cast

import pytest

from puna.runner.tasks.completion import Completion
from puna.tokenizer.tokenizer import Tokenizer
from puna.wire import CompletionReply, CompletionRequest, Piece


class Marks:
    """Token 0 is the control token ``<|mark|>``, 1 a letter, 2 ends the answer."""

    n_tokens = 3
    end_tokens = frozenset({2})

    def encode(self, _: str, **__: Any) -> list[int]:
        return [1]

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return {0: b"<|mark|>" if special else b"", 1: b"a", 2: b"<|end|>"}[token]


@pytest.mark.parametrize(("shown", "text"), [(False, "a"), (True, "<|mark|>a")])
def test_control_tokens_are_text_where_asked_for_and_the_end_never_is(shown: bool, text: str) -> None:
    replies: list[CompletionReply] = []
    wire = CompletionRequest(prompt="x", show_control_tokens=shown)
    request = Completion(wire, cast(Tokenizer, Marks()), 64, replies.append)
    for token in (0, 1, 2):
        request.accept(token)
    assert request.is_done
    assert "".join(reply.content for reply in replies if isinstance(reply, Piece)) == text
