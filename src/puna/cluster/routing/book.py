"""What a replica is believed to hold of the prompts that it has answered, and what of it somebody who follows does not know yet.

A belief, kept where the replica is: the newest keys up to what its cache has room for. Where it is wrong, tokens are computed
that need not have been, or a request goes where nothing of it is held; no answer changes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from puna.cluster.routing.keys import BLOCK_BYTES

DEFAULT_CAPACITY = 4096  # keys, until anything is known of the cache
_BYTES_PER_TOKEN = 4.0  # until anything was counted


@dataclass(frozen=True)
class Changes:
    added: tuple[int, ...]
    removed: tuple[int, ...]


class PrefixBook:
    """If a key is in it, all those before it in its prompt are."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._keys: OrderedDict[int, None] = OrderedDict()  # the one that goes first comes first
        self._capacity = capacity
        self._n_bytes = self._n_tokens = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: int) -> bool:
        return key in self._keys

    def record(self, keys: Sequence[int], n_tokens: int) -> None:
        """A prompt and its answer, of so many tokens, have been computed. The last key is the first to go again."""
        self._n_bytes += len(keys) * BLOCK_BYTES
        self._n_tokens += n_tokens
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        self._shrink()

    def has_room_for(self, n_tokens: int) -> None:
        """The cache holds so many tokens."""
        per_token = self._n_bytes / self._n_tokens if self._n_tokens else _BYTES_PER_TOKEN
        self._capacity = max(1, int(n_tokens * max(per_token, 1.0) / BLOCK_BYTES))
        self._shrink()

    def clear(self) -> None:
        """The replica has lost all of it."""
        self._keys.clear()

    def changes(self, told: set[int]) -> Changes:
        """What somebody does not know who was *told* so much; that is brought up to date."""
        now = self._keys.keys()
        found = Changes(tuple(now - told), tuple(told - now))
        told.update(found.added)
        told.difference_update(found.removed)
        return found

    def _shrink(self) -> None:
        while len(self._keys) > self._capacity:
            self._keys.popitem(last=False)
