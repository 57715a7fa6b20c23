"""What is asked of whatever computes a model: a runner of this machine (runner.py), or replicas on others (puna.cluster)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Hashable, Sequence
from typing import Protocol

from puna import wire


class Watched(Protocol):
    """What can be asked how it is."""

    @property
    def run(self) -> Hashable:
        """The same for one process, and never that of another."""
        ...

    async def health(self) -> wire.Health: ...
    async def occupancy(self) -> wire.Occupancy: ...


class ModelRunner(Protocol):
    """With the errors of puna.llm.runner.Runner."""

    def complete(self, request: wire.CompletionRequest) -> AsyncGenerator[wire.CompletionReply, None]: ...
    async def embed(self, request: wire.EmbeddingRequest) -> wire.EmbeddingReply: ...
    async def tokenize(self, content: str, *, add_special: bool = True, markers: Sequence[str] = ()) -> list[int]: ...
    async def image_tokens(self, request: wire.ImagesRequest) -> list[int]: ...
