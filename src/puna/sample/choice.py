"""The next token of each sequence in a batch: logits in, tokens out.

Each row is first narrowed alone, with the steps that look at the whole vocabulary, until few candidates are left. Those of
all rows are then computed together, step by step, each row with its own options. No arithmetic mixes rows: a batch gives
each row bit for bit what it gets alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from puna.sample import transforms
from puna.sample.sampler import MIROSTAT, MIROSTAT_TOP, RESCORING, SampleError, Sampler, rescored
from puna.sample.transforms import Doubles, Floats, Ids, Mask

NARROW = 1024  # rows with at most this many candidates are computed together, wider ones each alone
FIRST_PREFIX = 256  # candidates first tried when top-p alone cuts the vocabulary


def sample_batch(logits: Floats | Sequence[Floats], samplers: Sequence[Sampler]) -> list[int | SampleError]:
    """Choose one token per row; a row of nothing but NaN and -inf gives its error in the token's place.

    Shapes: logits [n_rows, n_vocab], or as many rows; row i belongs to samplers[i]. The logits are not changed, and the
    tokens are not accepted: the caller does that once it keeps them.
    """
    if len(logits) != len(samplers) or any(row.ndim != 1 for row in logits):
        raise ValueError(f"logits of shape {np.shape(logits)} for {len(samplers)} samplers")
    result: list[int | SampleError] = [0] * len(samplers)
    found: list[_Candidates] = []
    numbers: list[int] = []
    for i, sampler in enumerate(samplers):
        if sampler.is_greedy:
            token = transforms.argmax(sampler.rescored(logits[i]))
            result[i] = token if token >= 0 else sampler.no_token()
        elif (candidates := _narrowed(logits[i], sampler)) is not None:
            found.append(candidates)
            numbers.append(i)
        else:
            result[i] = sampler.no_token()
    for group in _groups(found):
        tokens = _drawn([found[at] for at in group])
        for at, token in zip(group, tokens, strict=True):
            result[numbers[at]] = token
    return result


def distribution(row: Floats, sampler: Sampler) -> tuple[Ids, Doubles]:
    """Tokens, and the probabilities with which the next one is drawn from them: what is left of a row in the end.

    Errors: SampleError.
    """
    if sampler.is_greedy:
        return np.array([transforms.argmax(sampler.rescored(row))]), np.ones(1)
    candidates = _narrowed(row, sampler)
    if candidates is None:
        raise sampler.no_token()
    ids, values = _cut([candidates])
    probs = transforms.softmax(values)[0]
    return ids[0][probs > 0], probs[probs > 0]


@dataclass(frozen=True, eq=False)
class _Candidates:
    """What is left of one row: tokens and their logits, greatest first unless no step is left to do."""

    sampler: Sampler
    ids: Ids
    values: Doubles
    n_done: int  # steps of the sampler's order


def _groups(found: Sequence[_Candidates]) -> list[list[int]]:
    """Which of them are computed together: those with the same order of steps; wide ones each alone."""
    together: dict[tuple[str, ...], list[int]] = defaultdict(list)
    groups: list[list[int]] = []
    for at, candidates in enumerate(found):
        if len(candidates.ids) > NARROW:
            groups.append([at])
        else:
            together[candidates.sampler.order].append(at)
    return [*groups, *together.values()]


def _drawn(group: Sequence[_Candidates]) -> list[int]:
    ids, values = _cut(group)
    probs = transforms.softmax(values)
    chosen = transforms.draw(probs, np.array([c.sampler.uniform() for c in group]))
    tokens = [int(row[index]) for row, index in zip(ids, chosen, strict=True)]
    for candidates, token, row, index in zip(group, tokens, probs, chosen, strict=True):
        if candidates.sampler.mirostat:
            candidates.sampler.surprised(token, float(row[index]))
    return tokens


# One row, and the whole vocabulary.


def _narrowed(row: Floats, sampler: Sampler) -> _Candidates | None:
    """Do steps until few candidates are left, or until one needs them in order; None when there is none.

    The temperature is kept apart until then: most steps do not mind it, and a copy of the row is saved.
    """
    temperature = 1.0
    for number, step in enumerate(sampler.order):
        if step not in sampler.steps:
            continue
        if step in RESCORING:
            if (change := sampler.change(step)) is not None:
                row, temperature = rescored(_divided(row, temperature), change), 1.0
        elif step == "temperature":
            temperature = sampler.temperature
        elif step != "top_k":
            row, is_possible = _usable(row)
            if not is_possible:
                return None
            ids, is_done = _kept(step, row, temperature, sampler)
            return _Candidates(sampler, ids, _scaled(row[ids], temperature), number + is_done)
        elif sampler.top_k < len(row):
            ids = transforms.top_k(row, sampler.top_k)
            values = np.minimum(row[ids], np.float32(transforms.GREATEST))
            return _Candidates(sampler, ids, _scaled(values, temperature), number + 1) if len(ids) else None
    row, is_possible = _usable(row)
    if not is_possible:
        return None
    return _Candidates(sampler, np.arange(len(row)), _scaled(row, temperature), len(sampler.order))


def _usable(row: Floats) -> tuple[Floats, bool]:
    """Without NaN and +inf, which no sum survives; and whether anything is above -inf. The row itself where it can be."""
    greatest = row.max()
    if np.isnan(greatest):
        row = transforms.without_nan(row)
        greatest = row.max()
    if greatest == np.inf:
        row = np.minimum(row, np.float32(transforms.GREATEST))
    return row, bool(greatest > -np.inf)


def _divided(row: Floats, temperature: float) -> Floats:
    return row if temperature == 1 else (_usable(row)[0] / temperature).astype(np.float32)


def _scaled(values: Floats, temperature: float) -> Doubles:
    return values.astype(np.float64) if temperature == 1 else np.divide(values, temperature, dtype=np.float64)


def _kept(step: str, row: Floats, temperature: float, sampler: Sampler) -> tuple[Ids, bool]:
    """The tokens that a step leaves, greatest first, and whether it is done: some only want the row in order."""
    one = row[None]
    if step == "top_n_sigma":
        return _in_order(row, transforms.keep_top_n_sigma(one, np.array([sampler.top_n_sigma]))[0]), True
    if step == "min_p":
        return _in_order(row, one[0] >= row.max() + temperature * np.log(sampler.min_p)), True
    if step == "top_p":
        return _prefix_above(row, temperature, sampler.top_p), True
    if step == MIROSTAT:
        return _of_mirostat(row, temperature, sampler), True
    return transforms.top_k(row, 0), False


def _in_order(row: Floats, keep: Mask) -> Ids:
    ids = np.flatnonzero(keep & (row > -np.inf))
    return ids[transforms.descending(row[ids])]


def _prefix_above(row: Floats, temperature: float, p: float) -> Ids:
    """The likeliest tokens, greatest first, as many as top-p keeps: mostly a few hundred, so no sort of the rest."""
    probs = transforms.softmax(row[None], temperature)
    n = FIRST_PREFIX
    while True:
        ids = transforms.top_k(row, n)
        prefix = probs[:, ids]
        if len(ids) < n or n >= len(row) or prefix.cumsum(axis=1)[0, -1] > p:
            kept: Ids = ids[transforms.keep_top_p(prefix, np.array([p]))[0]]
            return kept
        n = min(n * 8, len(row))


def _of_mirostat(row: Floats, temperature: float, sampler: Sampler) -> Ids:
    """What keeps the surprise of the token that is drawn near the one that is wished for."""
    if sampler.mirostat == 1:
        top = transforms.top_k(row, min(MIROSTAT_TOP, len(row)))
        return transforms.top_k(row, transforms.mirostat_k(row[top].astype(np.float64) / temperature, len(row), sampler.mu))
    probs = transforms.softmax(row[None], temperature)[0]
    with np.errstate(divide="ignore"):
        ids = _in_order(row, -np.log2(probs) <= sampler.mu)
    return ids if len(ids) else transforms.top_k(row, 1)


# Several rows of few candidates.


def _cut(group: Sequence[_Candidates]) -> tuple[Ids, Doubles]:
    """Do the steps that are left, for all rows at once: tokens and logits, what is cut being -inf. Shapes [n_rows, width]."""
    ids, values = _together(group)
    for number, step in enumerate(group[0].sampler.order):
        rows = [row for row, c in enumerate(group) if c.n_done <= number and step in c.sampler.steps]
        if not rows:
            continue
        if step in RESCORING:
            for row in rows:
                _rescore(ids[row], values[row], group[row].sampler, step)
            continue
        samplers = [group[row].sampler for row in rows]
        if len(rows) == len(group):
            values = _STEPS[step](values, samplers)
        else:
            values[rows] = _STEPS[step](values[rows], samplers)
    return ids, values


def _together(group: Sequence[_Candidates]) -> tuple[Ids, Doubles]:
    """Rows side by side; short ones are filled up with what cannot be drawn."""
    if len(group) == 1:
        return group[0].ids[None], group[0].values[None]
    width = max(len(c.ids) for c in group)
    ids = np.zeros((len(group), width), np.int64)
    values = np.full((len(group), width), -np.inf)
    for row, c in enumerate(group):
        ids[row, : len(c.ids)], values[row, : len(c.ids)] = c.ids, c.values
    return ids, values


def _rescore(ids: Ids, values: Doubles, sampler: Sampler, step: str) -> None:
    """Change one row in place, and put it in order again."""
    change = sampler.change(step)
    if change is None:
        return
    possible = np.flatnonzero(values > -np.inf)
    _, at, which = np.intersect1d(ids[possible], change.tokens, assume_unique=True, return_indices=True)
    places = possible[at]
    values[places] = change.of(values[places], which)
    order = np.lexsort((ids, -values))
    ids[:], values[:] = ids[order], values[order]


def _only(values: Doubles, keep: Mask) -> Doubles:
    return np.where(keep, values, -np.inf)


def _top_k(values: Doubles, samplers: Sequence[Sampler]) -> Doubles:
    return _only(values, transforms.keep_top_k(values, np.array([s.top_k for s in samplers])))


def _top_p(values: Doubles, samplers: Sequence[Sampler]) -> Doubles:
    return _only(values, transforms.keep_top_p(transforms.softmax(values), np.array([s.top_p for s in samplers])))


def _typical_p(values: Doubles, samplers: Sequence[Sampler]) -> Doubles:
    return _only(values, transforms.keep_typical_p(transforms.softmax(values), np.array([s.typical_p for s in samplers])))


def _min_p(values: Doubles, samplers: Sequence[Sampler]) -> Doubles:
    return _only(values, transforms.keep_min_p(values, np.array([s.min_p for s in samplers])))


def _top_n_sigma(values: Doubles, samplers: Sequence[Sampler]) -> Doubles:
    return _only(values, transforms.keep_top_n_sigma(values, np.array([s.top_n_sigma for s in samplers])))


def _temperature(values: Doubles, samplers: Sequence[Sampler]) -> Doubles:
    divided: Doubles = values / np.array([s.temperature for s in samplers])[:, None]
    return divided


def _xtc(values: Doubles, samplers: Sequence[Sampler]) -> Doubles:
    """Each request draws whether it is done this time, also where nothing could be cut."""
    is_meant = np.array([s.uniform() <= s.xtc_probability for s in samplers])
    keep = transforms.without_top_choices(transforms.softmax(values), np.array([s.xtc_threshold for s in samplers]))
    return _only(values, keep | ~is_meant[:, None])


_STEPS: dict[str, Callable[[Doubles, Sequence[Sampler]], Doubles]] = {
    "top_k": _top_k,
    "top_p": _top_p,
    "typical_p": _typical_p,
    "min_p": _min_p,
    "top_n_sigma": _top_n_sigma,
    "temperature": _temperature,
    "xtc": _xtc,
}
