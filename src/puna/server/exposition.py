"""What the server counts, the loaded models and their runners as Prometheus reads them at ``GET /metrics``.

Imported when somebody looks: a server that nobody watches does without the library.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter as Counted
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from puna import __version__, wire
from puna.errors import PunaError
from puna.llm.model_runner import Watched
from puna.server.metrics import Metrics
from puna.server.numbers import Number, Spread

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_HEALTH_TIMEOUT_S = 1.0


async def text(metrics: Metrics) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Counted(metrics))
    registry.register(_Running(metrics, await _healths(metrics)))
    for collector in metrics.collectors:
        registry.register(collector)
    ProcessCollector(registry=registry)  # of the server's process: memory, processor time, open files
    return generate_latest(registry)


async def _healths(metrics: Metrics) -> list[tuple[str, wire.Health]]:
    """How the runners are, by their models' labels; what does not answer soon is left out. What they count is counted."""
    loaded = metrics.models.runners()
    found = await asyncio.gather(*(_health(runner) for _, runner in loaded))
    healths = []
    for (model, runner), health in zip(loaded, found, strict=True):
        if health is not None:
            label = metrics.labels.of(model)
            metrics.models.totals.heard(runner.run, label, health.counts)
            healths.append((label, health))
    return healths


async def _health(runner: Watched) -> wire.Health | None:
    try:
        async with asyncio.timeout(_HEALTH_TIMEOUT_S):
            return await runner.health()
    except (TimeoutError, PunaError):
        return None


class _Counted(Collector):
    """What was counted until now."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        build = GaugeMetricFamily("puna_build_info", "Version of the server, always 1.", labels=["version"])
        build.add_metric([__version__], 1)
        yield build
        for number in self._metrics.numbers:
            yield _family(number)
        for spread in self._metrics.spreads:
            yield _histogram(spread)
        spare = self._metrics.spare
        idle = spare.private_bytes if spare else 0
        yield GaugeMetricFamily("puna_spare_runner_bytes", "Memory of the idle runner that waits for the next load.", value=idle)


def _family(number: Number) -> Metric:
    kind = GaugeMetricFamily if number.is_level else CounterMetricFamily
    family = kind(number.name, number.help, labels=number.labels)
    for labels, value in number.values.items():
        family.add_metric(labels, value)
    return family


def _histogram(spread: Spread) -> Metric:
    family = HistogramMetricFamily(spread.name, spread.help, labels=spread.labels)
    names = [*(str(float(bound)) for bound in spread.bounds), "+Inf"]
    for labels, series in spread.values.items():
        family.add_metric(labels, list(zip(names, itertools.accumulate(series.counts), strict=True)), series.sum)
    return family


class _Running(Collector):
    """The loaded models, and what their runners have told."""

    def __init__(self, metrics: Metrics, healths: list[tuple[str, wire.Health]]) -> None:
        self._loaded = metrics.models
        self._labels = metrics.labels
        self._healths = healths

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
        levels = {
            "active": ("puna_runner_requests_active", "Requests being computed."),
            "waiting": ("puna_runner_requests_waiting", "Requests that wait for a place."),
            "cache_cells": ("puna_cache_cells", "Tokens that the cache can hold."),
            "cache_used": ("puna_cache_cells_used", "Those that hold a token."),
            "host_cache_bytes": ("puna_host_cache_bytes", "Memory taken by prefixes that lost their place in the cache."),
            "host_cache_entries": ("puna_host_cache_entries", "So many prefixes."),
            "image_cache_bytes": ("puna_image_cache_bytes", "Memory taken by images."),
        }
        counts = {
            "images_encoded": ("puna_images_encoded", "Images that were encoded."),
            "images_reused": ("puna_images_reused", "Images that a request found encoded, or in the hands of another."),
            "steps": ("puna_runner_steps", "Steps that engines have computed, those that have ended included."),
            "tokens": ("puna_runner_tokens", "Tokens computed, of prompts and answers."),
            "answer_tokens": ("puna_runner_answer_tokens", "Those of answers."),
        }
        for field, (name, text) in levels.items():
            level, sums = GaugeMetricFamily(name, text, labels=["model"]), Counted[str]()
            for label, health in self._healths:
                sums[label] += getattr(health, field)
            yield _filled(level, sums)
        for field, (name, text) in counts.items():
            yield _filled(CounterMetricFamily(name, text, labels=["model"]), self._loaded.totals.sums[field])


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]) -> Metric:
    for label, value in values.items():
        family.add_metric([label], value)
    return family
