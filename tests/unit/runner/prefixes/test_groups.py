from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from puna.errors import ContextOverflow
from puna.runner.images.image import Image, Key
from puna.runner.images.in_sequence import ImageAt, extents, without
from puna.runner.prefixes.groups import cut, whole
from puna.runner.tasks.completion import fit
from puna.vision.model import Placed, Prepared
from puna.wire import CompletionRequest


def image(begin: int, size: int) -> ImageAt:
    return ImageAt(Image(Key(b"%d" % begin, ""), Prepared([], Placed([0] * size, range(size)), size)), begin)


def test_a_cut_takes_all_of_the_groups_that_it_touches() -> None:
    groups = [(10, 20), (30, 40), (50, 60)]
    assert cut(15, 35, groups) == (10, 40)
    assert cut(20, 30, groups) == (20, 30)
    assert extents(without([image(10, 10), image(30, 10), image(50, 10)], 10, 40)) == [(20, 30)]


def test_a_step_ends_before_a_group_or_behind_it() -> None:
    groups = [(10, 20)]
    assert whole(0, 15, 15, groups) == 10
    assert whole(10, 15, 20, groups) == 20
    assert whole(10, 15, 19, groups) == 10
    assert whole(0, 20, 20, groups) == 20


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(0, 60), st.integers(8, 200))
def test_a_truncated_prompt_has_whole_images_only(sizes: list[int], n_keep: int, n_ctx: int) -> None:
    tokens: list[int] = []
    images = []
    for i, size in enumerate(sizes):
        if i % 2:
            images.append(image(len(tokens), size))
        tokens += range(1000 * i, 1000 * i + size)
    groups = extents(images)
    try:
        kept, images_left = fit(tokens, min(n_keep, len(tokens), n_ctx // 2), n_ctx, CompletionRequest(prompt="x"), images)
    except ContextOverflow:
        assert groups
        assert groups[-1][1] == len(tokens) > n_ctx, "where an image ends what does not fit, nothing may be left"
        return
    left = extents(images_left)
    assert kept
    assert len(kept) <= n_ctx
    assert [tokens[b:e] for b, e in groups if tokens[b] in kept] == [kept[b:e] for b, e in left]
    inside = {t for b, e in groups for t in tokens[b:e]}
    assert {t for t in kept if t in inside} == {t for b, e in left for t in kept[b:e]}
