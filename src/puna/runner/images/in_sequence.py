"""Images among the tokens of a sequence: where they stand, and what a batch must say of them. Arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from puna.runner.images.image import Image

Range = tuple[int, int]
Ints = npt.NDArray[np.int32]

N_AXES = 4


class ImageAt(NamedTuple):
    """An image whose first token is the one at *begin*."""

    image: Image
    begin: int

    @property
    def end(self) -> int:
        return self.begin + self.image.n_tokens

    @property
    def n_positions(self) -> int:
        """Along the axes of M-RoPE."""
        return self.image.placed.n_positions or self.image.n_tokens


Images = Sequence[ImageAt]
"""In order."""


def extents(images: Images) -> list[Range]:
    """What leaves a sequence as a whole."""
    return [(at.begin, at.end) for at in images]


def groups(images: Images) -> list[Range]:
    """What is computed in one step."""
    return [(at.begin + begin, at.begin + end) for at in images for begin, end in at.image.placed.together]


def bidirectional(images: Images, begin: int, end: int) -> list[Range]:
    """Of the tokens [begin, end): those that see each other."""
    found = [(at.begin + first, at.begin + last) for at in images for first, last in at.image.placed.bidirectional]
    return [(max(first, begin), min(last, end)) for first, last in found if first < end and last > begin]


def without(images: Images, begin: int, end: int) -> list[ImageAt]:
    """Those that are left when the tokens [begin, end) are gone; none of them is split."""
    n = end - begin
    return [at if at.end <= begin else at._replace(begin=at.begin - n) for at in images if at.end <= begin or at.begin >= end]


def position(images: Images, index: int) -> int:
    """Of a token that is in no image, along the axes of M-RoPE: fewer than tokens before it, where an image takes fewer."""
    return index - sum(at.image.n_tokens - at.n_positions for at in images if at.end <= index)


def axes(images: Images, begin: int, end: int) -> Ints:
    """Positions [4, end - begin] of the tokens [begin, end): text moves along the first three at once."""
    turned = np.zeros((N_AXES, end - begin), np.int32)
    at_text, index = position(images, begin), begin
    for at in images:
        if at.end <= begin or at.begin >= end:
            continue
        first, last = max(at.begin, begin), min(at.end, end)
        n_text = first - index
        turned[:3, index - begin : first - begin] = np.arange(at_text, at_text + n_text)
        start = position(images, at.begin)
        own = at.image.placed.axes
        if own is None:
            turned[:3, first - begin : last - begin] = start + np.arange(first - at.begin, last - at.begin)
        else:
            moved = own[:, first - at.begin : last - at.begin].copy()
            moved[:3] += start
            turned[:, first - begin : last - begin] = moved
        at_text, index = start + at.n_positions, last
    turned[:3, index - begin :] = np.arange(at_text, at_text + end - index)
    return turned


def have_axes(images: Images) -> bool:
    """Whether any of them has other positions than text would."""
    return any(at.image.placed.axes is not None or at.n_positions != at.image.n_tokens for at in images)


class Shown(NamedTuple):
    """Rows of a sequence that come as embeddings."""

    rows: Ints  # counted from where the step begins
    values: npt.NDArray[np.float32]


def shown(images: Images, begin: int, end: int) -> list[Shown]:
    """Of the tokens [begin, end): what of images stands in their places. The images are encoded."""
    found: list[Shown] = []
    for at in images:
        first, last = max(at.begin, begin), min(at.end, end)
        if first >= last:
            continue
        numbers = np.asarray(at.image.placed.rows[first - at.begin : last - at.begin], np.int64)
        places = np.flatnonzero(numbers >= 0)
        if len(places):
            assert at.image.rows is not None, "an image that is not encoded is not computed"
            found.append(Shown((places + first - begin).astype(np.int32), at.image.rows[numbers[places]]))
    return found


def looked_at(images: Images, at: ImageAt, n_most: int) -> list[ImageAt]:
    """What cross attention is given with an image: those too whose tokens stand directly before it, one after another, as the
    published model has it; of more rows than *n_most* the last images.
    """
    found = [at]
    n_rows = at.image.n_rows
    for earlier in reversed([one for one in images if one.begin < at.begin]):
        n_rows += earlier.image.n_rows
        if earlier.end != found[0].begin or n_rows > n_most:
            break
        found.insert(0, earlier)
    return found


def _needed(images: Images, at: ImageAt, n_looked_at: int) -> list[ImageAt]:
    """What must be encoded before this image's tokens are computed."""
    return looked_at(images, at, n_looked_at) if n_looked_at else [at]


def n_ready(images: Images, n_computed: int, n_tokens: int, n_looked_at: int) -> int:
    """Of so many tokens, those that may be computed: as far as images are encoded.

    Where images are looked at by cross attention, so many rows at once, one at a time: a step that has one begins with it.
    """
    for at in images:
        if at.end > n_computed and any(one.image.rows is None for one in _needed(images, at, n_looked_at)):
            return max(at.begin, n_computed)
        if n_looked_at and at.begin > n_computed:
            return at.begin
    return n_tokens


def looked_at_next(images: Images, n_computed: int, n_looked_at: int) -> list[ImageAt]:
    """What cross attention must have been given before the next token is computed."""
    next_one = next((at for at in images if at.begin == n_computed), None) if n_looked_at else None
    return [] if next_one is None else looked_at(images, next_one, n_looked_at)


def past(images: Images, n_computed: int, n_looked_at: int) -> list[Image]:
    """Those whose rows the sequence no longer needs, once for each place, as long as what it has computed is there."""
    needed = {id(one.image) for at in images if at.end > n_computed for one in _needed(images, at, n_looked_at)}
    return [at.image for at in images if id(at.image) not in needed]


def next_wanted(images: Images, n_computed: int, n_looked_at: int) -> Image | None:
    """The next image that must be encoded before its sequence goes on."""
    needed = (one.image for at in images if at.end > n_computed for one in _needed(images, at, n_looked_at))
    return next((image for image in needed if image.rows is None), None)
