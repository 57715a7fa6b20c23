"""Tokens that are found again only by those who know the salt of whoever computed them.

Whether a prompt was in the cache shows in counts and in times, so that anybody could find out what others have asked. Where
prompts belong to different people, the first token of each carries their salt: it is equal to no token of another's, so no
prefix tree, slot or host cache finds anything beyond it. To whatever computes it is the same number as ever.
"""

from __future__ import annotations


class Salted(int):
    """A token; equal only to the same one with the same salt."""

    salt: str

    def __new__(cls, token: int, salt: str) -> Salted:
        made = super().__new__(cls, token)
        made.salt = salt
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Salted) and int(self) == int(other) and self.salt == other.salt

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((int(self), self.salt))


def salted(tokens: list[int], salt: str) -> list[int]:
    """The same tokens, of which the first carries the salt; without a salt as they are."""
    return [Salted(tokens[0], salt), *tokens[1:]] if salt and tokens else tokens
