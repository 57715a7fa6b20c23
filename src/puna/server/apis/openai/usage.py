"""Token counts as OpenAI's API names them, and the warnings that Puna adds to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from puna import wire
from puna.server.answering.parts import Finished


def prompt_usage(reply: wire.EmbeddingReply) -> dict[str, Any]:
    """Of a request that generates nothing."""
    n_tokens = reply.prompt_eval_count
    usage: dict[str, Any] = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    if reply.truncated_count:
        usage["prompt_tokens_details"] = {"truncated_tokens": reply.truncated_count}
    return usage


def usage_of(answers: Sequence[Finished]) -> dict[str, Any]:
    """All choices share one prompt, which counts once. That the others found it in the cache was this request's own doing."""
    first, done = answers[0], [answer.done for answer in answers]
    n_prompt, n_generated = first.done.prompt_eval_count, sum(one.eval_count for one in done)
    usage: dict[str, Any] = {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_generated,
        "total_tokens": n_prompt + n_generated,
    }
    details = {
        "cached_tokens": min(one.cached_count for one in done),
        "truncated_tokens": first.truncated_tokens,
        "truncated_messages": first.truncated_messages,
    }
    if any(details.values()):
        usage["prompt_tokens_details"] = {name: count for name, count in details.items() if count > 0}
    n_thinking = sum(one.thinking_count for one in done)
    if n_thinking > 0:
        usage["completion_tokens_details"] = {"reasoning_tokens": n_thinking}
    return usage


def warnings_of(answers: Sequence[Finished]) -> dict[str, Any]:
    """All choices have the same, those of their request."""
    return {"warnings": list(answers[0].warnings)} if answers[0].warnings else {}
