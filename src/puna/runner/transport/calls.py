"""What a runner can be called for beside completions, by path: one table, whichever way a call comes."""

from __future__ import annotations

from collections.abc import Callable

from puna.errors import NotFound
from puna.runner.failures import require_ready
from puna.runner.service import EngineService, Handle
from puna.runner.transport.counters import Counters
from puna.wire import (
    Discovery,
    EmbeddingReply,
    EmbeddingRequest,
    Failed,
    ImagesReply,
    ImagesRequest,
    LoadRequest,
    Message,
    Text,
    TokenizeRequest,
    Tokens,
    decode,
)

Reply = Callable[[Message], None]
"""Takes the answer, or Failed; any thread."""

QUICK_PATHS = frozenset({"/health", "/occupancy"})  # answered at once, also while everything else is busy
PATHS = (*sorted(QUICK_PATHS), "/devices", "/load", "/embedding", "/images", "/tokenize", "/detokenize")


class Calls:
    """*devices* looks at those of this machine, and may take a while."""

    def __init__(self, service: EngineService, counters: Counters, devices: Callable[[], Discovery]) -> None:
        self._service = service
        self._counters = counters
        self._devices = devices

    def answer(self, path: str, body: bytes, reply: Reply) -> Handle | None:
        """Find the answer and *reply* with it once, now or later; nothing is sent where this raises.

        Returns what ends the work for an answer that comes later. Only paths of QUICK_PATHS never block.
        Errors: BadRequest; NotFound for other paths; what the engine raises.
        """
        service = self._service
        match path:
            case "/health":
                reply(service.health())
            case "/occupancy":
                reply(service.occupancy())
            case "/devices":
                reply(self._devices())
            case "/load":
                reply(service.load(decode(LoadRequest, body)))
            case "/tokenize":
                text = decode(TokenizeRequest, body)
                reply(Tokens(tokens=service.tokenize(text.content, text.add_special, text.markers)))
            case "/images":
                require_ready(service)
                reply(ImagesReply(n_tokens=service.image_tokens(decode(ImagesRequest, body))))
            case "/detokenize":
                reply(Text(content=service.detokenize(decode(Tokens, body).tokens)))
            case "/embedding":
                return self._embed(decode(EmbeddingRequest, body), reply)
            case _:
                raise NotFound(f"a runner has no {path[:100]}")
        return None

    def _embed(self, request: EmbeddingRequest, reply: Reply) -> Handle:
        require_ready(self._service)
        self._counters.add("embedding_requests")

        def embedded(result: EmbeddingReply | Failed) -> None:
            if isinstance(result, EmbeddingReply):
                self._counters.add("embedded_tokens", result.prompt_eval_count)
            reply(result)

        return self._service.embed(request, embedded)
