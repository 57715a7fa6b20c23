"""What the server counts and measures.

Knows generations, no API and no format: how numbers are shown is puna.server.exposition's business.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from puna import wire
from puna.llm.spare import Spare
from puna.server.http import request_id, trace_context
from puna.server.numbers import Number, Spread
from puna.server.placing.loaded import Loadable
from puna.server.placing.placement import Table
from puna.server.records import Follow, Record

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

_MODEL = ("model",)
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """One server's numbers. May be written from one event loop only. *models* and *spare* are looked at when they are shown."""

    def __init__(self, models: Table, spare: Spare | None = None) -> None:
        self.models, self.spare = models, spare
        self.labels = models.labels
        self.followers: list[Follow] = []  # of every generation that ends
        self.collectors: list[Collector] = []  # of others, whose numbers are told with these
        self.numbers: list[Number] = []
        self.spreads: list[Spread] = []
        count, level, spread, outcome = self._count, self._level, self._spread, ("model", "outcome")
        self.requests = count("puna_requests", "Generations that ended: ok, error or cancelled.", outcome)
        self.running = level("puna_requests_running", "Generations whose model is loaded.")
        self.waiting = level("puna_requests_waiting", "Generations that wait for their model.")
        self.queue = spread("puna_queue_seconds", "Wait for a place and for the model's load.")
        self.first_token = spread(
            "puna_time_to_first_token_seconds", "From the request's arrival to the first piece of its answer."
        )
        self.gap = spread("puna_inter_token_seconds", "Between two pieces of an answer, which mostly are a token each.", _GAPS)
        self.duration = spread("puna_request_duration_seconds", "From arrival to the last piece.")
        self.prompt_tokens = count("puna_prompt_tokens", "Tokens of prompts, cached ones included.")
        self.cached_tokens = count("puna_prompt_tokens_cached", "Those of them found in the cache.")
        self.generated_tokens = count("puna_generated_tokens", "Tokens of answers.")
        self.prompt_seconds = count("puna_prompt_seconds", "Time spent on reading prompts.")
        self.generated_seconds = count("puna_generated_seconds", "Time spent on generating.")
        self.thinking_tokens = count("puna_thinking_tokens", "Those of them that were thinking.")
        self.embeddings = count(
            "puna_embedding_requests",
            "Requests for vectors (embed) or scores (rank) that ended: ok, error or cancelled.",
            ("model", "kind", "outcome"),
        )
        self.embedded_texts = count("puna_embedding_texts", "Texts made vectors or scores of.")
        self.embedded_tokens = count("puna_embedding_tokens", "Tokens of those texts.")
        self.embedding_duration = spread("puna_embedding_duration_seconds", "From a request's arrival to its vectors or scores.")

    def _count(self, name: str, help_text: str, labels: Sequence[str] = _MODEL) -> Number:
        self.numbers.append(Number(name, help_text, labels))
        return self.numbers[-1]

    def _level(self, name: str, help_text: str) -> Number:
        self.numbers.append(Number(name, help_text, _MODEL, is_level=True))
        return self.numbers[-1]

    def _spread(self, name: str, help_text: str, bounds: Sequence[float] = _SECONDS) -> Spread:
        self.spreads.append(Spread(name, help_text, _MODEL, bounds))
        return self.spreads[-1]

    @contextmanager
    def generation(self, model: Loadable, began_ns: int) -> Iterator[Generation]:
        """Follow one generation; how the block ends is its outcome."""
        generation = Generation(self, self.labels.of(model), began_ns)
        outcome = "error"
        try:
            yield generation
            outcome = "ok"
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "ok" if generation.is_done else "cancelled"
            raise
        finally:
            generation.end(outcome)

    @contextmanager
    def embedding(self, model: Loadable, began_ns: int, texts: wire.EmbeddingRequest) -> Iterator[Callable[[int], None]]:
        """Follow one request for vectors or scores; to be told the number of tokens when they are there."""
        label = self.labels.of(model)
        kind = "embed" if texts.query is None else "rank"
        outcome = "error"

        def done(n_tokens: int) -> None:
            self.embedded_texts.add(label, amount=len(texts.inputs))
            self.embedded_tokens.add(label, amount=n_tokens)
            self.embedding_duration.of(label).observe(time.monotonic() - began_ns / 1e9)

        try:
            yield done
            outcome = "ok"
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self.embeddings.add(label, kind, outcome)


class Generation:
    """One that is followed: what it adds to the numbers, and the record of it at its end."""

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
