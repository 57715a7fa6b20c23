"""``GET /openapi.json``: the server's own description of its routes, in OpenAPI 3.1.

Request bodies are described by the types that parse them, so the description cannot say otherwise than the code. Every
route of the application is in it; what this module does not know is described by its path alone.

Source: OpenAPI Specification 3.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from puna import __version__
from puna.api import anthropic, embed, engine, generate, models, openai, rerank, responses
from puna.server.http.later import flattened
from puna.server.http.replies import EVENT_STREAM, NDJSON, json_response

_REF = "#/components/schemas/{model}"
_JSON, _TEXT = "application/json", "text/plain"
_SCOPES = "With API keys: `Authorization: Bearer KEY` or `x-api-key: KEY`."

Schema = dict[str, Any]


def _object(*required: str, **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required or properties)}


_STRING, _INTEGER, _NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


_COUNTS = {"prompt_tokens": _INTEGER, "total_tokens": _INTEGER}
_VECTOR = _list(_NUMBER)
_RESULTS = _list(_object("index", "relevance_score", index=_INTEGER, relevance_score=_NUMBER))
_CHOICES = {"id": _STRING, "object": _STRING, "created": _INTEGER, "model": _STRING, "choices": _list({"type": "object"})}
_MODEL = _object(id=_STRING, object=_STRING, created=_INTEGER, owned_by=_STRING)

_ERRORS: dict[str, Schema] = {
    "Error": _object(error=_STRING),
    "OpenAIError": _object(error=_object("message", "type", message=_STRING, type=_STRING)),
    "AnthropicError": _object(type=_STRING, error=_object("message", "type", message=_STRING, type=_STRING), request_id=_STRING),
}


@dataclass(frozen=True)
class Operation:
    """What a route takes and gives. *stream* is the content type of a streamed answer."""

    summary: str
    body: type[BaseModel] | None = None
    required: tuple[str, ...] = ()
    reply: type[BaseModel] | Schema | None = None
    reply_type: str = _JSON
    stream: str = ""
    raw_body: bool = False
    statuses: tuple[int, ...] = (200,)


_OPERATIONS: dict[tuple[str, str], Operation] = {
    ("GET", "/"): Operation("Is the server there? Who accepts HTML gets the page", reply=_STRING, reply_type=_TEXT),
    ("HEAD", "/"): Operation("Is the server there?"),
    ("GET", "/health"): Operation("Is the server there?", reply=_object(status=_STRING)),
    ("HEAD", "/health"): Operation("Is the server there?"),
    ("GET", "/metrics"): Operation("Counters and gauges in Prometheus' format", reply=_STRING, reply_type=_TEXT),
    ("GET", "/openapi.json"): Operation("This description", reply={"type": "object"}),
    ("GET", "/api/version"): Operation("The server's version", reply=generate.VersionReply),
    ("HEAD", "/api/version"): Operation("The server's version"),
    ("GET", "/api/tags"): Operation("Stored models", reply=models.TagsResponse),
    ("HEAD", "/api/tags"): Operation("Stored models"),
    ("GET", "/api/ps"): Operation("Loaded models", reply=generate.PsReply),
    ("GET", "/api/engine"): Operation("What loaded models are doing and holding, in numbers", reply=engine.EngineReply),
    ("GET", "/web/{folder}/{name}"): Operation("A file of the page", reply=_STRING, reply_type="text/javascript"),
    ("GET", "/api/status"): Operation("Whether models elsewhere can be used", reply=_object(cloud={"type": "object"})),
    ("POST", "/api/me"): Operation("Who is signed in, or where to sign in"),
    ("POST", "/api/signout"): Operation("Sign out"),
    ("POST", "/api/show"): Operation("All about one model", models.ShowRequest, ("model",), models.ShowResponse),
    ("POST", "/api/generate"): Operation(
        "Continue a prompt; without one, load or unload the model",
        generate.GenerateRequest,
        ("model",),
        generate.GenerateReply,
        stream=NDJSON,
    ),
    ("POST", "/api/chat"): Operation(
        "Answer a conversation; without one, load or unload the model",
        generate.ChatRequest,
        ("model",),
        generate.ChatReply,
        stream=NDJSON,
    ),
    ("POST", "/api/embed"): Operation(
        "Vectors of texts",
        embed.EmbedRequest,
        ("model",),
        _object("model", "embeddings", model=_STRING, embeddings=_list(_VECTOR)),
    ),
    ("POST", "/api/embeddings"): Operation(
        "The vector of one text, not normalised", embed.EmbeddingsRequest, ("model",), _object(embedding=_VECTOR)
    ),
    ("POST", "/api/rerank"): Operation(
        "Texts in the order in which they answer a query",
        rerank.RerankRequest,
        ("model", "query", "documents"),
        _object("model", "results", model=_STRING, results=_RESULTS),
    ),
    ("POST", "/api/create"): Operation(
        "Make a model from another or from files", models.CreateRequest, ("model",), {"type": "object"}, stream=NDJSON
    ),
    ("POST", "/api/pull"): Operation("Download a model", models.PullRequest, ("model",), {"type": "object"}, stream=NDJSON),
    ("POST", "/api/search"): Operation(
        "Models elsewhere that can be pulled",
        models.SearchRequest,
        ("query",),
        _object("models", models=_list(_object("name", name=_STRING))),
    ),
    ("POST", "/api/push"): Operation(
        "Send a model to its registry", models.PushRequest, ("model",), {"type": "object"}, stream=NDJSON
    ),
    ("POST", "/api/copy"): Operation("Give a model another name", models.CopyRequest, ("source", "destination")),
    ("DELETE", "/api/delete"): Operation("Delete a model", models.DeleteRequest, ("model",)),
    ("HEAD", "/api/blobs/{digest}"): Operation("Is a blob there?"),
    ("POST", "/api/blobs"): Operation(
        "Make a blob of a model's file on the server's machine, for callers on it; the last line has the digest",
        models.TakeRequest,
        ("file",),
        {"type": "object"},
        stream=NDJSON,
    ),
    ("POST", "/api/blobs/{digest}"): Operation("Store a blob; its digest is checked", raw_body=True, statuses=(200, 201)),
    ("POST", "/v1/chat/completions"): Operation(
        "OpenAI: answer a conversation",
        openai.ChatCompletionRequest,
        ("model", "messages"),
        _object(*_CHOICES, **_CHOICES),
        stream=EVENT_STREAM,
    ),
    ("POST", "/v1/completions"): Operation(
        "OpenAI: continue a prompt",
        openai.CompletionRequest,
        ("model", "prompt"),
        _object(*_CHOICES, **_CHOICES),
        stream=EVENT_STREAM,
    ),
    ("POST", "/v1/embeddings"): Operation(
        "OpenAI: vectors of texts",
        embed.OpenAIEmbeddingsRequest,
        ("model", "input"),
        _object(object=_STRING, data=_list({"type": "object"}), model=_STRING, usage=_object(**_COUNTS)),
    ),
    ("POST", "/v1/rerank"): Operation(
        "Texts in the order in which they answer a query",
        rerank.RerankRequest,
        ("model", "query", "documents"),
        _object(object=_STRING, model=_STRING, results=_RESULTS, usage=_object(**_COUNTS)),
    ),
    ("GET", "/v1/models"): Operation("OpenAI: stored models", reply=_object(object=_STRING, data=_list(_MODEL))),
    ("GET", "/v1/models/{model}"): Operation("OpenAI: one stored model", reply=_MODEL),
    ("POST", "/v1/responses"): Operation(
        "OpenAI: answer, as a list of items",
        responses.ResponsesRequest,
        ("model", "input"),
        _object("id", "object", "status", "output", id=_STRING, object=_STRING, status=_STRING, output=_list({"type": "object"})),
        stream=EVENT_STREAM,
    ),
    ("POST", "/v1/messages"): Operation(
        "Anthropic: answer a conversation",
        anthropic.MessagesRequest,
        ("model", "max_tokens", "messages"),
        _object("id", "type", "role", "content", id=_STRING, type=_STRING, role=_STRING, content=_list({"type": "object"})),
        stream=EVENT_STREAM,
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        "Anthropic: tokens of a conversation", anthropic.CountRequest, ("model", "messages"), _object(input_tokens=_INTEGER)
    ),
}


def document(routes: Iterable[BaseRoute]) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    schemas = {**_ERRORS, **_schemas("validation")}
    for method, path in operations(routes):
        operation = _OPERATIONS.get((method, path), Operation(f"{method} {path}", reply={}))
        paths.setdefault(path, {})[method.lower()] = _describe(method, path, operation)
    for operation in _OPERATIONS.values():
        if operation.body is not None and operation.required:
            schemas[operation.body.__name__]["required"] = list(operation.required)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Puna", "version": __version__, "description": _SCOPES},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def operations(routes: Iterable[BaseRoute]) -> Iterator[tuple[str, str]]:
    for route in flattened(routes):
        if isinstance(route, Route):
            for method in sorted(route.methods or ()):
                yield method, route.path


def _schemas(mode: JsonSchemaMode) -> dict[str, Any]:
    """Of all types of bodies and replies, and of what they are made of, by name."""
    named = {t.__name__: t for o in _OPERATIONS.values() for t in (o.body, o.reply) if isinstance(t, type)}
    _, definitions = models_json_schema([(kind, mode) for kind in named.values()], ref_template=_REF)
    found: dict[str, Any] = definitions["$defs"]
    return found


def _describe(method: str, path: str, operation: Operation) -> dict[str, Any]:
    found: dict[str, Any] = {"summary": operation.summary, "responses": _responses(method, path, operation)}
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    if names:
        found["parameters"] = [{"name": name, "in": "path", "required": True, "schema": _STRING} for name in names]
    if operation.body is not None:
        content = {_JSON: {"schema": {"$ref": _REF.format(model=operation.body.__name__)}}}
        found["requestBody"] = {"required": True, "content": content}
    elif operation.raw_body:
        found["requestBody"] = {"required": True, "content": {"application/octet-stream": {}}}
    return found


def _responses(method: str, path: str, operation: Operation) -> dict[str, Any]:
    reply = operation.reply
    schema = {"$ref": _REF.format(model=reply.__name__)} if isinstance(reply, type) else reply
    content: dict[str, Any] = {} if schema is None else {operation.reply_type: {"schema": schema}}
    if operation.stream:
        content[operation.stream] = {}  # this version of OpenAPI has no words for what a stream consists of
    good: dict[str, Any] = {"description": "Success"} | ({"content": content} if content else {})
    found = {str(status): good for status in operation.statuses}
    name = "AnthropicError" if path.startswith("/v1/messages") else "OpenAIError" if path.startswith("/v1/") else "Error"
    error: dict[str, Any] = {"description": "What went wrong"}
    if method != "HEAD":
        error["content"] = {_JSON: {"schema": {"$ref": _REF.format(model=name)}}}
    return found | {"default": error}


async def openapi(request: Request) -> Response:
    return json_response(document(request.app.routes))


routes = [Route("/openapi.json", openapi, methods=["GET"])]
