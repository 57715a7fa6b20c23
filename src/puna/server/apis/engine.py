"""``GET /api/engine``: a live picture of what loaded models are doing and holding, for the page and for people with curl.

Numbers only. Single requests are told to those keys alone that are good for management: what others ask, and how much of it
they have in common, is nobody's business where several share a server.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from puna import __version__, wire
from puna.api.engine import EngineDevice, EngineMemory, EngineModel, EngineReply
from puna.errors import PunaError
from puna.llm.discovery import Machine
from puna.server.http.access import may_manage
from puna.server.http.replies import json_response
from puna.server.pipeline import Pipeline
from puna.server.placing.placement import Shown

RUNNER_TIMEOUT_S = 1.0


async def engine(request: Request) -> Response:
    scheduler = Pipeline.of(request).scheduler
    is_detailed = may_manage(request)
    shown = scheduler.models.shown()
    models = await asyncio.gather(*(_model(item, is_detailed=is_detailed) for item in shown))
    reply = EngineReply(
        version=__version__,
        now=time.monotonic(),
        waiting=len(scheduler.queue) + scheduler.models.n_waiting,
        devices=_devices(scheduler.machine),
        models=sorted(models, key=lambda model: (model.name, model.node)),
    )
    return json_response(reply.model_dump())


def _devices(machine: Machine) -> list[EngineDevice]:
    memory = machine.memory()
    host = EngineDevice(name="host", description="memory of this machine", library="", total=memory.total, free=memory.free)
    gpus = machine.gpus or []
    return [
        host,
        *(
            EngineDevice(name=gpu.name, description=gpu.description, library=gpu.library, total=gpu.total, free=gpu.free)
            for gpu in gpus
        ),
    ]


async def _model(loaded: Shown, *, is_detailed: bool) -> EngineModel:
    running = loaded.running(asyncio.get_running_loop().time())
    memory = running.memory
    health, occupancy = await _asked(loaded, is_detailed=is_detailed)
    return EngineModel(
        name=str(getattr(loaded.model, "name", loaded.model.model_path.name)),
        node=loaded.node,
        state=loaded.state.value,
        engine=loaded.reply.engine if loaded.reply else "",
        context_length=loaded.n_ctx,
        parallel=loaded.n_parallel,
        seconds_left=None if math.isinf(running.seconds_left) else running.seconds_left,
        memory=[_on_device(device) for device in memory.devices] if memory else [],
        host_memory=memory.input_weights + memory.host if memory else 0,
        health=health,
        occupancy=occupancy,
    )


def _on_device(memory: wire.DeviceMemory) -> EngineMemory:
    return EngineMemory(
        device=memory.device,
        is_gpu=memory.is_gpu,
        weights=sum(memory.weights),
        cache=sum(memory.cache),
        graph=memory.graph,
    )


async def _asked(loaded: Shown, *, is_detailed: bool) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """What the runner says of itself; a busy one that does not answer soon is not waited for."""
    runner = loaded.process
    if runner is None:
        return None, None
    try:
        async with asyncio.timeout(RUNNER_TIMEOUT_S):
            health = await runner.health()
            occupancy = await runner.occupancy() if is_detailed else None
    except (TimeoutError, PunaError):
        return None, None
    return msgspec.to_builtins(health), msgspec.to_builtins(occupancy)


routes = [Route("/api/engine", engine, methods=["GET"])]
