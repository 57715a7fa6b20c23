"""Vectors and scores of texts, from a request to the runner's reply; the routes put them in their shapes.

Knows the scheduler and the runner's messages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.exceptions import HTTPException

from puna import wire
from puna.api import options as model_options
from puna.errors import NotFound, UnsupportedModel
from puna.llm.load import wanted_load
from puna.server.checking.check import Caller
from puna.store.models.model import StoredModel

log = logging.getLogger(__name__)

_UNSUPPORTED = "this model does not support embeddings"
_NO_RANKING = "this model does not support ranking"


class Asked(Protocol):
    """Of a request, what does not concern its texts."""

    @property
    def options(self) -> dict[str, Any]: ...

    @property
    def keep_alive(self) -> float | None: ...


@dataclass(frozen=True)
class Embedded:
    """Vectors in the order of the inputs, with durations in nanoseconds from the request's beginning."""

    reply: wire.EmbeddingReply
    load_ns: int
    total_ns: int
    warnings: list[str]  # what of the request has no effect


async def open_model(caller: Caller, name: str) -> StoredModel:
    try:
        return await caller.open(name)
    except NotFound as error:
        if not name:
            raise
        raise NotFound(f'model "{name}" not found, try pulling it first') from error


async def vectors_of(
    caller: Caller, model: StoredModel, message: Asked, wanted: wire.EmbeddingRequest, unused: Sequence[str] = ()
) -> Embedded | None:
    """None without inputs: then the model is only loaded. *unused* tells which fields of the client's request have no effect.

    Errors: what loading raises; HTTPException 501 for a model that is made for something else; BadRequest; RunnerDied.
    """
    if wanted.query is None:
        able, refusal = {"embedding"}, _UNSUPPORTED
    else:  # why one that embeds does not rank is for the runner to say
        able, refusal = {"embedding", "rerank"}, _NO_RANKING
    if wanted.inputs and able.isdisjoint(model.capabilities):
        raise HTTPException(501, refusal)
    options = model_options.merge(model.parameters, message.options)
    warnings = [*unused, *model_options.warnings(message.options), *_without_effect(message.options)]
    for warning in warnings:
        log.warning("%s", warning)
    load = wanted_load(options, caller.settings, n_ctx_train=model.context_length or None, adapters=model.adapter_paths)
    keep_alive = caller.keep_alive(model, message.keep_alive)
    if not wanted.inputs:
        async with caller.scheduler.acquire(model, load, keep_alive):
            return None
    with caller.metrics.embedding(model, caller.began_ns, wanted) as seen:
        async with caller.scheduler.acquire(model, load, keep_alive) as loaded:
            load_ns = time.monotonic_ns() - caller.began_ns
            n_ctx = load.n_ctx_in(loaded.n_ctx)
            try:
                reply = await loaded.runner.embed(msgspec.structs.replace(wanted, n_ctx=n_ctx))
            except UnsupportedModel as error:
                raise HTTPException(501, str(error)) from error
        seen(reply.prompt_eval_count)
    if reply.truncated_count:
        log.warning("inputs were longer than the context of %d tokens: %d tokens were left out", n_ctx, reply.truncated_count)
    return Embedded(reply, load_ns, time.monotonic_ns() - caller.began_ns, warnings)


def _without_effect(options: Mapping[str, Any]) -> list[str]:
    """Options about answers mean nothing where none is written."""
    names = [name for name, value in options.items() if name in model_options.OF_REQUEST and value is not None]
    return [f'option "{name}" has no effect here: no answer is written' for name in names]
