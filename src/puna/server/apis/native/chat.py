"""``POST /api/chat``. Source: Ollama's REST API."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from puna.api.generate import ChatReply, ChatRequest, ReplyMessage
from puna.errors import BadRequest
from puna.server.apis.native.reply import answer, now, respond
from puna.server.checking.request import InferenceRequest
from puna.server.http.bodies import read_json
from puna.server.http.caller import Caller
from puna.server.http.replies import json_response
from puna.server.pipeline import Pipeline


async def chat(request: Request) -> Response:
    caller, pipeline = Caller.of(request), Pipeline.of(request)
    message = await read_json(request, ChatRequest)
    if not message.model:
        raise BadRequest("model is required")

    def reply(text: str = "", thinking: str = "", **fields: Any) -> ChatReply:
        fields.pop("context", None)
        answer_message = ReplyMessage(content=text, thinking=thinking or None, tool_calls=fields.pop("tool_calls", None))
        return ChatReply(model=message.model, created_at=now(), message=answer_message, **fields)

    if not message.messages and message.keep_alive == 0:
        await pipeline.unload(caller, message.model)
        return respond(reply(done=True, done_reason="unload"))
    plan = await pipeline.plan(InferenceRequest(caller, message))
    if message.debug_render_only:
        prompt = await pipeline.prompt_of(plan)
        rendered = {"rendered_template": prompt.shown, "image_count": len(prompt.images)}
        empty = {"role": "assistant", "content": ""}
        return json_response({"model": message.model, "created_at": now(), "message": empty, "_debug_info": rendered})
    if not message.messages:
        await pipeline.load(plan)
        return respond(reply(done=True, done_reason="load"))
    return await answer(pipeline.answer(plan), reply, stream=message.stream)


routes = [Route("/api/chat", chat, methods=["POST"])]
