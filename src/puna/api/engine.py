"""The reply of ``/api/engine``: what loaded models are doing and holding, in numbers. Puna's own."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class EngineMemory(BaseModel):
    """Bytes on one device."""

    device: str
    is_gpu: bool
    weights: int
    cache: int
    graph: int


class EngineModel(BaseModel):
    name: str
    node: str = ""  # of a cluster
    state: Literal["loading", "ready", "draining", "closing"]
    engine: str = ""
    context_length: int
    parallel: int  # requests that are computed at once
    seconds_left: float | None  # None: for ever
    memory: list[EngineMemory] = []
    host_memory: int = 0  # bytes beside the devices': vocabulary, token embeddings
    health: dict[str, Any] | None = None  # as the runner tells it; None: it does not answer
    occupancy: dict[str, Any] | None = None  # None also for keys that may not see single requests


class EngineDevice(BaseModel):
    name: str
    description: str
    library: str
    total: int
    free: int


class EngineReply(BaseModel):
    model_config = ConfigDict(protected_namespaces=())

    version: str
    now: float  # seconds on a clock that never goes back, for rates between two looks
    waiting: int  # requests that wait for their model
    devices: list[EngineDevice]  # the host first
    models: list[EngineModel]
