"""Texts as they fit the context, one by one: the tokens of which a vector or a score is made."""

from __future__ import annotations

from typing import NamedTuple

from puna.errors import BadRequest, ContextOverflow
from puna.tokenizer.tokenizer import Tokenizer


class Fitted(NamedTuple):
    """An input as it fits the context."""

    tokens: list[int]
    n_cut: int = 0  # tokens that were left out


def tokenize(text: str | list[int], index: int, tokenizer: Tokenizer, n_ctx: int, truncate: bool) -> Fitted:
    """The tokens of an input, cut at the end to what the context holds; special tokens at the end stay.

    Errors: BadRequest for an input without tokens or with tokens outside the vocabulary; ContextOverflow.
    """
    if isinstance(text, str):
        tokens = tokenizer.encode(text)
    else:
        tokens = text
        bad = next((t for t in tokens if not 0 <= t < tokenizer.n_tokens), None)
        if bad is not None:
            raise BadRequest(f"input {index} has the token {bad}, which is not in the vocabulary of {tokenizer.n_tokens}")
    if not tokens:
        raise BadRequest(f"input {index} is empty")
    if len(tokens) <= n_ctx:
        return Fitted(tokens)
    if not truncate:
        raise ContextOverflow(len(tokens), n_ctx)
    n_end = n_special_at_end(tokens, tokenizer.encode(text, add_special=False)) if isinstance(text, str) else 0
    return Fitted([*tokens[: n_ctx - n_end], *tokens[len(tokens) - n_end :]], len(tokens) - n_ctx)


def n_special_at_end(tokens: list[int], plain: list[int]) -> int:
    """How many tokens were put after those of the text itself."""
    n_added = len(tokens) - len(plain)
    begins = [begin for begin in range(n_added + 1) if tokens[begin : begin + len(plain)] == plain]
    return n_added - begins[0] if begins else 0
