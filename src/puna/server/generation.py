"""One generation as it is followed: what it adds to the numbers, and the record of it that is left when it has ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from puna import wire
from puna.server.http import request_id, trace_context

if TYPE_CHECKING:
    from puna.server.metrics import Metrics


@dataclass(frozen=True)
class Record:
    """A generation that has ended, for whoever follows them one by one. Times are of the monotonic clock."""

    model: str
    request_id: str
    trace_headers: Sequence[tuple[str, str]]
    began_ns: int
    placed_ns: int  # 0: its model was never loaded
    ended_ns: int
    outcome: str  # ok, error or cancelled
    done: wire.Done | None


class Generation:
    def __init__(self, metrics: Metrics, model: str, began_ns: int) -> None:
        self._metrics = metrics
        self._model = model
        self._began_ns, self._placed_ns = began_ns, 0
        self._began = began_ns / 1e9
        self._last_piece = 0.0
        self._done: wire.Done | None = None
        self._trace_headers, self._request_id = trace_context.current(), request_id.current()
        self._gap = metrics.gap.of(model)  # to find it takes longer than to observe
        self.is_done = False
        metrics.waiting.add(model)

    def placed(self) -> None:
        """The model is loaded."""
        metrics, self._placed_ns = self._metrics, time.monotonic_ns()
        metrics.waiting.add(self._model, amount=-1)
        metrics.running.add(self._model)
        metrics.queue.of(self._model).observe(time.monotonic() - self._began)

    def piece(self) -> None:
        now = time.monotonic()
        if self._last_piece:
            self._gap.observe(now - self._last_piece)
        else:
            self._metrics.first_token.of(self._model).observe(now - self._began)
        self._last_piece = now

    def done(self, done: wire.Done) -> None:
        metrics, model, self._done = self._metrics, self._model, done
        self.is_done = done.reason != "cancelled"
        metrics.prompt_tokens.add(model, amount=done.prompt_eval_count)
        metrics.cached_tokens.add(model, amount=done.cached_count)
        metrics.generated_tokens.add(model, amount=done.eval_count)
        metrics.thinking_tokens.add(model, amount=done.thinking_count)
        metrics.prompt_seconds.add(model, amount=done.prompt_eval_duration / 1e9)
        metrics.generated_seconds.add(model, amount=done.eval_duration / 1e9)

    def end(self, outcome: str) -> None:
        metrics, model = self._metrics, self._model
        (metrics.running if self._placed_ns else metrics.waiting).add(model, amount=-1)
        metrics.requests.add(model, outcome)
        now = time.monotonic_ns()
        if outcome == "ok":
            metrics.duration.of(model).observe(now / 1e9 - self._began)
        if metrics.followers:
            record = Record(
                model=model,
                request_id=self._request_id,
                trace_headers=self._trace_headers,
                began_ns=self._began_ns,
                placed_ns=self._placed_ns,
                ended_ns=now,
                outcome=outcome,
                done=self._done,
            )
            for follow in metrics.followers:
                follow(record)
