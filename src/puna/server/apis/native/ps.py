"""``GET /``, ``GET /api/version`` and ``GET /api/ps``: is the server there, which one is it, and what does it hold.

Source: Ollama's REST API.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from puna import __version__
from puna.api.generate import PsReply, RunningModel, VersionReply
from puna.server.apis.native.reply import respond
from puna.server.pipeline import Pipeline
from puna.server.placing.loaded import Running
from puna.store.models.model import StoredModel
from puna.wire import MemoryReport

_FOREVER_S = (1 << 63) // 10**9  # how Ollama shows "for ever": as far ahead as Go's clock goes, about 292 years


async def liveness(request: Request) -> Response:
    """A browser that goes there gets the page; all others the text that clients of Ollama look for."""
    if "text/html" in request.headers.get("accept", "").lower():
        from puna.server.apis.page import page  # with all its files: a server nobody looks at starts without them

        return await page(request)
    return PlainTextResponse("Ollama is running", headers={"vary": "Accept"})


async def version(_: Request) -> Response:
    return respond(VersionReply(version=__version__))


async def ps(request: Request) -> Response:
    running = Pipeline.of(request).scheduler.models.running()
    return respond(PsReply(models=[_running_model(model) for model in running]))


def _running_model(running: Running) -> RunningModel:
    model = running.model
    assert isinstance(model, StoredModel)
    return RunningModel(
        name=model.name,
        model=model.name,
        size=running.memory.total if running.memory else model.n_bytes,  # until it is loaded, what its files hold
        digest=model.digest,
        details=model.details,
        expires_at=_expiry(running.seconds_left),
        size_vram=_on_gpus(running.memory),
        context_length=running.n_ctx,
        node=running.node or None,
    )


def _on_gpus(memory: MemoryReport | None) -> int:
    """All of it when every layer is on a GPU: what stays with the host then is not what makes a model slow."""
    if memory is None:
        return 0
    has_host_layers = any(any(d.weights) or any(d.cache) for d in memory.devices if not d.is_gpu)
    return memory.on_gpus if has_host_layers or not memory.on_gpus else memory.total


def _expiry(seconds_left: float) -> str:
    """In the local time zone, with its offset."""
    return (datetime.now(UTC) + timedelta(seconds=min(seconds_left, _FOREVER_S))).astimezone().isoformat()


routes = [
    Route("/", liveness, methods=["GET", "HEAD"]),
    Route("/api/version", version, methods=["GET", "HEAD"]),
    Route("/api/ps", ps, methods=["GET"]),
]
