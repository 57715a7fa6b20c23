"""Texts as they fit the context, one by one: the tokens of which a vector or a score is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from puna.errors import BadRequest, ContextOverflow
from puna.runner.images.image import Image
from puna.runner.images.in_sequence import ImageAt, extents, without
from puna.runner.prefixes.groups import whole
from puna.runner.tasks.prompt import special_around, tokens_of
from puna.tokenizer.tokenizer import Tokenizer


class Fitted(NamedTuple):
    """An input as it fits the context."""

    tokens: list[int]
    n_cut: int = 0  # tokens that were left out
    images: Sequence[ImageAt] = ()


def tokenize(
    text: str | list[int],
    index: int,
    tokenizer: Tokenizer,
    n_ctx: int,
    truncate: bool,
    images: Mapping[str, Image] | None = None,
) -> Fitted:
    """The tokens of an input, cut at the end to what the context holds; special tokens at the end stay, no image is split.

    Errors: BadRequest for an input without tokens or with tokens outside the vocabulary; ContextOverflow.
    """
    tokens, seen = tokens_of(text, tokenizer, images) if isinstance(text, str) else (text, [])
    bad = None if isinstance(text, str) else next((t for t in tokens if not 0 <= t < tokenizer.n_tokens), None)
    if bad is not None:
        raise BadRequest(f"input {index} has the token {bad}, which is not in the vocabulary of {tokenizer.n_tokens}")
    if not tokens:
        raise BadRequest(f"input {index} is empty")
    if len(tokens) <= n_ctx:
        return Fitted(tokens, 0, seen)
    if not truncate:
        raise ContextOverflow(len(tokens), n_ctx)
    begin, end = special_around(tokenizer) if isinstance(text, str) else ([], [])
    n_kept, n_all = whole(0, n_ctx - len(end), 0, extents(seen)), len(tokens) - len(end)
    if n_kept <= len(begin):
        raise ContextOverflow(len(tokens), n_ctx)
    return Fitted([*tokens[:n_kept], *tokens[n_all:]], n_all - n_kept, without(seen, n_kept, n_all))
