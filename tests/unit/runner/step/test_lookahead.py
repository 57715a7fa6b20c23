"""The step after next, as far as it can be told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from puna.runner.images.image import Image, Key
from puna.runner.images.in_sequence import ImageAt
from puna.runner.pacing.pace import UNBOUNDED
from puna.runner.scheduling.task import Part
from puna.runner.step.lookahead import next_parts
from puna.vision.model import Placed, Prepared

N_BATCH = 16


def task(n_tokens: int, image_at: int = -1, n_looked_at: int = 0) -> Any:
    image = Image(Key(b"", ""), Prepared([], Placed([0], [0]), 40))
    images = [ImageAt(image, image_at)] if image_at >= 0 else []
    return SimpleNamespace(
        tokens=[0] * n_tokens, groups=(), images=images, n_looked_at=n_looked_at, n_ready=lambda _n_computed: n_tokens
    )


def expected(one: Any, end: int) -> list[int]:
    return [part.n_tokens for part in next_parts([Part(one, 0, end)], N_BATCH, UNBOUNDED)]


def test_a_prompt_goes_on_and_who_decodes_gets_one_more() -> None:
    assert expected(task(12), 8) == [4]
    assert expected(task(8), 8) == [1]


@pytest.mark.parametrize(("n_looked_at", "counts"), [(0, [4]), (40, [])])
def test_who_comes_to_an_image_that_is_looked_at_waits_until_it_is_stored(n_looked_at: int, counts: list[int]) -> None:
    assert expected(task(12, 8, n_looked_at), 8) == counts


def test_who_is_behind_its_image_does_not() -> None:
    assert expected(task(12, 8, 40), 9) == [3]
