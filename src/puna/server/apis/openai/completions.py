"""``POST /v1/completions``. Source: Ollama's OpenAI compatibility."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from puna.api import openai as api
from puna.api.generate import GenerateRequest
from puna.server.answering.parts import AnswerPart, Finished, Logprobs
from puna.server.apis.collecting import collect_choices
from puna.server.apis.openai.shape import DEFAULTS, Shape, chunks, end_of, stream_of
from puna.server.checking.request import InferenceRequest
from puna.server.http.bodies import checked, read_json
from puna.server.http.caller import Caller
from puna.server.http.replies import json_response
from puna.server.pipeline import Pipeline
from puna.wire import TokenLogprob


async def completions(request: Request) -> Response:
    caller, pipeline = Caller.of(request), Pipeline.of(request)
    message = await read_json(request, api.CompletionRequest)
    native = await checked(request, lambda: _native(message))
    plan = await pipeline.plan(InferenceRequest(caller, native, DEFAULTS, message.unused, is_raw_without_template=True))
    shape = Shape.new("cmpl", "text_completion", message.model)
    if not message.prompt:
        await pipeline.load(plan)
        return json_response(_loaded(shape))
    choices = pipeline.answers(plan, message.n)
    if message.stream:
        streamed = [_TextChoice(index) for index in range(message.n)]
        return stream_of(chunks(choices, streamed, shape, shape.kind, with_usage=message.stream_options.include_usage))
    answers = await collect_choices(choices, message.n)
    shaped = [
        {"text": whole.text, "index": index, **_text_scores(whole.logprobs), "finish_reason": whole.finished.done.reason}
        for index, whole in enumerate(answers)
    ]
    return json_response(shape.message(shaped, **end_of([whole.finished for whole in answers])))


def _native(message: api.CompletionRequest) -> GenerateRequest:
    given = {
        "model": message.model,
        "prompt": message.prompt,
        "suffix": message.suffix,
        "options": message.options,
        "logprobs": message.logprobs is not None,
        "top_logprobs": message.logprobs or 0,
        "regex": message.regex,
        "lark": message.lark,
    }
    return GenerateRequest.model_validate(given)


def _loaded(shape: Shape) -> dict[str, Any]:
    """An empty prompt only loads the model."""
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    return shape.message([{"text": "", "index": 0, "finish_reason": "load"}], usage=usage)


def _text_scores(entries: list[TokenLogprob], begin: int = 0) -> dict[str, Any]:
    """Parallel lists, as this older API has them; offsets are in characters from the answer's beginning."""
    if not entries:
        return {}
    tokens = [entry.text.decode("utf-8", "replace") for entry in entries]
    return {
        "logprobs": {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [{other.text.decode("utf-8", "replace"): other.logprob for other in entry.top} for entry in entries],
            "text_offset": list(accumulate(map(len, tokens[:-1]), initial=begin)),
        }
    }


class _TextChoice:
    """One streamed choice of plain text; thinking and calls are no part of it."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._held: list[TokenLogprob] = []
        self._n_characters = 0

    def chunk(self, part: AnswerPart) -> dict[str, Any] | None:
        match part:
            case Logprobs(entries):
                self._held += entries
            case Finished():
                return self._made("", part.done.reason)
            case str(text):
                return self._made(text)
        return None

    def _made(self, text: str, reason: str | None = None) -> dict[str, Any]:
        scores = _text_scores(self._held, self._n_characters)
        self._held, self._n_characters = [], self._n_characters + len(text)
        return {"text": text, "index": self._index, **scores, "finish_reason": reason}


routes = [Route("/v1/completions", completions, methods=["POST"])]
