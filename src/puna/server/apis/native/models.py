"""Routes about stored models: tags, show, create, pull, blobs, copy and delete.

Everything that touches the disk runs in threads.
Source: Ollama's REST API.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Hashable
from contextlib import aclosing
from typing import Any, cast

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from puna.api import go_json
from puna.api.models import (
    CopyRequest,
    CreateRequest,
    DeleteRequest,
    ListedModel,
    ModelDetails,
    PullRequest,
    PushRequest,
    ShowRequest,
    TagsResponse,
    TakeRequest,
    local_time,
)
from puna.engines import Choice, EngineName
from puna.errors import BadRequest, Forbidden, InvalidName, NotFound, TemplateError
from puna.prompt.gotemplate import GoTemplate
from puna.server.apis.native.modelfile import with_modelfile
from puna.server.http.bodies import read_json
from puna.server.http.caller import Caller
from puna.server.http.errors import describe, native_body
from puna.server.http.replies import NDJSON, Stream, json_response
from puna.server.pipeline import Pipeline
from puna.store.disk import space
from puna.store.disk.blobs import BlobWriter, parse_digest
from puna.store.models.model import StoredModel
from puna.store.models.show import show
from puna.store.names import Name
from puna.store.progress import Progress, Report
from puna.store.recipe import Recipe
from puna.store.sources import file
from puna.store.store import Store

UPLOAD_CHUNK_BYTES = 1 << 20
COPILOT = "GitHubCopilotChat/"


async def list_models(request: Request) -> Response:
    """GET /api/tags."""
    store = Pipeline.of(request).store

    def listed() -> dict[str, Any]:
        return TagsResponse(models=[_listed(model) for model in store.list()]).model_dump(mode="json")

    return json_response(await to_thread.run_sync(listed))


def _listed(model: StoredModel) -> ListedModel:
    details = ModelDetails(**model.details, context_length=model.context_length, embedding_length=model.embedding_length)
    return ListedModel(
        name=model.name,
        model=model.name,
        modified_at=local_time(model.modified_at),
        size=model.n_bytes,
        digest=model.digest,
        details=details,
        capabilities=model.capabilities,
        remote_model=model.config.remote_model,
        remote_host=model.config.remote_host,
    )


async def show_model(request: Request) -> Response:
    """POST /api/show."""
    body = await read_json(request, ShowRequest)
    caller, store = Caller.of(request), Pipeline.of(request).store
    if not body.reference:
        raise BadRequest("model is required")

    def shown() -> dict[str, Any]:
        is_file = caller.is_local and file.is_path(body.reference)
        model = store.from_file(body.reference) if is_file else store.get(body.reference)
        engine = _engine(Pipeline.of(request), model)
        found = show(model, verbose=body.verbose, system=body.system, engine=engine)
        fields = found.model_dump(mode="json", exclude={"tensors"})
        return {**fields, "tensors": found.tensors}  # as they are: there may be a hundred thousand

    reply = await to_thread.run_sync(shown)
    if request.headers.get("user-agent", "").startswith(COPILOT):
        reply["model_info"]["general.basename"] = body.reference
    return json_response(reply)


def _engine(pipeline: Pipeline, model: StoredModel) -> Choice | None:
    """What runs a loaded model; else what will, as far as its file tells."""
    if model.weights_path is None or model.file is None:
        return None
    reply = pipeline.scheduler.models.reply_of(model.weights_path)
    if reply is not None and reply.engine:
        return Choice(cast(EngineName, reply.engine), reply.engine_reason)
    from puna.model.look import engine_at  # with all architectures: a server nobody asks for that starts without them

    return engine_at(model.weights_path, pipeline.settings.new_engine)


async def delete_model(request: Request) -> Response:
    """DELETE /api/delete. A runner that has the model loaded keeps it until it is idle."""
    body = await read_json(request, DeleteRequest)
    store = Pipeline.of(request).store
    if not body.reference:
        raise BadRequest("model is required")
    try:
        await to_thread.run_sync(store.delete, body.reference)
    except InvalidName as error:
        raise BadRequest(f'name "{body.reference}" is invalid') from error
    return Response()


async def copy_model(request: Request) -> Response:
    """POST /api/copy."""
    body = await read_json(request, CopyRequest)
    store = Pipeline.of(request).store
    await to_thread.run_sync(store.copy, body.source, body.destination)
    return Response()


async def pull_model(request: Request) -> Response:
    """POST /api/pull. Clients that pull the same thing share one download."""
    body = await read_json(request, PullRequest)
    store = Pipeline.of(request).store
    key = store.source_of(body.reference, insecure=body.insecure).key
    name = Name.parse(body.name_for_it).key if body.name_for_it else ()

    def work(report: Report) -> object:
        return store.pull(body.reference, report, name=body.name_for_it, insecure=body.insecure)

    return await _followed(store, ("pull", key, name), work, stream=body.stream)


async def push_model(request: Request) -> Response:
    """POST /api/push."""
    body = await read_json(request, PushRequest)
    store = Pipeline.of(request).store
    if not body.reference:
        raise BadRequest("model is required")
    name = Name.parse(body.reference)

    def work(report: Report) -> None:
        store.push(body.reference, report, insecure=body.insecure)

    return await _followed(store, ("push", name.key, body.insecure), work, stream=body.stream)


async def create_model(request: Request) -> Response:
    """POST /api/create."""
    body = with_modelfile(await read_json(request, CreateRequest))
    store = Pipeline.of(request).store
    Name.parse(body.reference)
    recipe = _recipe(body)
    recipe.check()
    _check_template(body.template)
    return await _followed(store, object(), lambda report: store.create(body.reference, recipe, report), stream=body.stream)


def _check_template(text: str) -> None:
    try:
        GoTemplate.parse(text)
    except TemplateError as error:
        raise BadRequest(f"template error: {error}") from error


def _recipe(body: CreateRequest) -> Recipe:
    if body.remote_host:
        raise BadRequest("remote models are not supported")
    return Recipe(
        base=body.base,
        files=body.files,
        adapters=body.adapters,
        drafts=body.draft_files,
        draft_quantize=body.draft_quantize,
        template=body.template,
        system=body.system,
        licenses=body.licenses,
        parameters=body.parameters,
        messages=tuple(body.messages),
        renderer=body.renderer,
        parser=body.parser,
        requires=body.requires,
        quantize=body.quantize or body.quantization,
        info=body.info,
    )


async def _followed(store: Store, key: Hashable, work: Callable[[Report], object], *, stream: bool) -> Response:
    """The progress of some work as a stream, or only the last line of it."""
    lines = store.transfers.follow(key, work)
    if stream:
        return Stream(_encoded(lines), NDJSON, _error_line)
    last = Progress("success")
    try:
        async with aclosing(lines):
            async for line in lines:
                last = line
    except Exception as error:  # noqa: BLE001  # described as the errors of all routes are
        text, status = describe(error)
        status = 500 if status == 502 else status  # a source that fails is to Ollama's clients a server that does
        return Response(go_json.dumps(native_body(text, status)), status, media_type="application/json")
    return Response(go_json.dumps(last.as_dict()), media_type="application/json")


async def _encoded(lines: AsyncGenerator[Progress, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(lines):
        async for line in lines:
            yield go_json.dumps(line.as_dict()) + b"\n"


def _error_line(text: str, status: int) -> bytes:
    return go_json.dumps(native_body(text, status)) + b"\n"


async def check_blob(request: Request) -> Response:
    """HEAD /api/blobs/DIGEST."""
    store = Pipeline.of(request).store
    digest = request.path_params["digest"]
    if not await to_thread.run_sync(store.expects, digest):
        raise NotFound(f'blob "{digest}" not found')
    return Response()


async def take_blob(request: Request) -> Response:
    """POST /api/blobs: a file of a model that lies on this machine becomes a blob, without a copy where that can be."""
    body = await read_json(request, TakeRequest)
    store = Pipeline.of(request).store
    if not Caller.of(request).is_local:
        raise Forbidden("files are taken for callers on this machine only; upload it instead")
    await to_thread.run_sync(file.check_takeable, body.file)
    return await _followed(store, object(), lambda report: store.take(body.file, report), stream=True)


async def upload_blob(request: Request) -> Response:
    """POST /api/blobs/DIGEST. The bytes are hashed as they come; if they are not what was announced, nothing is kept."""
    store = Pipeline.of(request).store
    digest = parse_digest(request.path_params["digest"])
    if await to_thread.run_sync(store.expects, digest):
        async for _ in request.stream():  # a client that is sending takes an answer that comes too early for a failure
            pass
        return Response(status_code=200)
    n_expected = int(request.headers.get("content-length", 0))
    await to_thread.run_sync(space.require, store.root, n_expected)
    with await to_thread.run_sync(store.upload, n_expected) as writer:
        await _receive(request, writer)
        await to_thread.run_sync(writer.commit, digest)
    return Response(status_code=201)


async def _receive(request: Request, writer: BlobWriter) -> None:
    pending = bytearray()
    async for chunk in request.stream():
        pending += chunk
        if len(pending) >= UPLOAD_CHUNK_BYTES:
            await to_thread.run_sync(writer.write, bytes(pending))
            pending.clear()
    await to_thread.run_sync(writer.write, bytes(pending))


routes: list[Route] = [
    Route("/api/tags", list_models, methods=["GET"]),  # and HEAD with it
    Route("/api/show", show_model, methods=["POST"]),
    Route("/api/create", create_model, methods=["POST"]),
    Route("/api/pull", pull_model, methods=["POST"]),
    Route("/api/push", push_model, methods=["POST"]),
    Route("/api/blobs", take_blob, methods=["POST"]),
    Route("/api/blobs/{digest}", check_blob, methods=["HEAD"]),
    Route("/api/blobs/{digest}", upload_blob, methods=["POST"]),
    Route("/api/copy", copy_model, methods=["POST"]),
    Route("/api/delete", delete_model, methods=["DELETE"]),
]
