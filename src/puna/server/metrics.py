"""What the server counts and measures, as Prometheus reads it at ``GET /metrics``.

Knows generations and the loaded models, no API. Labels are names of stored models, up to a number; files have one label for all,
since whoever reads numbers need not learn where they lie.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Counted
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from puna import __version__, wire
from puna.errors import PunaError
from puna.llm.model_runner import Watched
from puna.llm.spare import Spare
from puna.server.http import request_id, trace_context
from puna.server.placing.loaded import Loadable
from puna.server.placing.placement import Table
from puna.store.models.model import StoredModel

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FILE_LABEL = "(file)"
OTHER_LABEL = "(other)"
MAX_LABELS = 100  # names that were ever asked for; every one is remembered, and sent at every look
_HEALTH_TIMEOUT_S = 1.0
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


class _Labels:
    """Which label a model has."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def of(self, model: Loadable) -> str:
        if not isinstance(model, StoredModel) or not model.digest:  # no manifest
            return FILE_LABEL
        if model.name not in self._known and len(self._known) >= MAX_LABELS:
            return OTHER_LABEL
        self._known.add(model.name)
        return model.name


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


class Metrics:
    """One server's numbers. May be written from one event loop only."""

    def __init__(self, models: Table, spare: Spare | None = None) -> None:
        self._registry = registry = CollectorRegistry()
        self._labels = _Labels()
        self.followers: list[Callable[[Record], None]] = []  # of every generation that ends
        model = ["model"]
        build = Gauge("puna_build_info", "Version of the server, always 1.", ["version"], registry=registry)
        build.labels(__version__).set(1)
        self.requests = Counter(
            "puna_requests", "Generations that ended: ok, error or cancelled.", ["model", "outcome"], registry=registry
        )
        self.running = Gauge("puna_requests_running", "Generations whose model is loaded.", model, registry=registry)
        self.waiting = Gauge("puna_requests_waiting", "Generations that wait for their model.", model, registry=registry)
        self.queue = Histogram(
            "puna_queue_seconds", "Wait for a place and for the model's load.", model, registry=registry, buckets=_SECONDS
        )
        self.first_token = Histogram(
            "puna_time_to_first_token_seconds",
            "From the request's arrival to the first piece of its answer.",
            model,
            registry=registry,
            buckets=_SECONDS,
        )
        self.gap = Histogram(
            "puna_inter_token_seconds",
            "Between two pieces of an answer, which mostly are a token each.",
            model,
            registry=registry,
            buckets=_GAPS,
        )
        self.duration = Histogram(
            "puna_request_duration_seconds", "From arrival to the last piece.", model, registry=registry, buckets=_SECONDS
        )
        self.prompt_tokens = Counter("puna_prompt_tokens", "Tokens of prompts, cached ones included.", model, registry=registry)
        self.cached_tokens = Counter("puna_prompt_tokens_cached", "Those of them found in the cache.", model, registry=registry)
        self.generated_tokens = Counter("puna_generated_tokens", "Tokens of answers.", model, registry=registry)
        self.prompt_seconds = Counter("puna_prompt_seconds", "Time spent on reading prompts.", model, registry=registry)
        self.generated_seconds = Counter("puna_generated_seconds", "Time spent on generating.", model, registry=registry)
        self.thinking_tokens = Counter("puna_thinking_tokens", "Those of them that were thinking.", model, registry=registry)
        self.embeddings = Counter(
            "puna_embedding_requests",
            "Requests for vectors (embed) or scores (rank) that ended: ok, error or cancelled.",
            ["model", "kind", "outcome"],
            registry=registry,
        )
        self.embedded_texts = Counter("puna_embedding_texts", "Texts made vectors or scores of.", model, registry=registry)
        self.embedded_tokens = Counter("puna_embedding_tokens", "Tokens of those texts.", model, registry=registry)
        self.embedding_duration = Histogram(
            "puna_embedding_duration_seconds",
            "From a request's arrival to its vectors or scores.",
            model,
            registry=registry,
            buckets=_SECONDS,
        )
        self._runners = _RunnerHealth(models, self._labels)
        registry.register(self._runners)
        idle = Gauge("puna_spare_runner_bytes", "Memory of the idle runner that waits for the next load.", registry=registry)
        idle.set_function(lambda: spare.private_bytes if spare else 0)
        ProcessCollector(registry=registry)  # of the server's process: memory, processor time, open files

    def add(self, collector: Collector) -> None:
        """Tell its numbers, too."""
        self._registry.register(collector)

    async def text(self) -> bytes:
        await self._runners.look()
        return generate_latest(self._registry)

    @contextmanager
    def generation(self, model: Loadable, began_ns: int) -> Iterator[Generation]:
        """Follow one generation; how the block ends is its outcome."""
        generation = Generation(self, self._labels.of(model), began_ns)
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
        label = self._labels.of(model)
        kind = "embed" if texts.query is None else "rank"
        outcome = "error"

        def done(n_tokens: int) -> None:
            self.embedded_texts.labels(label).inc(len(texts.inputs))
            self.embedded_tokens.labels(label).inc(n_tokens)
            self.embedding_duration.labels(label).observe(time.monotonic() - began_ns / 1e9)

        try:
            yield done
            outcome = "ok"
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self.embeddings.labels(label, kind, outcome).inc()


class Generation:
    def __init__(self, metrics: Metrics, model: str, began_ns: int) -> None:
        self._metrics = metrics
        self._model = model
        self._began_ns, self._placed_ns = began_ns, 0
        self._began = began_ns / 1e9
        self._last_piece = 0.0
        self._done: wire.Done | None = None
        self._trace_headers, self._request_id = trace_context.current(), request_id.current()
        self._gap = metrics.gap.labels(model)  # to find it takes longer than to observe
        self.is_done = False
        metrics.waiting.labels(model).inc()

    def placed(self) -> None:
        """The model is loaded."""
        metrics, self._placed_ns = self._metrics, time.monotonic_ns()
        metrics.waiting.labels(self._model).dec()
        metrics.running.labels(self._model).inc()
        metrics.queue.labels(self._model).observe(time.monotonic() - self._began)

    def piece(self) -> None:
        now = time.monotonic()
        if self._last_piece:
            self._gap.observe(now - self._last_piece)
        else:
            self._metrics.first_token.labels(self._model).observe(now - self._began)
        self._last_piece = now

    def done(self, done: wire.Done) -> None:
        metrics, model, self._done = self._metrics, self._model, done
        self.is_done = done.reason != "cancelled"
        metrics.prompt_tokens.labels(model).inc(done.prompt_eval_count)
        metrics.cached_tokens.labels(model).inc(done.cached_count)
        metrics.generated_tokens.labels(model).inc(done.eval_count)
        metrics.thinking_tokens.labels(model).inc(done.thinking_count)
        metrics.prompt_seconds.labels(model).inc(done.prompt_eval_duration / 1e9)
        metrics.generated_seconds.labels(model).inc(done.eval_duration / 1e9)

    def end(self, outcome: str) -> None:
        metrics, model = self._metrics, self._model
        (metrics.running if self._placed_ns else metrics.waiting).labels(model).dec()
        metrics.requests.labels(model, outcome).inc()
        now = time.monotonic_ns()
        if outcome == "ok":
            metrics.duration.labels(model).observe(now / 1e9 - self._began)
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


class _RunnerHealth(Collector):
    """Read from the loaded models and from their runners when asked for."""

    def __init__(self, models: Table, labels: _Labels) -> None:
        self._loaded = models
        self._labels = labels
        self._healths: list[tuple[str, wire.Health]] = []

    async def look(self) -> None:
        """Ask the runners how they are; what does not answer soon is left out."""
        loaded = self._loaded.runners()
        found = await asyncio.gather(*(self._health(runner) for _, runner in loaded))
        names = [self._labels.of(model) for model, _ in loaded]
        self._healths = [(name, health) for name, health in zip(names, found, strict=True) if health is not None]

    @staticmethod
    async def _health(runner: Watched) -> wire.Health | None:
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                return await runner.health()
        except (TimeoutError, PunaError):
            return None

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        count = GaugeMetricFamily("puna_models_loaded", "Models that take memory.")
        memory = GaugeMetricFamily("puna_model_memory_bytes", "Memory of a loaded model.", labels=["model", "device"])
        running = self._loaded.running()
        count.add_metric([], len(running))
        taken: Counted[tuple[str, str]] = Counted()
        for item in running:
            if item.memory is None:
                continue
            label = self._labels.of(item.model)
            for device in item.memory.devices:
                taken[label, device.device] += device.total
            taken[label, "host"] += item.memory.input_weights
        for labels, n_bytes in taken.items():
            memory.add_metric(labels, n_bytes)
        yield count
        yield memory
        yield from self._of_runners()

    def _of_runners(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {
            "active": GaugeMetricFamily("puna_runner_requests_active", "Requests being computed.", labels=["model"]),
            "waiting": GaugeMetricFamily("puna_runner_requests_waiting", "Requests that wait for a place.", labels=["model"]),
            "cache_cells": GaugeMetricFamily("puna_cache_cells", "Tokens that the cache can hold.", labels=["model"]),
            "cache_used": GaugeMetricFamily("puna_cache_cells_used", "Those that hold a token.", labels=["model"]),
            "host_cache_bytes": GaugeMetricFamily(
                "puna_host_cache_bytes", "Memory taken by prefixes that lost their place in the cache.", labels=["model"]
            ),
            "host_cache_entries": GaugeMetricFamily("puna_host_cache_entries", "So many prefixes.", labels=["model"]),
            "images_encoded": CounterMetricFamily("puna_images_encoded", "Images that were encoded.", labels=["model"]),
            "images_reused": CounterMetricFamily(
                "puna_images_reused", "Images that a request found encoded, or in the hands of another.", labels=["model"]
            ),
            "image_cache_bytes": GaugeMetricFamily("puna_image_cache_bytes", "Memory taken by images.", labels=["model"]),
            "steps": CounterMetricFamily("puna_runner_steps", "Steps that the engine has computed.", labels=["model"]),
            "tokens": CounterMetricFamily("puna_runner_tokens", "Tokens computed, of prompts and answers.", labels=["model"]),
            "answer_tokens": CounterMetricFamily("puna_runner_answer_tokens", "Those of answers.", labels=["model"]),
        }
        for name, family in families.items():
            sums: Counted[str] = Counted()
            for label, health in self._healths:
                sums[label] += getattr(health, name)
            for label, value in sums.items():
                family.add_metric([label], value)
        yield from families.values()
