"""What a runner is asked beside completions, by path: one table, whichever way a question comes."""

from __future__ import annotations

from collections.abc import Callable

from puna.errors import NotFound
from puna.runner.failures import require_ready
from puna.runner.service import EngineService, Handle
from puna.runner.transport.counters import Tally
from puna.wire import EmbeddingReply, EmbeddingRequest, Failed, LoadRequest, Message, Text, TokenizeRequest, Tokens, decode

Tell = Callable[[Message], None]
"""Takes the answer, or Failed; any thread."""

QUICK_PATHS = frozenset({"/health"})  # answered at once, also while everything else is busy
PATHS = (*QUICK_PATHS, "/load", "/embedding", "/tokenize", "/detokenize")


class Asks:
    def __init__(self, service: EngineService, tally: Tally) -> None:
        self._service = service
        self._tally = tally

    def answer(self, path: str, body: bytes, tell: Tell) -> Handle | None:
        """Find the answer and *tell* it once, now or later; nothing is told where this raises.

        Returns what ends the work for an answer that comes later. Only paths of QUICK_PATHS never block.
        Errors: BadRequest; NotFound for other paths; what the engine raises.
        """
        service = self._service
        match path:
            case "/health":
                tell(service.health())
            case "/load":
                tell(service.load(decode(LoadRequest, body)))
            case "/tokenize":
                text = decode(TokenizeRequest, body)
                tell(Tokens(tokens=service.tokenize(text.content, text.add_special)))
            case "/detokenize":
                tell(Text(content=service.detokenize(decode(Tokens, body).tokens)))
            case "/embedding":
                return self._embed(decode(EmbeddingRequest, body), tell)
            case _:
                raise NotFound(f"a runner has no {path[:100]}")
        return None

    def _embed(self, request: EmbeddingRequest, tell: Tell) -> Handle:
        require_ready(self._service)
        self._tally.add("embedding_requests")

        def embedded(reply: EmbeddingReply | Failed) -> None:
            if isinstance(reply, EmbeddingReply):
                self._tally.add("embedded_tokens", reply.prompt_eval_count)
            tell(reply)

        return self._service.embed(request, embedded)
