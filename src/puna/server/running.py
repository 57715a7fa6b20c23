"""A pipeline at work: what it stands on is opened, and closed again in good order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from puna import packed_files
from puna.llm.discovery import Machine
from puna.llm.launch import Launcher
from puna.server.metrics import Metrics
from puna.server.pipeline import Pipeline
from puna.server.placing.loading import Launch
from puna.server.placing.placement import Placement
from puna.server.placing.scheduler import Scheduler
from puna.server.rendering import Renderers
from puna.server.tracing import open_tracing
from puna.settings import Settings
from puna.store.sources.elsewhere import Elsewhere
from puna.store.store import Store

log = logging.getLogger(__name__)


def store_of(settings: Settings) -> Store:
    return Store(settings.models, keep_unused=settings.no_prune, elsewhere=Elsewhere.of(settings))


def scheduler_of(settings: Settings, launcher: Launcher, launch: Launch | None = None) -> Scheduler:
    """*launch*: instead of the launcher's."""
    return Scheduler(settings, launch or launcher.launch, launcher.machine or Machine())


def pipeline_of(settings: Settings, store: Store, scheduler: Placement, launcher: Launcher) -> Pipeline:
    """*launcher* is what the scheduler starts runners with."""
    metrics = Metrics(scheduler.models, launcher.spare)
    metrics.collectors.extend(scheduler.collectors)
    return Pipeline(settings, store, scheduler, metrics, Renderers())


@asynccontextmanager
async def at_work(pipeline: Pipeline, launcher: Launcher) -> AsyncGenerator[None, None]:
    """When the block ends no runner is left."""
    launcher.open()
    pipeline.scheduler.open()
    tracing = open_tracing(pipeline.settings.otlp_endpoint)
    if tracing is not None:
        pipeline.metrics.followers.append(tracing.record)
    search = asyncio.create_task(pipeline.scheduler.machine.look(), name="search for devices")
    try:
        await asyncio.to_thread(_tidy_up, pipeline.store, pipeline.settings.packed_cache)
        yield
    finally:
        search.cancel()
        await asyncio.wait({search})
        await pipeline.scheduler.close()
        await launcher.close()
        await pipeline.renderers.close()
        await asyncio.to_thread(pipeline.store.close)
        if tracing is not None:
            await asyncio.to_thread(tracing.close)


def _tidy_up(store: Store, packed_bytes: int) -> None:
    packed_files.tidy(store.root, packed_bytes)
    try:
        store.prune()
    except OSError as error:
        log.warning("%s could not be tidied up: %s", store.root, error)
