"""What a request is told that cannot be computed: the HTTP status and the message of an error, whichever way it came."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from puna.errors import BadRequest, NotFound, Overloaded, PunaError, UnsupportedModel
from puna.runner.service import EngineService, NotLoaded
from puna.wire import Failed

log = logging.getLogger(__name__)

R = TypeVar("R")

_STATUS: tuple[tuple[type[PunaError], int], ...] = (
    (BadRequest, 400),
    (NotFound, 404),
    (UnsupportedModel, 501),
    (NotLoaded, 503),
    (Overloaded, 503),
    (PunaError, 500),
)


def deliver(emit: Callable[[R], None], reply: R) -> None:
    """Say the last message of a request; an error in who takes it is nobody else's. Never raises."""
    try:
        emit(reply)
    except BaseException:
        log.exception("a last message could not be delivered")


def failed(error: BaseException) -> Failed:
    if isinstance(error, PunaError):
        status = next(status for kind, status in _STATUS if isinstance(error, kind))
        return Failed(error=str(error), status=status, lacks_model=isinstance(error, NotLoaded))
    return Failed(error=f"internal error: {type(error).__name__}: {error}", status=500)


def require_ready(service: EngineService) -> None:
    """Errors: NotLoaded while the model is not there; PunaError with the reason for which it never will be."""
    health = service.health()
    if health.status == "ready":
        return
    if health.status == "error":
        raise PunaError(health.error or "the model could not be loaded")
    if health.status == "loading":
        raise NotLoaded(f"model is still loading ({health.progress:.0%}), wait for /health to say ready")
    raise NotLoaded
