"""The radix tree agrees with a comparison of every list, whatever is put, extended, changed and removed."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from puna.runner.prefixes.groups import whole
from puna.runner.prefixes.tree import LAST_BLOCK, Items, PrefixTree, common_prefix


def holding(*lists: list[int]) -> PrefixTree:
    tree = PrefixTree(len(lists))
    for sequence, items in enumerate(lists):
        tree.put(sequence, items, len(items))
        tree.check_integrity()
    return tree


def along(tree: PrefixTree, prompt: Items) -> list[tuple[int, set[int]]]:
    return [(n, set(sequences)) for n, sequences in tree.along(prompt)]


def shared_one_by_one(a: Items, b: Items) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_a_prompt_is_told_who_goes_how_far_along_with_it() -> None:
    tree = holding([1, 2, 3, 4], [1, 2, 3, 9], [1, 7], [5, 6])
    assert along(tree, [1, 2, 3, 9, 9]) == [(4, {1}), (3, {0}), (1, {2})]
    assert along(tree, [5]) == [(1, {3})]
    assert along(tree, [8, 1, 2]) == []
    assert along(tree, []) == []
    assert tree.shared([1, 2, 5]) == [2, 2, 1, 0]


def test_one_that_ends_on_the_way_of_another_shares_all_it_has() -> None:
    tree = holding([1, 2, 3, 4, 5, 6], [1, 2, 3])
    assert tree.shared([1, 2, 3, 4, 5]) == [5, 3]
    tree.remove(0)
    tree.check_integrity()
    assert tree.shared([1, 2, 3, 4, 5]) == [0, 3]


def test_only_the_first_items_of_a_list_count_until_it_is_extended() -> None:
    items = list(range(100))
    tree = PrefixTree(1)
    tree.put(0, items, 40)
    assert tree.shared(items) == [40]
    tree.extend(0, 70)
    tree.extend(0, 30)
    assert tree.shared(items) == [70]


def test_two_that_grow_in_step_share_all_until_they_differ() -> None:
    first, second = [1], [1]
    tree = holding(first, second)
    for item in (*range(50), 7):
        first.append(item)
        tree.extend(0, len(first))
        second.append(item if item != 7 or len(second) < 20 else 8)
        tree.extend(1, len(second))
        tree.check_integrity()
    assert tree.shared(first) == [52, 51]


def test_a_list_may_be_changed_in_place_if_it_is_put_again_or_removed() -> None:
    """The one whose list the tree reads for all who share it goes, with everything in its list another."""
    first, second = list(range(100)), [*range(60), 9, 9]
    tree = holding(first, second)
    del first[10:50]
    tree.put(0, first, len(first))
    tree.check_integrity()
    assert tree.shared(list(range(100))) == [10, 60]
    assert tree.shared(first) == [60, 10]
    first.clear()
    tree.remove(0)
    tree.check_integrity()
    assert tree.shared(list(range(100))) == [0, 60]


def test_a_list_that_was_changed_without_a_word_is_noticed() -> None:
    first, second = list(range(100)), [*range(60), 9, 9]
    tree = holding(first, second)
    del second[10:20]
    with pytest.raises(AssertionError, match="list of sequence 1 has become shorter"):
        tree.check_integrity()
    second += range(10)
    with pytest.raises(AssertionError, match="under the item 9"):
        tree.check_integrity()
    tree.remove(1)
    tree.check_integrity()
    tree.put(1, list(range(60)), 60)
    first[50] = 0
    with pytest.raises(AssertionError, match="sequence 1 has changed"):
        tree.check_integrity()


def test_an_image_is_the_same_only_if_its_hash_is() -> None:
    """It takes a group of positions; what is shared of a prompt ends before it or behind it."""

    def image(digest: str) -> list[int | tuple[str, int]]:
        return [(digest, i) for i in range(16)]

    prompt: list[int | tuple[str, int]] = [1, 2, *image("cat"), 3, 4]
    tree = PrefixTree(3)
    tree.put(0, prompt, len(prompt))
    tree.put(1, [1, 2, *image("dog"), 3, 4], len(prompt))
    tree.put(2, [1, 2, *range(16), 3, 4], len(prompt))
    tree.check_integrity()
    assert tree.shared([1, 2, *image("cat"), 3, 5]) == [19, 2, 2]
    assert tree.shared([1, 2, *image("dog"), *image("cat")]) == [2, 18, 2]
    # Of a prompt that ends with the image the last position is computed again, and so is the image.
    n = tree.shared([1, 2, *image("cat")][:-1])[0]
    assert (n, whole(0, n, 0, [(2, 18)])) == (17, 2)


@pytest.mark.parametrize(
    ("a", "b", "length"),
    [([1, 2, 3], [1, 2, 3], 3), ([1, 2, 3], [1, 2], 2), ([1, 9], [1, 2], 1), ([], [1], 0), ([5], [6], 0)],
)
def test_common_prefix(a: list[int], b: list[int], length: int) -> None:
    assert common_prefix(a, b, min(len(a), len(b))) == length


def test_common_prefix_wherever_the_lists_differ() -> None:
    items = list(range(3 * LAST_BLOCK))
    for differs in (*range(200), *range(LAST_BLOCK - 3, 3 * LAST_BLOCK, 97)):
        other = [*items[:differs], -1, *items[differs + 1 :]]
        assert common_prefix(items, other, len(items)) == differs
        assert common_prefix(items, other, len(items), differs // 2) == differs
        assert common_prefix(items, other, differs) == differs


def test_long_lists_of_few_kinds_of_items() -> None:
    """Branches at any depth, beyond the blocks in which lists are compared."""
    chance = random.Random(1)
    lists: list[list[int]] = [[]]
    for _ in range(40):
        base = chance.choice(lists)
        lists.append([*base[: chance.randint(0, len(base))], *chance.choices([1, 2], k=chance.randint(1, 900))])
    tree = holding(*lists)
    for prompt in lists:
        cut = prompt[: chance.randint(0, len(prompt))]
        for asked in (prompt, cut, [*cut, 3, 3]):
            assert tree.shared(asked) == [shared_one_by_one(asked, items) for items in lists]


N = 5
ITEMS = st.lists(st.integers(1, 2), max_size=12)
SEQUENCES = st.integers(0, N - 1)


class AnyOrder(RuleBasedStateMachine):
    """Items of two kinds, so that lists share, split and end within one another all the time."""

    @initialize()
    def start(self) -> None:
        self.tree = PrefixTree(N)
        self.lists: list[list[int]] = [[] for _ in range(N)]
        self.lengths = [0] * N
        for s, items in enumerate(self.lists):
            self.tree.put(s, items, 0)

    @rule(s=SEQUENCES, items=ITEMS, more=ITEMS)
    def put(self, s: int, items: list[int], more: list[int]) -> None:
        self.lists[s], self.lengths[s] = [*items, *more], len(items)
        self.tree.put(s, self.lists[s], len(items))

    @rule(s=SEQUENCES, other=SEQUENCES, n=st.integers(0, 20), items=ITEMS)
    def fork(self, s: int, other: int, n: int, items: list[int]) -> None:
        """Begin as another does."""
        self.lists[s] = [*self.lists[other][:n], *items]
        self.lengths[s] = len(self.lists[s])
        self.tree.put(s, self.lists[s], self.lengths[s])

    @rule(s=SEQUENCES, items=ITEMS, n=st.integers(0, 12))
    def extend(self, s: int, items: list[int], n: int) -> None:
        self.lists[s] += items
        self.lengths[s] = min(self.lengths[s] + n, len(self.lists[s]))
        self.tree.extend(s, self.lengths[s])

    @rule(others=st.sets(SEQUENCES), item=st.integers(1, 2))
    def write_the_same(self, others: set[int], item: int) -> None:
        for s in sorted(others):
            self.lists[s].append(item)
            self.lengths[s] = len(self.lists[s])
            self.tree.extend(s, self.lengths[s])

    @rule(s=SEQUENCES, n=st.integers(0, 12))
    def shorten(self, s: int, n: int) -> None:
        self.lengths[s] = min(self.lengths[s], n)
        self.tree.put(s, self.lists[s], self.lengths[s])

    @rule(s=SEQUENCES, begin=st.integers(0, 10), n=st.integers(1, 10))
    def shift(self, s: int, begin: int, n: int) -> None:
        """A part in the middle goes from the list itself, before the tree knows of it."""
        del self.lists[s][begin : begin + n]
        self.lengths[s] = min(self.lengths[s], len(self.lists[s]))
        self.tree.put(s, self.lists[s], self.lengths[s])

    @rule(s=SEQUENCES)
    def remove(self, s: int) -> None:
        """Its list is of no concern any more."""
        self.lists[s][:] = [3] * len(self.lists[s])
        self.lists[s], self.lengths[s] = [], 0
        self.tree.remove(s)
        self.tree.put(s, self.lists[s], 0)

    @rule(prompt=ITEMS, other=SEQUENCES, n=st.integers(0, 20))
    def ask(self, prompt: list[int], other: int, n: int) -> None:
        for asked in (prompt, [*self.lists[other][:n], *prompt]):
            expected = [shared_one_by_one(asked, items[:n]) for items, n in zip(self.lists, self.lengths, strict=True)]
            assert self.tree.shared(asked) == expected
            seen: set[int] = set()
            depths = []
            for depth, sequences in self.tree.along(asked):
                assert not seen & sequences
                seen |= sequences
                depths.append(depth)
                assert all(expected[s] == min(depth, self.lengths[s]) for s in sequences)
            assert depths == sorted(set(depths), reverse=True)
            assert seen == {s for s, shared in enumerate(expected) if shared}

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "tree"):
            self.tree.check_integrity()
            assert self.tree.lengths == self.lengths


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=200, stateful_step_count=40)


def test_its_outline_tells_where_sequences_part_and_nothing_of_their_items() -> None:
    tree = holding([1, 2, 3, 4], [1, 2, 3, 9], [1, 2], [5, 6])
    outline = tree.outline(100)
    assert [(n.parent, n.begin, n.end, n.n_members) for n in outline.nodes] == [
        (-1, 0, 3, 3),
        (-1, 0, 2, 1),
        (0, 3, 4, 1),
        (0, 3, 4, 1),
    ]
    assert outline.ends == {0: 2, 1: 3, 2: 0, 3: 1}
    short = tree.outline(3)
    assert [n.parent for n in short.nodes] == [-1, -1, 0]
    assert short.ends == {0: 2, 1: 0, 2: 0, 3: 1}
    assert PrefixTree(3).outline(10).nodes == []
