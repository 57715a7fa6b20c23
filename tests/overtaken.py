"""A call into a library that is overtaken by the end of what it works on, as far as that is let."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tests.patience import PATIENCE_S


class Overtaken:
    """A library's functions, of which *called* begins, and goes on when *freed* was called, or was kept from it for a moment."""

    def __init__(self, library: Any, called: str, freed: str) -> None:
        self.events: list[str] = []
        self._library = library
        self._called, self._freed = called, freed
        self._has_begun, self._may_go_on = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        if name not in (self._called, self._freed):
            return function

        def noted(*arguments: Any) -> Any:
            if name == self._called:
                self._has_begun.set()
                assert self._may_go_on.wait(PATIENCE_S)
                self.events.append("called")
                return None if "freed" in self.events else function(*arguments)
            self.events.append("freed")
            return function(*arguments)

        return noted

    def play(self, call: Callable[[], object], close: Callable[[], object]) -> list[object]:
        """What the call returned, if all went well."""
        results: list[object] = []
        caller = threading.Thread(target=lambda: results.append(call()))
        caller.start()
        assert self._has_begun.wait(PATIENCE_S)
        closer = threading.Thread(target=close)
        closer.start()
        closer.join(0.2)
        self._may_go_on.set()
        caller.join(PATIENCE_S)
        closer.join(PATIENCE_S)
        return results
