"""A model that is computed on nodes: what a request asks goes to a replica, and to another one when the first is lost.

A request of which nothing was streamed yet is as good as new, and goes elsewhere unseen. Of one in the middle of its answer
nobody else has the rest: tokens are drawn, and the client has what was said so far. It ends with one error.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Protocol, TypeVar

import msgspec

from puna import wire
from puna.cluster.head.line import NodeDeclines
from puna.cluster.head.replicas import Leases, Replica
from puna.cluster.messages import Model
from puna.cluster.routing.keys import keys_of
from puna.errors import NodeLost

log = logging.getLogger(__name__)

M = TypeVar("M")


class Replicas(Protocol):
    def use(
        self, model: Model, leases: Leases, n_ctx: int, lost: set[str], keys: list[int] | None = None
    ) -> AbstractAsyncContextManager[Replica]:
        """A replica that is loaded, on none of the nodes in *lost*, if possible with a context of so many tokens. A request
        with the *keys* of its prompt counts as one that the replica has, until the block ends; without, it is asked where the
        model is held, if that can be reached.

        Errors: NodeLost when no node is left; what loading raises.
        """
        ...

    def moved(self, node: str) -> None:
        """A request goes elsewhere since that node was lost."""
        ...

    def broken(self, node: str) -> None:
        """A request has ended in the middle of its answer since that node was lost."""
        ...


class ModelOnNodes:
    """In place of a runner. *leases*: where the request holds the model. *n_ctx*: tokens that it may have, wherever it goes."""

    def __init__(self, replicas: Replicas, model: Model, leases: Leases, n_ctx: int) -> None:
        self._replicas, self._model, self._leases, self._n_ctx = replicas, model, leases, n_ctx

    async def complete(self, request: wire.CompletionRequest) -> AsyncGenerator[wire.CompletionReply, None]:
        """As Runner.complete.

        Errors: NodeLost when the node was lost in the middle of the answer, or no other is left; RunnerDied.
        """
        keys, lost, n_pieces = keys_of(request), set[str](), 0
        while True:
            async with self._use(lost, keys) as replica:
                line = replica.node.line
                assert line is not None
                try:
                    async with aclosing(line.complete(self._model, request, self._leases.get(line, 0))) as replies:
                        async for reply in replies:
                            n_pieces += isinstance(reply, wire.Piece)
                            yield reply
                    return
                except NodeLost as error:
                    if n_pieces:
                        self._replicas.broken(replica.node.name)
                        raise NodeLost(
                            f"the node that computed this answer was lost in the middle of it, after {n_pieces} pieces "
                            f"({error}); please ask again"
                        ) from error
                    self._give_up(replica, lost, error)

    async def embed(self, request: wire.EmbeddingRequest) -> wire.EmbeddingReply:
        return await self._ask("/embedding", request, wire.EmbeddingReply, [])

    async def tokenize(self, content: str, *, add_special: bool = True, markers: Sequence[str] = ()) -> list[int]:
        request = wire.TokenizeRequest(content=content, add_special=add_special, markers=list(markers))
        return (await self._ask("/tokenize", request, wire.Tokens)).tokens

    async def detokenize(self, tokens: list[int]) -> str:
        return (await self._ask("/detokenize", wire.Tokens(tokens=tokens), wire.Text)).content

    async def image_tokens(self, request: wire.ImagesRequest) -> list[int]:
        return (await self._ask("/images", request, wire.ImagesReply)).n_tokens

    async def _ask(self, path: str, message: msgspec.Struct, kind: type[M], keys: list[int] | None = None) -> M:
        """Whatever is answered in one piece may be asked of anybody, as often as need be."""
        lost = set[str]()
        while True:
            async with self._use(lost, keys) as replica:
                line = replica.node.line
                assert line is not None
                try:
                    return await line.ask(path, message, kind, self._model, self._leases.get(line, 0))
                except NodeLost as error:
                    self._give_up(replica, lost, error)

    def _use(self, lost: set[str], keys: list[int] | None) -> AbstractAsyncContextManager[Replica]:
        return self._replicas.use(self._model, self._leases, self._n_ctx, lost, keys)

    def _give_up(self, replica: Replica, lost: set[str], error: NodeLost) -> None:
        log.info("a request goes elsewhere: %s", error)
        lost.add(replica.node.name)
        if not isinstance(error, NodeDeclines):
            self._replicas.moved(replica.node.name)
