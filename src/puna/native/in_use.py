"""Something of the library's that several threads use: it is freed when nobody is in the middle of a call any more.

A call that releases Python's lock runs on while another thread closes what it works on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType


class InUse:
    """A context for each call, which gives the address. *name* is what it is, for who comes too late."""

    def __init__(self, name: str, address: int, free: Callable[[int], None]) -> None:
        self._name = name
        self._address = address
        self._free = free
        self._changed = threading.Condition()
        self._n_users = 0

    def __enter__(self) -> int:
        with self._changed:
            assert self._address, f"{self._name} is asked that was closed"
            self._n_users += 1
            return self._address

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._changed:
            self._n_users -= 1
            if not self._n_users:
                self._changed.notify_all()

    def close(self) -> None:
        """Nobody begins a call any more; those that were begun are waited for."""
        with self._changed:
            address, self._address = self._address, 0
            self._changed.wait_for(lambda: not self._n_users)
        if address:
            self._free(address)
