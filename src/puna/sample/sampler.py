"""Choosing the next token of each sequence in a batch.

Knows nothing of models, tokenizers or scheduling: logits in, tokens out.

Order: penalties → the greatest logit if greedy; else top-k → temperature → softmax → typical-p → top-p → min-p → draw.
It is the order of Ollama's own engine, so the same options keep the same candidates (llama.cpp's default chain divides
by the temperature last). Penalties come first because they are about logits, top-k next because it is the only step
that makes the vocabulary small. typical-p is a choice of its own on the whole distribution, so it comes before the two
that cut the tail, and top-p then works on what it left, normalised again.

With a seed a request draws the same tokens from the same logits whatever else is in the batch: it owns its generator,
takes exactly one number per token from it, and no arithmetic mixes rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from puna.errors import PunaError
from puna.sample import transforms
from puna.sample.recent import RecentTokens
from puna.sample.transforms import Doubles, Floats, Ids
from puna.wire import SamplingOptions

NARROW = 1024  # rows with at most this many candidates are computed together, wider ones each alone
FIRST_PREFIX = 256  # candidates first tried when top-p alone cuts the vocabulary


class SampleError(PunaError):
    """No token can be chosen from a row of logits; only that request fails."""


def _between(low: float, value: float, high: float) -> float:
    return min(max(value, low), high)


class Sampler:
    """One request's way of choosing tokens: options, random numbers, recent tokens.

    n_ctx is what ``repeat_last_n = -1`` means; 0: every token the request has seen.
    """

    def __init__(self, options: SamplingOptions, *, request_id: str = "", n_ctx: int = 0) -> None:
        self.request_id = request_id
        self.temperature = _between(0.0, options.temperature, 1e9)
        self.top_k = options.top_k
        self.top_p = _between(0.0, options.top_p, 1.0)
        self.min_p = _between(0.0, options.min_p, 1.0)
        self.typical_p = _between(0.0, options.typical_p, 1.0)
        self.repeat_penalty = min(options.repeat_penalty, 1e6) if options.repeat_penalty > 0 else 1.0  # zero or less: off
        self.presence_penalty = _between(-1e6, options.presence_penalty, 1e6)
        self.frequency_penalty = _between(-1e6, options.frequency_penalty, 1e6)
        self.is_greedy = self.temperature == 0 or self.top_k == 1
        has_penalty = self.repeat_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        window = options.repeat_last_n if options.repeat_last_n >= 0 else (n_ctx or -1)
        self._recent = RecentTokens(window) if has_penalty and window != 0 else None
        self._rng: np.random.Generator | None = None
        if not self.is_greedy:
            seed = None if options.seed == -1 else options.seed & (2**64 - 1)
            self._rng = np.random.Generator(np.random.PCG64(seed))

    def accept(self, token: int) -> None:
        """Count a token as recent; the penalties apply to it from now on. Costs nothing without penalties."""
        if self._recent is not None:
            self._recent.append(token)

    def accept_many(self, tokens: Sequence[int]) -> None:
        """The same for several, as for a prompt."""
        if self._recent is not None:
            self._recent.extend(tokens)

    def penalized(self, row: Floats) -> Floats:
        """The row after this request's penalties: a copy, or the row itself when nothing applies."""
        if self._recent is None:
            return row
        tokens, counts = self._recent.distinct
        if not len(tokens):
            return row
        return transforms.penalize(
            row,
            tokens,
            counts,
            repeat=self.repeat_penalty,
            presence=self.presence_penalty,
            frequency=self.frequency_penalty,
        )

    def uniform(self) -> float:
        """The next number in [0, 1) of this request's own sequence."""
        assert self._rng is not None, "a greedy request draws nothing"
        return self._rng.random()

    def no_token(self) -> SampleError:
        name = f"request {self.request_id}: " if self.request_id else ""
        return SampleError(f"{name}no token can be chosen: the model's output has only NaN or -inf, check the model")


def sample_batch(logits: Floats | Sequence[Floats], samplers: Sequence[Sampler]) -> list[int | SampleError]:
    """Choose one token per row; a row of nothing but NaN and -inf gives its error in the token's place.

    Shapes: logits [n_rows, n_vocab], or as many rows; row i belongs to samplers[i]. The logits are not changed, and the
    tokens are not accepted: the caller does that once it keeps them.
    """
    if len(logits) != len(samplers) or any(row.ndim != 1 for row in logits):
        raise ValueError(f"logits of shape {np.shape(logits)} for {len(samplers)} samplers")
    result: list[int | SampleError] = [0] * len(samplers)
    narrow: list[tuple[int, Ids, Floats]] = []  # row number, candidates, their logits
    for i, sampler in enumerate(samplers):
        row = sampler.penalized(logits[i])
        if sampler.is_greedy:
            token = transforms.argmax(row)
            result[i] = token if token >= 0 else sampler.no_token()
        elif 0 < sampler.top_k <= min(NARROW, len(row) - 1):
            ids = transforms.top_k(row, sampler.top_k)
            if len(ids):
                narrow.append((i, ids, row[ids]))
            else:
                result[i] = sampler.no_token()
        else:
            result[i] = _sample_wide(row, sampler)
    if narrow:
        tokens = _sample_narrow([(ids, values) for _, ids, values in narrow], [samplers[i] for i, _, _ in narrow])
        for (i, _, _), token in zip(narrow, tokens, strict=True):
            result[i] = token
    return result


def _sample_narrow(candidates: Sequence[tuple[Ids, Floats]], samplers: Sequence[Sampler]) -> list[int]:
    """Rows of a few candidates each, greatest first, computed together; short rows are padded with -inf."""
    width = max(len(ids) for ids, _ in candidates)
    values = np.full((len(candidates), width), -np.inf, np.float32)
    for row, (_, logits) in zip(values, candidates, strict=True):
        row[: len(logits)] = logits
    probs = transforms.softmax(values, np.array([s.temperature for s in samplers]))
    chosen = _filter_and_draw(probs, samplers)
    return [int(ids[index]) for (ids, _), index in zip(candidates, chosen, strict=True)]


def _filter_and_draw(probs: Doubles, samplers: Sequence[Sampler]) -> Ids:
    """typical-p, top-p, min-p and the draw on rows of descending probabilities; they are overwritten."""
    typical = [i for i, s in enumerate(samplers) if s.typical_p < 1]
    if typical:
        part = probs[typical]
        part *= transforms.keep_typical_p(part, np.array([samplers[i].typical_p for i in typical]))
        part /= part.cumsum(axis=1)[:, -1:]
        probs[typical] = part
    # Both cuts look at the same probabilities: what top-p removes is never the maximum that min-p compares with.
    keep = transforms.keep_top_p(probs, np.array([s.top_p for s in samplers]))
    if any(s.min_p > 0 for s in samplers):
        keep &= transforms.keep_min_p(probs, np.array([s.min_p for s in samplers]))
    probs *= keep
    return transforms.draw(probs, np.array([s.uniform() for s in samplers]))


def _sample_wide(row: Floats, sampler: Sampler) -> int | SampleError:
    """One row of which many candidates remain: top-k is off, or greater than NARROW."""
    row = transforms.without_nan(row)
    if not row.max() > -np.inf:
        return sampler.no_token()
    if sampler.typical_p < 1 or 0 < sampler.top_k < len(row):
        ids = transforms.top_k(row, sampler.top_k)
        return _sample_narrow([(ids, row[ids])], [sampler])[0]
    probs = transforms.softmax(row[None], sampler.temperature)
    if sampler.top_p < 1:
        ids, probs = _prefix_above(row, probs, sampler.top_p)
        return int(ids[_filter_and_draw(probs, [sampler])[0]])
    if sampler.min_p > 0:
        probs *= transforms.keep_min_p(probs, np.array([sampler.min_p]))
    return int(transforms.draw(probs, np.array([sampler.uniform()]))[0])


def _prefix_above(row: Floats, probs: Doubles, p: float) -> tuple[Ids, Doubles]:
    """The likeliest tokens, greatest first, as many as top-p needs: mostly a few hundred, so no sort of the rest."""
    n = FIRST_PREFIX
    while True:
        ids = transforms.top_k(row, n)
        prefix = probs[:, ids]
        if len(ids) < n or n >= len(row) or prefix.cumsum(axis=1)[0, -1] > p:
            return ids, prefix
        n = min(n * 8, len(row))
