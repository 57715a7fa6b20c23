"""From logits to a token, as pure functions on numpy arrays.

Knows nothing of requests, tokenizers or tensors of a model. One row is the logits of one position; functions that take
``[n_rows, n]`` treat each row on its own, and give it bit for bit what they give it alone: sums run in order
(``cumsum``), so zeros that pad a row on the right change nothing.

Everywhere a NaN counts as -inf, and of equal logits the lower token comes first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]

GREATEST = float(np.finfo(np.float32).max)
BLOCK = 48  # elements under one maximum when the best k are looked for; anything from 16 to 64 is as fast


def without_nan(row: Floats) -> Floats:
    """The row with -inf for each NaN; the row itself when it has none."""
    bad = np.isnan(row)
    return np.where(bad, np.float32(-np.inf), row) if bad.any() else row


def argmax(row: Floats) -> int:
    """The first of the greatest logits; -1 when nothing is above -inf."""
    best = int(row.argmax())
    value = row[best]
    if value > -np.inf:
        return best
    if np.isnan(value):  # argmax stops at the first NaN
        clean = without_nan(row)
        best = int(clean.argmax())
        value = clean[best]
    return best if value > -np.inf else -1


def descending(values: Floats) -> Ids:
    """Indices that sort *values* from greatest to least, equal ones by index. No NaN."""
    n = len(values)
    if n < 512:
        return np.argsort(-values, kind="stable")
    # A stable argsort of a whole vocabulary costs 9 ms, sorting one unsigned key of (value, index) costs 1 ms.
    bits = (-values + np.float32(0)).view(np.uint32)  # + 0 turns -0.0 into 0.0: they are equal
    negative = (bits >> np.uint32(31)).astype(np.bool_)
    ordered = np.where(negative, ~bits, bits | np.uint32(1 << 31))
    keys = (ordered.astype(np.uint64) << np.uint64(32)) | np.arange(n, dtype=np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


def top_k(row: Floats, k: int) -> Ids:
    """The k greatest logits' indices, greatest first; fewer when fewer are above -inf. k <= 0: all.

    Exact without sorting the row: each of the k greatest block maxima is an element, so the k-th of them bounds the
    k-th element from below, and whatever belongs to the answer is in a block whose maximum is not below that. Blocks are
    strided (elements i, i + n, i + 2n, ...), which makes their maxima a few vector operations on whole lines.
    """
    n = len(row)
    k = n if k <= 0 else min(k, n)
    n_blocks = n // BLOCK
    if 4 * k <= n_blocks:
        maxima = row[: n_blocks * BLOCK].reshape(BLOCK, n_blocks).max(axis=0)
        if np.isnan(maxima.max()):
            return top_k(without_nan(row), k)
        bound = np.partition(maxima, n_blocks - k)[n_blocks - k]
        ids = _not_below(bound, row, maxima) if bound > -np.inf else np.flatnonzero(row > -np.inf)
    else:
        row = without_nan(row)
        bound = np.partition(row, n - k)[n - k]
        ids = np.flatnonzero(row >= bound) if bound > -np.inf else np.flatnonzero(row > -np.inf)
    values = row[ids]
    if len(ids) > 2 * k + 64:  # many equal logits, or blocks that hold several of the best
        bound = np.partition(values, len(ids) - k)[len(ids) - k]
        above, equal = np.flatnonzero(values > bound), np.flatnonzero(values == bound)
        keep = np.sort(np.concatenate([above, equal[: k - len(above)]]))
        ids, values = ids[keep], values[keep]
    chosen: Ids = ids[descending(values)[:k]]
    return chosen


def _not_below(bound: np.float32, row: Floats, maxima: Floats) -> Ids:
    """Indices, ascending, of what is at least *bound* in the row; maxima are those of its blocks."""
    n = len(maxima)
    blocks = np.flatnonzero(maxima >= bound)
    whole, rest = row[: n * BLOCK].reshape(BLOCK, n), row[n * BLOCK :]
    lines, columns = np.divmod(np.flatnonzero(whole.take(blocks, axis=1) >= bound), len(blocks))
    return np.concatenate([lines * n + blocks[columns], n * BLOCK + np.flatnonzero(rest >= bound)])


def penalize(values: Doubles, counts: Ids, *, repeat: float = 1.0, presence: float = 0.0, frequency: float = 0.0) -> Doubles:
    """Logits of tokens that were seen *counts* times each, made less likely.

    repeat divides positive logits and multiplies others; then presence is subtracted once, frequency per occurrence.
    """
    values = np.where(values > 0, values / repeat, values * repeat)
    values -= counts * frequency + presence
    return values


def softmax(logits: Floats | Doubles, temperature: Doubles | float = 1.0) -> Doubles:
    """Probabilities of each row of ``[n_rows, n]`` after division by its temperature, which is above zero.

    The maximum is subtracted first, so neither great logits nor a tiny temperature can overflow. +inf counts as the
    greatest finite number. Every row needs one element above -inf.
    """
    x = np.minimum(logits, GREATEST, dtype=np.float64)
    x -= np.maximum.reduce(x, axis=1, keepdims=True)
    x /= np.reshape(temperature, (-1, 1))
    np.exp(x, out=x)
    x /= x.cumsum(axis=1)[:, -1:]
    return x


def keep_top_p(probs: Doubles, p: Doubles) -> Mask:
    """The shortest prefix of each descending row whose sum is above its p, the token that crosses included.

    At least one is kept; from p = 1 on, all.
    """
    total = probs.cumsum(axis=1)
    keep = np.ones(probs.shape, np.bool_)
    np.less_equal(total[:, :-1], np.where(p < 1, p, np.inf)[:, None], out=keep[:, 1:])
    return keep


def keep_top_k(logits: Doubles, k: Ids) -> Mask:
    """The first k of each descending row, of those above -inf."""
    possible = logits > -np.inf
    keep: Mask = possible & (possible.cumsum(axis=1) <= k[:, None])
    return keep


def keep_min_p(logits: Floats | Doubles, p: Doubles) -> Mask:
    """What is at least p times as likely as the row's likeliest; p above zero."""
    keep: Mask = logits >= logits.max(axis=1, keepdims=True) + np.log(p)[:, None]
    return keep


def keep_top_n_sigma(logits: Floats | Doubles, n: Doubles) -> Mask:
    """What is not below the row's greatest logit by more than n standard deviations of all that are above -inf.

    Source: Tang et al., Top-nσ: Not All Logits Are You Need, https://arxiv.org/abs/2411.07641.
    """
    possible = logits > -np.inf
    values = np.where(possible, logits, 0.0)
    count = possible.sum(axis=1, keepdims=True)
    mean = values.cumsum(axis=1)[:, -1:] / count
    deviations = np.where(possible, values - mean, 0.0)
    sigma = np.sqrt((deviations * deviations).cumsum(axis=1)[:, -1:] / count)
    keep: Mask = possible & (logits >= logits.max(axis=1, keepdims=True) - n[:, None] * sigma)
    return keep


def without_top_choices(probs: Doubles, threshold: Doubles) -> Mask:
    """All of each descending row but what is at least *threshold* likely; of that the least likely stays.

    Source: the sampler XTC in llama.cpp, designed by p-e-w.
    """
    above = probs >= threshold[:, None]
    place = np.arange(probs.shape[1])
    last = np.where(above, place, -1).max(axis=1, keepdims=True)
    keep: Mask = ~above | (place == last)
    return keep


def mirostat_k(logits: Doubles, n_vocab: int, mu: float) -> int:
    """How many of the likeliest tokens keep a draw's surprise near mu / 2 bits, judged by the greatest logits, descending.

    The probabilities are taken to fall as a power of the rank (Zipf's law), whose exponent is estimated from them.
    Source: Basu et al., Mirostat, https://arxiv.org/abs/2007.14966.
    """
    ranks = np.arange(1, len(logits))
    steps = np.log((ranks + 1) / ranks)
    slope = float((steps * -np.diff(logits)).sum() / (steps * steps).sum()) if len(logits) > 1 else 0.0
    epsilon = slope - 1
    with np.errstate(all="ignore"):  # a slope of exactly 0 or 1 has no such number: then all are kept
        k = np.power(epsilon * np.exp2(mu) / (1 - np.power(float(n_vocab), -epsilon)), 1 / np.float64(slope))
    return max(int(k), 1) if k < n_vocab else n_vocab


def keep_typical_p(probs: Doubles, p: Doubles) -> Mask:
    """The tokens whose surprise is nearest to the row's entropy, until their sum is above p; from p = 1 on, all.

    Source: Meister et al., Locally Typical Sampling, https://arxiv.org/abs/2202.00666.
    """
    with np.errstate(divide="ignore"):
        surprise = -np.log(probs)
    possible = probs > 0
    terms = np.zeros_like(probs)
    np.multiply(probs, surprise, out=terms, where=possible)
    entropy = terms.cumsum(axis=1)[:, -1:]
    distance = np.abs(surprise - entropy)  # of an impossible token: inf
    order = np.argsort(distance, axis=1, kind="stable")
    kept_in_order = keep_top_p(np.take_along_axis(probs, order, axis=1), p)
    keep = np.zeros_like(possible)
    np.put_along_axis(keep, order, kept_in_order, axis=1)
    return keep


def draw(weights: Doubles, uniform: Doubles) -> Ids:
    """The index in each row where the cumulated weight passes ``uniform`` (in [0, 1)) times the row's sum.

    An element of weight zero is never drawn.
    """
    total = weights.cumsum(axis=1)
    last = total[:, -1]
    target = np.minimum(uniform * last, np.nextafter(last, 0.0))  # the product may round up to the sum
    index: Ids = (total > target[:, None]).argmax(axis=1)
    return index
