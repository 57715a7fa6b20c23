"""What a prefix is found by: tokens, and what else it takes to tell them apart.

Whoever looks for prefixes (slots, the tree, the host cache) compares the elements of two prompts. Mostly they are tokens, but:

- A placeholder says nothing of the image that it stands for. Each row of an image is an element of its own: the source is the
  image's digest and the number of the row.
- What is computed depends on more than the prompt, on the adapter for example; and whether a prompt was in the cache shows in
  counts and in times, so that anybody could find out what others have asked. The scope says with what, and for whom: it stands
  in the first element, so that nothing is found beyond it by a prompt of another scope.

To whatever computes, an element is its token's number.
"""

from __future__ import annotations

from collections.abc import Hashable


class Element(int):
    """A token; equal only to the same one with the same scope and source. As a number it is the token's."""

    scope: Hashable
    source: Hashable

    def __new__(cls, token: int, *, scope: Hashable = None, source: Hashable = None) -> Element:
        made = super().__new__(cls, token)
        made.scope, made.source = scope, source
        return made

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Element) or self.scope != other.scope or self.source != other.source:
            return False
        return int(self) == int(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((int(self), self.scope, self.source))


def scoped(tokens: list[int], scope: Hashable) -> list[int]:
    """The same tokens, of which the first carries the scope; without one ("", None) as they are."""
    if not scope or not tokens:
        return tokens
    first = tokens[0]
    return [Element(first, scope=scope, source=first.source if isinstance(first, Element) else None), *tokens[1:]]
