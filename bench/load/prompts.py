"""Prompts of random words: the same for every contender of a turn, new in every turn, so that no cache has seen them."""

from __future__ import annotations

import random

# Frequent English words, each of which is one token in most vocabularies.
_FREQUENT = (
    "time year people way day man thing woman life child world school state family student group country problem hand part "
    "place case week company system program question work government number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father power hour "
    "game line end member law car city community name president team minute idea kid body information back parent face others "
    "level office door health person art war history party result change morning reason research girl guy moment air teacher "
    "force education foot boy age policy music market sense product effect class piece land interest street image phone data "
    "cup paper space ground form event official matter center couple site project activity star table need court oil situation "
    "cost industry figure film building summer energy chair window train animal river garden forest mountain island bridge"
)
WORDS = _FREQUENT.split()


class Prompts:
    """Draws texts; the same *name* gives the same texts."""

    def __init__(self, name: str) -> None:
        self._random = random.Random(name)

    def words(self, count: int) -> str:
        return " ".join(self._random.choices(WORDS, k=count))
