"""From a step's logits to the next token of each request: what must and must not come, grammars, probabilities after.

Knows requests and rows of logits; not how the logits were computed, nor what becomes of the tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from puna.sample.choice import sample_batch
from puna.sample.logprobs import top_logprobs
from puna.sample.matcher import GrammarError, Matcher, is_allowed, masked, start_masks
from puna.sample.sampler import SampleError, Sampler
from puna.sample.transforms import Floats
from puna.wire import CompletionRequest, TokenLogprob

log = logging.getLogger(__name__)


class Sampled(Protocol):
    """A request that gets tokens: what must come, what must not, how the rest is chosen."""

    wire: CompletionRequest
    sampler: Sampler
    matcher: Matcher | None
    is_cancelled: bool
    is_done: bool

    @property
    def n_tokens(self) -> int:
        """Of the vocabulary: what is beyond it in a row of logits is no token."""

    @property
    def forced_token(self) -> int | None: ...
    @property
    def banned_tokens(self) -> Set[int]: ...
    def text_of(self, token: int) -> bytes: ...
    def accept(self, token: int, logprob: TokenLogprob | None = None) -> None: ...
    def fail(self, error: BaseException, status: int = 500) -> None: ...


@dataclass(frozen=True, eq=False)
class _Chance:
    """What one request may choose from."""

    request: Sampled
    given: Floats  # as the model gave it, without what is no token
    row: Floats  # what its grammar allows
    banned: Set[int]


def has_number(row: Floats) -> bool:
    """Whether there is any logit but NaN and -inf. Where there is none, neither is what was computed for later rows.

    Nothing but zeros counts as none: some of ggml's products make those of what is no number.
    """
    greatest = row.max()  # NaN if there is one anywhere
    if np.isnan(greatest):
        return bool((row > -np.inf).any())
    return bool(greatest > -np.inf and (greatest != 0 or row.any()))


def sample(logits: Floats | Sequence[Floats], requests: Sequence[Sampled]) -> None:
    """Give each request its next token, or the error that ends it; then begin to compute what grammars allow next.

    Shapes: logits [n_rows, n_vocab], row i for requests[i]; rows beyond the requests are nobody's. They are not changed.
    There may be more columns than tokens, since embeddings are padded: those beyond are no tokens. Whatever goes wrong for
    one request ends that one alone.
    """
    free: list[_Chance] = []
    ready: list[tuple[Sampled, Floats, int | SampleError]] = []
    for request, row in zip(requests, logits, strict=False):
        with _Alone(request):
            given = row[: request.n_tokens]
            allowed = None if request.matcher is None else request.matcher.allowed()
            forced = request.forced_token
            if forced is not None and (allowed is None or is_allowed(forced, allowed)):
                ready.append((request, given, forced))
                continue
            shown = given if allowed is None else masked(given, allowed)
            free.append(_Chance(request, given, shown, request.banned_tokens))
    ready += [(chance.request, chance.given, token) for chance, token in _choose(free)]
    for request, given, token in ready:
        with _Alone(request):
            if isinstance(token, SampleError):
                request.fail(token)
            elif not request.is_cancelled:
                request.accept(token, _logprob(request, given, token) if request.wire.logprobs else None)
    constrained = [r.matcher for r in requests if r.matcher is not None and not r.is_done]
    if constrained:
        start_masks(constrained)


class _Alone:
    """A block whose error ends the request that it is about, and nobody else's."""

    def __init__(self, request: Sampled) -> None:
        self._request = request

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None:
            return False
        is_grammar = isinstance(error, GrammarError)
        if not is_grammar:
            log.error("choosing a token has failed", exc_info=error)
        self._request.fail(error, status=400 if is_grammar else 500)
        return True


def _choose(chances: Sequence[_Chance]) -> list[tuple[_Chance, int | SampleError]]:
    """A token for each; those whose options cannot be computed with are left out, and have ended."""
    try:
        return list(zip(chances, _tokens_of(chances), strict=True))
    except BaseException:
        log.exception("choosing tokens together has failed, each is chosen alone")
    found: list[tuple[_Chance, int | SampleError]] = []
    for chance in chances:
        with _Alone(chance.request):
            found.append((chance, _tokens_of([chance])[0]))
    return found


def _tokens_of(chances: Sequence[_Chance]) -> list[int | SampleError]:
    """A token of each row that is not banned.

    Bans copy the row, and the greatest logit is seldom a banned token's: who is greedy gets them only then.
    """
    rows = [c.row if c.request.sampler.is_greedy else without(c.row, c.banned) for c in chances]
    tokens = sample_batch(rows, [c.request.sampler for c in chances])
    for i, chance in enumerate(chances):
        if tokens[i] in chance.banned:
            (tokens[i],) = sample_batch([without(chance.row, chance.banned)], [chance.request.sampler])
        if isinstance(tokens[i], SampleError) and chance.banned and chance.request.matcher is not None:
            (tokens[i],) = sample_batch([chance.row], [chance.request.sampler])  # the grammar allows nothing but the end
    return tokens


def without(row: Floats, banned: Set[int]) -> Floats:
    """A copy of the row in which the banned tokens have no chance; the row itself when there are none."""
    if not banned:
        return row
    result = row.copy()
    result[[token for token in banned if token < len(row)]] = -np.inf
    return result


def _logprob(request: Sampled, row: Floats, token: int) -> TokenLogprob:
    own, top = top_logprobs(row, token, request.wire.top_logprobs)
    return TokenLogprob(
        text=request.text_of(token),
        logprob=own,
        top=[TokenLogprob(text=request.text_of(other), logprob=logprob) for other, logprob in top],
    )
