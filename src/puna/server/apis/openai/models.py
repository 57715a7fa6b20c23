"""``GET /v1/models`` and ``GET /v1/models/{model}``. Source: Ollama's OpenAI compatibility."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from puna.errors import InvalidName, NotFound
from puna.server.http.replies import json_response
from puna.server.pipeline import Pipeline
from puna.store.models.model import StoredModel
from puna.store.names import Name


async def list_models(request: Request) -> Response:
    models = await asyncio.to_thread(Pipeline.of(request).store.list)
    return json_response({"object": "list", "data": [_model(model, model.name) for model in models]})


async def retrieve_model(request: Request) -> Response:
    store = Pipeline.of(request).store
    name = request.path_params["model"]
    try:
        model = await asyncio.to_thread(store.get, name)
    except InvalidName as error:
        raise NotFound(f"model '{name}' not found") from error
    return json_response(_model(model, name))


def _model(model: StoredModel, name: str) -> dict[str, Any]:
    owner = Name.parse(model.full_name).namespace
    return {"id": name, "object": "model", "created": int(model.modified_at), "owned_by": owner}


routes = [
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{model}", retrieve_model, methods=["GET"]),
]
