"""How many completions a runner was given, how they ended, and how many tokens they took."""

from __future__ import annotations

import threading
from collections import Counter

from puna.wire import Done, Failed


class Counters:
    """Counts for whoever hands requests to the engine; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, what: str, count: int = 1) -> None:
        with self._lock:
            self._counts[what] += count

    def ended(self, last: Done | Failed) -> None:
        """A completion's last reply."""
        with self._lock:
            if isinstance(last, Done):
                self._counts[last.reason] += 1
                self._counts["prompt_tokens"] += last.prompt_eval_count
                self._counts["cached_tokens"] += last.cached_count
                self._counts["generated_tokens"] += last.eval_count
            else:
                self._counts["failed"] += 1

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)
