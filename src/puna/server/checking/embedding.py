"""Whether a request for vectors or scores can be served, and with which options."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException

from puna import wire
from puna.api import options as model_options
from puna.errors import NotFound
from puna.llm.load import LoadRequirements, load_requirements
from puna.server.checking.models import check_images, check_keep_alive, open_model, sees
from puna.server.checking.request import EmbeddingRequest
from puna.server.http.caller import Caller
from puna.settings import Settings
from puna.store.models.model import StoredModel
from puna.store.store import Store

log = logging.getLogger(__name__)

_UNSUPPORTED = "this model does not support embeddings"
_NO_RANKING = "this model does not support ranking"


@dataclass(frozen=True)
class CheckedEmbedding:
    """A request for vectors or scores that can be served, with the model that it is for."""

    caller: Caller
    texts: wire.EmbeddingRequest
    model: StoredModel
    load: LoadRequirements
    keep_alive: float | None
    warnings: list[str]  # what of the request has no effect


async def check_embedding(request: EmbeddingRequest, store: Store, settings: Settings) -> CheckedEmbedding:
    """Errors: what opening the model raises; HTTPException 501 for a model that is made for something else; BadRequest for images
    that it cannot see; Forbidden.
    """
    model = await _open(store, request)
    _check_ability(model, request.texts)
    check_images(model, request.model, len(request.texts.images))
    options = model_options.merge(model.parameters, request.options)
    warnings = [*request.unused, *model_options.warnings(request.options), *_without_effect(request.options)]
    for warning in warnings:
        log.warning("%s", warning)
    load = load_requirements(
        options,
        settings,
        n_ctx_train=model.context_length or None,
        adapters=model.adapter_paths,
        projector=next(iter(model.projector_paths), None),
        has_vision=sees(model),
    )
    check_keep_alive(request.caller, request.keep_alive)
    return CheckedEmbedding(request.caller, request.texts, model, load, request.keep_alive, warnings)


async def _open(store: Store, request: EmbeddingRequest) -> StoredModel:
    try:
        return await open_model(store, request.caller, request.model)
    except NotFound as error:
        if not request.model:
            raise
        raise NotFound(f'model "{request.model}" not found, try pulling it first') from error


def _check_ability(model: StoredModel, texts: wire.EmbeddingRequest) -> None:
    if texts.query is None:
        able, refusal = {"embedding"}, _UNSUPPORTED
    else:  # why one that embeds does not rank is for the runner to say
        able, refusal = {"embedding", "rerank"}, _NO_RANKING
    if texts.inputs and able.isdisjoint(model.capabilities):
        raise HTTPException(501, refusal)


def _without_effect(options: Mapping[str, Any]) -> list[str]:
    """Options about answers mean nothing where none is written."""
    names = [name for name, value in options.items() if name in model_options.OF_REQUEST and value is not None]
    return [f'option "{name}" has no effect here: no answer is written' for name in names]
