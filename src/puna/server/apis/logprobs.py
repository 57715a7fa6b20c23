"""Log probabilities of tokens, as the native API and OpenAI's show them."""

from __future__ import annotations

from typing import Any

from puna.api.generate import ReplyLogprob, ReplyTopLogprob
from puna.wire import TokenLogprob


def reply_logprob(entry: TokenLogprob) -> ReplyLogprob:
    top = [ReplyTopLogprob(**_token(other)) for other in entry.top]
    return ReplyLogprob(**_token(entry), top_logprobs=top or None)


def _token(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.text.decode("utf-8", "replace"), "logprob": entry.logprob, "bytes": list(entry.text)}
