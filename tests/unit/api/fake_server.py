"""A small server with the native API's contract, for tests of the client and the command line.

What it answers depends on the model's name, see ``MODELS``. It keeps the requests it got.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tests.patience import PATIENCE_S

from puna.settings import Address

Json = dict[str, Any]

FINAL = {
    "done": True,
    "done_reason": "stop",
    "total_duration": 1_200_000_000,
    "load_duration": 95_000,
    "prompt_eval_count": 10,
    "prompt_eval_duration": 500_000_000,
    "eval_count": 20,
    "eval_duration": 400_000_000,
}
SHOWN: Json = {
    "license": "First line\n\nSecond line\nThird line",
    "modelfile": "FROM /somewhere\n",
    "parameters": 'stop                           "</s>"\ntemperature                    0.5',
    "template": "{{ .Prompt }}",
    "system": "Be kind.",
    "details": {"family": "llama", "parameter_size": "134.52M", "quantization_level": "Q4_1", "parent_model": ""},
    "model_info": {
        "general.architecture": "llama",
        "general.parameter_count": 134_515_008,
        "llama.context_length": 8192,
        "llama.embedding_length": 576,
        "tokenizer.ggml.tokens": ["a", "b", "c", "d"],
    },
    "tensors": [{"name": "token_embd.weight", "type": "Q8_0", "shape": [576, 49152]}],
    "capabilities": ["completion"],
}
TAGS: Json = {
    "models": [
        {"name": "echo:latest", "digest": "ab" * 32, "size": 91_737_440, "modified_at": "2026-08-22T12:00:00.123456789+02:00"},
        {"name": "thinker:1b", "digest": "cd" * 32, "size": 4_661_224_676, "modified_at": "2026-08-20T12:00:00Z"},
    ]
}
PS: Json = {
    "models": [
        {
            "name": "echo:latest",
            "digest": "ab" * 32,
            "size": 1_500_000_000,
            "size_vram": 0,
            "context_length": 4096,
            "expires_at": "2318-01-01T00:00:00Z",
        }
    ]
}
MODELS = ("echo", "eyes", "thinker", "broken", "endless", "embedder", "wordy", "slow", "pausing")


@dataclass
class FakeServer:
    """The application and what happened to it."""

    requests: list[tuple[str, Json]] = field(default_factory=list)
    pulled: set[str] = field(default_factory=set)
    blobs: dict[str, bytes] = field(default_factory=dict)
    cancelled: threading.Event = field(default_factory=threading.Event)
    resumed: threading.Event = field(default_factory=threading.Event)  # what "pausing" waits for in the middle of an answer
    address: Address = field(default_factory=Address)
    user: str = ""  # who is signed in

    def reset(self) -> None:
        for memory in (self.requests, self.pulled, self.blobs, self.cancelled, self.resumed):
            memory.clear()

    def bodies(self, path: str) -> list[Json]:
        return [body for name, body in self.requests if name == path]

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/api/version", self._version),
                Route("/api/tags", self._tags),
                Route("/api/ps", self._ps),
                Route("/api/show", self._show, methods=["POST"]),
                Route("/api/generate", self._generate, methods=["POST"]),
                Route("/api/chat", self._chat, methods=["POST"]),
                Route("/api/embed", self._embed, methods=["POST"]),
                Route("/api/pull", self._pull, methods=["POST"]),
                Route("/api/push", self._push, methods=["POST"]),
                Route("/api/me", self._me, methods=["POST"]),
                Route("/api/signout", self._signout, methods=["POST"]),
                Route("/api/create", self._create, methods=["POST"]),
                Route("/api/copy", self._copy, methods=["POST"]),
                Route("/api/delete", self._delete, methods=["DELETE"]),
                Route("/api/blobs/{digest}", self._blob, methods=["HEAD", "POST"]),
            ]
        )

    async def _body(self, request: Request) -> Json:
        body: Json = await request.json()
        self.requests.append((request.url.path, body))
        return body

    def _not_found(self, model: str) -> Response | None:
        known = model in MODELS or model in self.pulled
        return None if known else JSONResponse({"error": f"model '{model}' not found"}, 404)

    async def _version(self, _: Request) -> Response:
        return JSONResponse({"version": "9.9.9"})

    async def _tags(self, _: Request) -> Response:
        return JSONResponse(TAGS)

    async def _ps(self, _: Request) -> Response:
        return JSONResponse(PS)

    async def _show(self, request: Request) -> Response:
        body = await self._body(request)
        special = {"thinker": ["completion", "thinking"], "embedder": ["embedding"], "eyes": ["completion", "vision"]}
        capabilities = special.get(body["model"], ["completion"])
        return self._not_found(body["model"]) or JSONResponse({**SHOWN, "capabilities": capabilities})

    async def _generate(self, request: Request) -> Response:
        body = await self._body(request)
        model, prompt = body["model"], body.get("prompt", "")
        if missing := self._not_found(model):
            return missing
        if model == "embedder":
            return JSONResponse({"error": '"embedder" does not support generate'}, 400)
        if not prompt:
            return JSONResponse({"model": model, "response": "", "done": True, "done_reason": "load"})
        events = [{"thinking": piece} for piece in ("Let me ", "think.")] if model == "thinker" else []
        words = ["word "] * 60 if model == "wordy" else [f"{word} " for word in prompt.split(" ")]
        events += [{"response": word} for word in words]
        return self._answer(model, events)

    async def _chat(self, request: Request) -> Response:
        body = await self._body(request)
        if missing := self._not_found(body["model"]):
            return missing
        said = body["messages"][-1]["content"]
        return self._answer(body["model"], [{"message": {"content": piece}} for piece in ("You said: ", said)])

    def _answer(self, model: str, events: list[Json]) -> Response:
        async def lines() -> AsyncIterator[bytes]:
            try:
                for event in events:
                    yield _line({"model": model, "done": False, **event})
                if model == "broken":
                    yield _line({"error": "the model fell over"})
                    return
                if model == "pausing":
                    while not self.resumed.is_set():
                        await asyncio.sleep(0.01)
                    for event in events:
                        yield _line({"model": model, "done": False, **event})
                count = {"endless": 10**9, "slow": 50}.get(model, 0)
                for _ in range(count):
                    yield _line({"model": model, "done": False, "response": ".", "message": {"content": "."}})
                    await asyncio.sleep(0.02)
                yield _line({"model": model, "response": "", "message": {"content": ""}, **FINAL})
            finally:
                if model == "endless":
                    self.cancelled.set()

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    async def _embed(self, request: Request) -> Response:
        await self._body(request)
        return JSONResponse({"embeddings": [[0.6, 0.8]]})

    async def _pull(self, request: Request) -> Response:
        body = await self._body(request)
        events: list[Json] = [{"status": "pulling manifest"}]
        if body["model"] == "nowhere":
            events.append({"error": "pull model manifest: file does not exist"})
        elif body["model"] == "stuck":
            return StreamingResponse(_endless(_line(events[0])), media_type="application/x-ndjson")
        else:
            self.pulled.add(body["model"])
            layer = {"status": "pulling 0123456789ab", "digest": "sha256:0123", "total": 1000}
            events += [{**layer, "completed": n} for n in (0, 40, 500, 1000)] + [{"status": "success"}]
        return StreamingResponse(iter([_line(event) for event in events]), media_type="application/x-ndjson")

    async def _push(self, request: Request) -> Response:
        body = await self._body(request)
        layer = {"status": "pushing 0123456789ab", "digest": "sha256:0123", "total": 1000, "completed": 1000}
        events: list[Json] = [{"status": "retrieving manifest"}]
        events += [{"error": "unauthorized: access denied"}] if body["model"] == "nowhere" else [layer, {"status": "success"}]
        return StreamingResponse(iter([_line(event) for event in events]), media_type="application/x-ndjson")

    async def _me(self, request: Request) -> Response:
        if self.user:
            return JSONResponse({"name": self.user, "plan": "free"})
        return JSONResponse({"error": "unauthorized", "signin_url": "https://example.com/connect?name=box&key=c3No"}, 401)

    async def _signout(self, request: Request) -> Response:
        was_in, self.user = bool(self.user), ""
        return JSONResponse(None) if was_in else JSONResponse({"error": "you are not currently signed in"}, 401)

    async def _create(self, request: Request) -> Response:
        body = await self._body(request)
        if "?" in body["model"]:
            return JSONResponse({"error": "invalid model name"}, 400)
        return StreamingResponse(iter([_line({"status": "writing manifest"}), _line({"status": "success"})]))

    async def _copy(self, request: Request) -> Response:
        body = await self._body(request)
        known = body["source"] in MODELS
        return Response() if known else JSONResponse({"error": f'model "{body["source"]}" not found'}, 404)

    async def _delete(self, request: Request) -> Response:
        body = await self._body(request)
        return self._not_found(body["model"]) or Response()

    async def _blob(self, request: Request) -> Response:
        digest = request.path_params["digest"]
        if request.method == "HEAD":
            return Response(status_code=200 if digest in self.blobs else 404)
        try:
            content = await request.body()
        except ClientDisconnect:
            return Response(status_code=499)
        if f"sha256:{hashlib.sha256(content).hexdigest()}" != digest:
            return JSONResponse({"error": "digest mismatch"}, 400)
        self.blobs[digest] = content
        return Response(status_code=201)


async def _endless(line: bytes) -> AsyncIterator[bytes]:
    while True:
        yield line
        await asyncio.sleep(0.02)


def _line(event: Json) -> bytes:
    return json.dumps(event, ensure_ascii=False).encode() + b"\n"


def serve(fake: FakeServer, sock: socket.socket) -> None:
    uvicorn.Server(_config(fake)).run(sockets=[sock])


def _config(fake: FakeServer) -> uvicorn.Config:
    return uvicorn.Config(fake.app(), log_level="warning", lifespan="off", timeout_graceful_shutdown=1)


@contextmanager
def running() -> Iterator[FakeServer]:
    """A fake server in a thread of this process."""
    fake = FakeServer()
    with socket.create_server(("127.0.0.1", 0)) as sock:
        fake.address = Address(host="127.0.0.1", port=sock.getsockname()[1])
        server = uvicorn.Server(_config(fake))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            yield fake
        finally:
            server.should_exit = True
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
