"""One request's way of choosing tokens: its options as steps in an order, random numbers, what it remembers of its text.

Knows nothing of models, tokenizers or scheduling, nor of other requests (puna.sample.choice).

A bias comes first. Then the steps of ``samplers`` in their order, by default llama.cpp's: penalties → DRY → top-n-sigma →
top-k → typical-p → top-p → min-p → XTC → temperature; a step that is not named is not done. Mirostat takes the place of all
steps that cut. At temperature zero the greatest logit is taken, after bias, penalties and DRY; no step that cuts could
change it but those that cut away what is likeliest, and who asks for zero wants exactly that.

With a seed a request draws the same tokens from the same logits whatever else is in the batch: it owns its generator, and
takes one number per token from it, with XTC two.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from puna.errors import PunaError
from puna.sample import transforms
from puna.sample.dry import Breakers, Repetition
from puna.sample.recent import RecentTokens
from puna.sample.transforms import Doubles, Floats, Ids
from puna.wire import SamplingOptions

BIAS, MIROSTAT = "logit_bias", "mirostat"
RESCORING = (BIAS, "penalties", "dry")  # steps that change some tokens' logits; the others cut, or change all

MIROSTAT_TOP = 100  # of the likeliest tokens, those whose fall mirostat 1 looks at

_COLDEST = 1e-30  # a temperature below would overflow, and there is nothing left to tell apart


class SampleError(PunaError):
    """No token can be chosen from a row of logits; only that request fails."""


class Change(NamedTuple):
    """New logits for some distinct tokens; *of* is told the old ones, and which of the tokens they are."""

    tokens: Ids
    of: Callable[[Doubles, Ids], Doubles]


def _between(low: float, value: float, high: float) -> float:
    return min(max(value, low), high)


class Sampler:
    """*n_ctx* is what a window of -1 means; 0: every token the request has seen. *breakers* are those of DRY."""

    def __init__(
        self, options: SamplingOptions, *, request_id: str = "", n_ctx: int = 0, breakers: Breakers | None = None
    ) -> None:
        self.request_id = request_id
        self.temperature = _between(0.0, options.temperature, 1e9)
        self.top_k = options.top_k
        self.top_p = _between(0.0, options.top_p, 1.0)
        self.min_p = _between(0.0, options.min_p, 1.0)
        self.typical_p = _between(0.0, options.typical_p, 1.0)
        self.top_n_sigma = min(options.top_n_sigma, 1e6)
        self.xtc_probability = _between(0.0, options.xtc_probability, 1.0)
        self.xtc_threshold = max(options.xtc_threshold, 0.0)
        self._repeat = min(options.repeat_penalty, 1e6) if options.repeat_penalty > 0 else 1.0  # zero or less: off
        self._presence = _between(-1e6, options.presence_penalty, 1e6)
        self._frequency = _between(-1e6, options.frequency_penalty, 1e6)
        self._bias = _bias(options.logit_bias)
        self.mirostat = options.mirostat if options.mirostat in (1, 2) else 0
        self.mu = 2 * options.mirostat_tau  # bits
        self._tau, self._eta = options.mirostat_tau, options.mirostat_eta
        self._surprise: tuple[int, float] | None = None  # of the token that was chosen and not accepted yet
        self._recent = self._recent_tokens(options, n_ctx)
        self._repetition = _repetition(options, n_ctx, breakers or {}) if "dry" in options.samplers else None
        self.order = self._order(options.samplers)
        self.steps = frozenset(step for step in self.order if self._changes_anything(step))
        self.is_greedy = self._is_greedy()
        self.temperature = max(self.temperature, _COLDEST)
        self._rng: random.Random | None = None
        if not self.is_greedy:
            seed = None if options.seed == -1 else options.seed & (2**64 - 1)
            self._rng = random.Random(seed)

    def _order(self, samplers: Sequence[str]) -> tuple[str, ...]:
        if self.mirostat:
            return (BIAS, *(step for step in samplers if step in RESCORING), "temperature", MIROSTAT)
        return (BIAS, *samplers)

    def _changes_anything(self, step: str) -> bool:
        return {
            BIAS: self._bias is not None,
            "penalties": self._recent is not None,
            "dry": self._repetition is not None,
            "top_n_sigma": self.top_n_sigma > 0,
            "top_k": self.top_k > 0,
            "typical_p": self.typical_p < 1,
            "top_p": self.top_p < 1,
            "min_p": self.min_p > 0,
            "xtc": self.xtc_probability > 0 and self.xtc_threshold <= 0.5,  # above it there are never two to choose from
            "temperature": self.temperature != 1,
            MIROSTAT: True,
        }[step]

    def _is_greedy(self) -> bool:
        """Whether there is nothing to draw: who keeps one token keeps the likeliest, unless a step before cuts that away."""
        if self.temperature == 0 and "temperature" in self.order:
            return True
        if self.top_k != 1 or "top_k" not in self.order:
            return False
        before = self.order[: self.order.index("top_k")]
        return self.steps.isdisjoint({"xtc", "typical_p"}.intersection(before))

    def _recent_tokens(self, options: SamplingOptions, n_ctx: int) -> RecentTokens | None:
        has_penalty = self._repeat != 1 or self._presence != 0 or self._frequency != 0
        window = options.repeat_last_n if options.repeat_last_n >= 0 else (n_ctx or -1)
        return RecentTokens(window) if has_penalty and window != 0 and "penalties" in options.samplers else None

    def accept(self, token: int) -> None:
        """Count a token as part of the text; penalties, DRY and mirostat go by it from now on."""
        if self._recent is not None:
            self._recent.append(token)
        if self._repetition is not None:
            self._repetition.append(token)
        if self._surprise is not None:
            chosen, surprise = self._surprise
            if chosen == token:
                self.mu -= self._eta * (surprise - self._tau)
            self._surprise = None

    def accept_many(self, tokens: Sequence[int]) -> None:
        """The same for several, as for a prompt."""
        if self._recent is not None:
            self._recent.extend(tokens)
        if self._repetition is not None:
            self._repetition.extend(tokens)

    def surprised(self, token: int, probability: float) -> None:
        """The token that is chosen was so likely among those that mirostat had left."""
        self._surprise = token, -float(np.log2(probability))

    def change(self, step: str) -> Change | None:
        """What one of RESCORING does now; None when it does nothing."""
        if step == BIAS:
            assert self._bias is not None
            tokens, biases = self._bias
            return Change(tokens, lambda values, which: values + biases[which])
        if step == "dry":
            assert self._repetition is not None
            tokens, amounts = self._repetition.penalties
            return Change(tokens, lambda values, which: values - amounts[which]) if len(tokens) else None
        assert self._recent is not None
        tokens, counts = self._recent.distinct
        return Change(tokens, lambda values, which: self._penalized(values, counts[which])) if len(tokens) else None

    def _penalized(self, values: Doubles, counts: Ids) -> Doubles:
        return transforms.penalize(values, counts, repeat=self._repeat, presence=self._presence, frequency=self._frequency)

    def rescored(self, row: Floats) -> Floats:
        """The row after this request's bias, penalties and DRY: a copy, or the row itself when nothing applies."""
        for step in self.order:
            if step in RESCORING and step in self.steps and (change := self.change(step)) is not None:
                row = rescored(row, change)
        return row

    def uniform(self) -> float:
        """The next number in [0, 1) of this request's own sequence."""
        assert self._rng is not None, "a greedy request draws nothing"
        return self._rng.random()

    def no_token(self) -> SampleError:
        name = f"request {self.request_id}: " if self.request_id else ""
        return SampleError(f"{name}no token can be chosen: the model's output has only NaN, -inf or zeros, check the model")


def rescored(row: Floats, change: Change) -> Floats:
    """A copy of a whole row; tokens outside the vocabulary (places that images fill) are passed over."""
    which = np.flatnonzero((change.tokens >= 0) & (change.tokens < len(row)))
    tokens = change.tokens[which]
    result = row.copy()
    with np.errstate(over="ignore"):  # beyond float32 is infinite, which the steps after this one understand
        result[tokens] = change.of(row[tokens].astype(np.float64), which)
    return result


def _bias(given: Mapping[int, float]) -> tuple[Ids, Doubles] | None:
    if not given:
        return None
    return np.array(list(given), np.int64), np.clip(np.array(list(given.values()), np.float64), -1e30, 1e30)


def _repetition(options: SamplingOptions, n_ctx: int, breakers: Breakers) -> Repetition | None:
    n_last = options.dry_penalty_last_n
    window = min(n_last, n_ctx or n_last) if n_last >= 0 else (n_ctx or 1 << 62)
    multiplier = _between(-1e6, options.dry_multiplier, 1e6)
    if not multiplier or options.dry_base < 1 or not window:
        return None
    return Repetition(multiplier, min(options.dry_base, 1e6), options.dry_allowed_length, window, breakers)
