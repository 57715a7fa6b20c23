from __future__ import annotations

import numpy as np

from puna.runner.prefixes.salt import Salted, salted
from puna.runner.prefixes.tree import PrefixTree


def test_a_salted_token_is_the_same_number_and_equal_to_its_like_alone() -> None:
    token = Salted(7, "a")
    assert token == Salted(7, "a")
    assert hash(token) == hash(Salted(7, "a"))
    assert not token != Salted(7, "a")  # noqa: SIM202 - what is tried is the operator
    for other in (Salted(7, "b"), Salted(8, "a"), 7):
        assert token != other
        assert other != token
        assert not token == other  # noqa: SIM201
    assert np.array([token, 8], np.int32).tolist() == [7, 8]
    assert (token + 1, int(token), [0] * token) == (8, 7, [0] * 7)


def test_only_the_first_token_carries_the_salt() -> None:
    tokens = [1, 2, 3]
    assert salted(tokens, "") is tokens
    assert salted([], "a") == []
    assert [type(token) for token in salted(tokens, "a")] == [Salted, int, int]


def test_a_prefix_tree_keeps_salts_apart() -> None:
    tree = PrefixTree(4)
    for sequence, salt in enumerate(("a", "b", "", "a")):
        tree.put(sequence, salted([1, 2, 3, 4], salt), 4)
    tree.check_integrity()
    assert tree.shared(salted([1, 2, 3, 9], "a")) == [3, 0, 0, 3]
    assert tree.shared(salted([1, 2, 3, 9], "b")) == [0, 3, 0, 0]
    assert tree.shared([1, 2, 3, 9]) == [0, 0, 3, 0]
    assert tree.shared(salted([1, 2, 3, 9], "c")) == [0, 0, 0, 0]
