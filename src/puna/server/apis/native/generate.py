"""``POST /api/generate``. Source: Ollama's REST API."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from puna.api.generate import GenerateReply, GenerateRequest
from puna.server.answering.generation import run_scored
from puna.server.apis.native.reply import answer, now, respond
from puna.server.checking.check import Caller, generate_job
from puna.server.http.bodies import json_response, read_json


async def generate(request: Request) -> Response:
    caller = Caller.of(request)
    message = await read_json(request, GenerateRequest)
    model = await caller.open(message.model)

    def reply(text: str = "", thought: str = "", **fields: Any) -> GenerateReply:
        return GenerateReply(model=message.model, created_at=now(), response=text, thinking=thought or None, **fields)

    if not message.prompt and message.keep_alive == 0:
        caller.unload(model)
        return respond(reply(done=True, done_reason="unload"))
    job = generate_job(caller, model, message)
    if message.debug_render_only:
        rendered = {"rendered_template": await caller.prompt_of(job), "image_count": 0}
        return json_response({"model": message.model, "created_at": now(), "response": "", "_debug_info": rendered})
    if not message.prompt:
        await caller.load(job)
        return respond(reply(done=True, done_reason="load"))
    return await answer(run_scored(caller.scheduler, job), reply, stream=message.stream)


routes = [Route("/api/generate", generate, methods=["POST"])]
