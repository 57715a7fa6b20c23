"""Which sequences begin as a prompt does: a radix tree over what each of them holds.

Its items are the elements of prefix keys (puna.runner.prefixes.key), or whatever else takes a position and is known by a hash.
The tree has the items from the lists it was given, and copies none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

Items = Sequence[Hashable]

# Two lists are compared in blocks: small ones first, since most prompts differ soon, then larger ones, which cost less each.
FIRST_BLOCK = 16
LAST_BLOCK = 1024

NOBODY = -1


@dataclass(slots=True, eq=False)
class Node:
    """The items [begin, end) that sequences share on their way from the root; all of them shared those before too."""

    key: Hashable  # the first of its items
    begin: int
    end: int
    owner: int  # one of the members that go on to the end or beyond it: the items are read from its list
    parent: Node | None
    children: dict[Hashable, Node] = field(default_factory=dict)  # by their keys; none or at least two, except of the root
    members: set[int] = field(default_factory=set)  # sequences that come here, be it only a part of the way


class Branch(NamedTuple):
    """A node, without its items."""

    parent: int  # its place among the branches; -1: there is none
    begin: int
    end: int
    n_members: int


class Outline(NamedTuple):
    """A tree's shape: parents before their children."""

    nodes: list[Branch]
    ends: dict[int, int]  # by sequence: the place of the last node it comes to


class PrefixTree:
    """Sequences are numbers from 0. Each lasts *lengths* items of a list that belongs to whoever put it here.

    A list may grow at its end. Whoever changes it elsewhere must put it again before the tree is asked anything or another
    sequence is put; to remove it is allowed at any time, for that reads no list.
    """

    def __init__(self, n_sequences: int) -> None:
        self.lengths = [0] * n_sequences
        self._lists: list[Items] = [()] * n_sequences
        self._root = Node(None, 0, 0, NOBODY, None)
        self._last: list[Node | None] = [None] * n_sequences  # the node that each ends in or at the end of

    def along(self, prompt: Items) -> Iterator[tuple[int, Set[int]]]:
        """Sequences by how far they go along with a prompt, longest first: so many items, or all they have if that is less.

        Those that share nothing are left out. Takes time for the items that are shared, however many sequences there are.
        """
        path: list[tuple[int, Node]] = []
        node, at, n = self._root, 0, len(prompt)
        while at == node.end and at < n and (child := node.children.get(prompt[at])):
            node = child
            at = common_prefix(self._lists[node.owner], prompt, min(node.end, n), at + 1)
            path.append((at, node))
        further: Set[int] = frozenset()
        for at, node in reversed(path):
            yield at, node.members - further if further else node.members
            further = node.members

    def shared(self, prompt: Items) -> list[int]:
        """How many leading items each sequence has in common with a prompt."""
        shared = [0] * len(self.lengths)
        for n, sequences in self.along(prompt):
            for sequence in sequences:
                shared[sequence] = min(n, self.lengths[sequence])
        return shared

    def outline(self, most: int) -> Outline:
        """Its first *most* nodes, widest first. Any thread: of a tree that changes meanwhile they are of several moments."""
        nodes: list[Branch] = []
        ends: dict[int, int] = {}
        left = deque([(-1, node) for node in list(self._root.children.values())])
        while left and len(nodes) < most:
            parent, node = left.popleft()
            place, members = len(nodes), list(node.members)  # in one go: nobody changes it while it is copied
            nodes.append(Branch(parent, node.begin, node.end, len(members)))
            ends.update(dict.fromkeys(members, place))
            left.extend((place, child) for child in list(node.children.values()))
        return Outline(nodes, ends)

    def put(self, sequence: int, items: Items, length: int) -> None:
        """The sequence holds the first *length* of these items, and nothing of what it held before."""
        self.remove(sequence)
        self._lists[sequence] = items
        self.lengths[sequence] = length
        if length:
            self._place(sequence, self._root, 0)

    def extend(self, sequence: int, length: int) -> None:
        """The first *length* items of the list that was put count now, if that is more than before."""
        old = self.lengths[sequence]
        if length <= old:
            return
        self.lengths[sequence] = length
        node = self._last[sequence]
        if node is not None and node.owner == sequence and not node.children:
            node.end = length
        else:
            self._place(sequence, node or self._root, old)

    def _place(self, sequence: int, node: Node, at: int) -> None:
        """Find the way for the items from *at* on, which is in or at the end of a node the sequence comes to."""
        items, length = self._lists[sequence], self.lengths[sequence]
        while True:
            if at < node.end:
                at = common_prefix(self._lists[node.owner], items, min(node.end, length), at)
            if at == length:
                break
            if at < node.end:
                node = self._split(node, at, sequence)
            elif node is not self._root and not node.children:
                # All the others end here at the latest.
                node.end, node.owner = length, sequence
                break
            key = items[at]
            if key not in node.children:
                node.children[key] = Node(key, at, length, sequence, node, members={sequence})
                node = node.children[key]
                break
            node = node.children[key]
            node.members.add(sequence)
            at += 1
        self._last[sequence] = node

    def _split(self, node: Node, at: int, sequence: int) -> Node:
        """Cut a node in two, of which *sequence* comes only to the upper one: that is the result."""
        assert node.parent is not None, "the root has no items"
        upper = Node(node.key, node.begin, at, node.owner, node.parent, members=node.members)
        node.parent.children[upper.key] = upper
        node.key, node.begin, node.parent = self._lists[node.owner][at], at, upper
        upper.children[node.key] = node
        node.members = set()
        for member in upper.members:
            ends_above = self._last[member] is node and self.lengths[member] <= at
            if ends_above:
                self._last[member] = upper
            elif member != sequence:
                node.members.add(member)
        return upper

    def remove(self, sequence: int) -> None:
        """The sequence holds nothing any more. Reads no list."""
        last = self._last[sequence]
        self._lists[sequence], self.lengths[sequence], self._last[sequence] = (), 0, None
        if last is None:
            return
        node = last
        while node.parent is not None:
            node.members.discard(sequence)
            if node.owner == sequence:
                self._find_owner(node)
            node = node.parent
        if not last.members:
            self._drop(last)

    def _find_owner(self, node: Node) -> None:
        """Another one than who left, of those who come furthest; a node whose sequences end in it gets shorter by that."""
        if node.children:
            node.owner = next(child.owner for child in node.children.values() if child.members)
        elif node.members:
            node.owner = max(node.members, key=lambda member: self.lengths[member])
            node.end = self.lengths[node.owner]

    def _drop(self, leaf: Node) -> None:
        """Take out a node to which nobody comes. If one is left beside it, that becomes one with its parent."""
        parent = leaf.parent
        assert parent is not None, "the root stays"
        del parent.children[leaf.key]
        if parent.parent is None or len(parent.children) > 1:
            return
        (child,) = parent.children.values()
        for member in parent.members - child.members:
            self._last[member] = child
        child.key, child.begin, child.parent, child.members = parent.key, parent.begin, parent.parent, parent.members
        child.parent.children[child.key] = child

    def check_integrity(self) -> None:
        """Raise AssertionError when the tree contradicts itself or the lists it was given."""
        for sequence, (items, length) in enumerate(zip(self._lists, self.lengths, strict=True)):
            assert length <= len(items), f"the list of sequence {sequence} has become shorter than {length}"
        ways: list[list[Node]] = [[] for _ in self.lengths]
        nodes = [self._root]
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            for member in node.members:
                ways[member].append(node)
            self._check_children(node)
        for sequence, way in enumerate(ways):
            items, length = self._lists[sequence], self.lengths[sequence]
            assert self._last[sequence] is (way[-1] if way else None), f"sequence {sequence} does not end where its way does"
            at = 0
            for node in way:
                assert node.begin == at < length, f"sequence {sequence} of {length} items comes to [{node.begin}, {node.end})"
                at = min(node.end, length)
                assert items[node.begin : at] == self._lists[node.owner][node.begin : at], f"sequence {sequence} has changed"
                assert at == node.end or node is way[-1], f"sequence {sequence} goes on behind its end"
            assert at == length, f"sequence {sequence} comes to {at} of {length} items"

    def _check_children(self, node: Node) -> None:
        assert node is self._root or len(node.children) != 1, "a node with one child should be one with it"
        for key, child in node.children.items():
            assert child.parent is node
            assert child.key == key == self._lists[child.owner][child.begin], f"a node is found under the item {key}"
            assert child.begin == node.end
            assert node is self._root or child.members <= node.members, "some come to a node, but not to the one before it"
            assert child.owner in child.members, f"sequence {child.owner} owns a node that it does not come to"
            assert child.begin < child.end <= self.lengths[child.owner], f"sequence {child.owner} does not go to the end"
            assert child.children or child.end == self.lengths[child.owner], "a node goes on after all have ended"


def common_prefix(a: Items, b: Items, end: int, begin: int = 0) -> int:
    """Where two lists that are equal before *begin* differ first, at most *end*."""
    size = FIRST_BLOCK
    while begin < end:
        stop = min(begin + size, end)
        if a[begin:stop] != b[begin:stop]:
            break
        begin = stop
        size = min(4 * size, LAST_BLOCK)
    else:
        return end
    while stop - begin > 1:
        middle = (begin + stop) // 2
        if a[begin:middle] == b[begin:middle]:
            begin = middle
        else:
            stop = middle
    return begin
