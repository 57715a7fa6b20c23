from __future__ import annotations

from collections.abc import Hashable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from puna.runner.prefixes.key import Element, scoped
from puna.runner.prefixes.tree import PrefixTree


def test_an_element_is_the_same_number_and_equal_to_its_like_alone() -> None:
    token = Element(7, scope="a")
    assert token == Element(7, scope="a")
    assert hash(token) == hash(Element(7, scope="a"))
    assert not token != Element(7, scope="a")  # noqa: SIM202 - what is tried is the operator
    for other in (Element(7, scope="b"), Element(8, scope="a"), Element(7, source="a"), 7):
        assert token != other
        assert other != token
        assert not token == other  # noqa: SIM201
    assert np.array([token, 8], np.int32).tolist() == [7, 8]
    assert (token + 1, int(token), [0] * token) == (8, 7, [0] * 7)


def test_only_the_first_token_carries_the_scope() -> None:
    tokens = [1, 2, 3]
    assert scoped(tokens, "") is tokens
    assert scoped([], "a") == []
    assert [type(token) for token in scoped(tokens, "a")] == [Element, int, int]


def test_the_scope_of_a_first_token_is_not_told_twice() -> None:
    """As when a context shifts, where it is said again whichever token is the first now."""
    image = Element(1, source=("cat", 0))
    once = scoped([image, 2], "a")
    assert scoped(once, "a") == once == [Element(1, scope="a", source=("cat", 0)), 2]
    assert once != [image, 2]


def test_a_prefix_tree_keeps_scopes_apart() -> None:
    tree = PrefixTree(4)
    for sequence, scope in enumerate(("a", "b", "", "a")):
        tree.put(sequence, scoped([1, 2, 3, 4], scope), 4)
    tree.check_integrity()
    assert tree.shared(scoped([1, 2, 3, 9], "a")) == [3, 0, 0, 3]
    assert tree.shared(scoped([1, 2, 3, 9], "b")) == [0, 3, 0, 0]
    assert tree.shared([1, 2, 3, 9]) == [0, 0, 3, 0]
    assert tree.shared(scoped([1, 2, 3, 9], "c")) == [0, 0, 0, 0]
    assert tree.shared(scoped([1, 2, 3, 9], ("a", "adapter"))) == [0, 0, 0, 0]


PLACEHOLDER = 1


def image(digest: str) -> list[int]:
    return [Element(PLACEHOLDER, source=(digest, row)) for row in range(20)]


PARTS = [[PLACEHOLDER] * 20, [2, 3], [4] * 17, image("cat"), image("dog")]
SCOPES: list[Hashable] = ["", "salt", ("salt", "adapter"), ("", "adapter")]
PROMPTS = st.builds(
    lambda parts, scope: scoped([token for part in parts for token in part], scope),
    st.lists(st.sampled_from(PARTS), max_size=4),
    st.sampled_from(SCOPES),
)


def told_in_full(prompt: list[int]) -> list[Hashable]:
    """All that tells its elements apart, in values that have no equality of their own."""
    return [(int(e), e.scope, e.source) if isinstance(e, Element) else (e, None, None) for e in prompt]


@given(st.lists(PROMPTS, min_size=1, max_size=6), PROMPTS)
def test_a_prompt_shares_with_each_as_much_as_text_images_and_scope_agree(held: list[list[int]], prompt: list[int]) -> None:
    tree = PrefixTree(len(held))
    for sequence, tokens in enumerate(held):
        tree.put(sequence, tokens, len(tokens))
    tree.check_integrity()
    wanted = told_in_full(prompt)
    expected = [
        next(
            (i for i, (a, b) in enumerate(zip(told_in_full(tokens), wanted, strict=False)) if a != b),
            min(len(tokens), len(prompt)),
        )
        for tokens in held
    ]
    assert tree.shared(prompt) == expected
