"""What the runner's HTTP side asks of an engine: the seam between them, which tests fill with a fake.

Knows neither HTTP nor how tokens are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from puna.errors import PunaError
from puna.wire import (
    CompletionReply,
    CompletionRequest,
    EmbeddingReply,
    EmbeddingRequest,
    Failed,
    Health,
    ImagesRequest,
    LoadReply,
    LoadRequest,
    Occupancy,
)


class NotLoaded(PunaError):
    """The engine was asked for something that needs a model in memory."""

    def __init__(self, message: str = "model is not loaded, POST /load first") -> None:
        super().__init__(message)


class Handle(Protocol):
    """One submitted request."""

    def cancel(self) -> None:
        """End the request soon, a completion with ``Done(reason="cancelled")``; any thread, any number of times, never blocks."""


class EngineService(Protocol):
    """An engine with one model. Everything may be called from any thread, also before the model is loaded."""

    def health(self) -> Health:
        """Never blocks: it is called between two lines of a stream."""

    def occupancy(self) -> Occupancy:
        """Never blocks, as health; empty where there is no model."""

    def load(self, request: LoadRequest) -> LoadReply:
        """Blocks while it measures or allocates; commit returns at once, and health shows the weights' progress.

        Memory that does not suffice is a reply (success false), not an error.
        Errors: LoadError, UnsupportedModel, FileFormatError; BadRequest for an operation that cannot follow the last.
        """

    def submit(self, request: CompletionRequest, emit: Callable[[CompletionReply], None]) -> Handle:
        """Start a request. emit is called on the engine's thread, does not block and does not raise.

        Exactly one Done or Failed is emitted, last, whatever happens; none when this call raises.
        Errors: NotLoaded; BadRequest.
        """

    def embed(self, request: EmbeddingRequest, emit: Callable[[EmbeddingReply | Failed], None]) -> Handle:
        """Start computing vectors. emit is called once, whatever happens, as submit's is; not at all when this raises.

        Errors: NotLoaded; BadRequest; UnsupportedModel when the model's hidden states are no embeddings.
        """

    def after_step(self, call: Callable[[], None]) -> None:
        """Have *call* called at the end of every step, on the engine's thread: what the step says has been emitted then."""

    def tokenize(self, text: str, add_special: bool, markers: Sequence[str] = ()) -> list[int]:
        """Of a text without the *markers* in it. Errors: NotLoaded while there is no vocabulary."""

    def image_tokens(self, request: ImagesRequest) -> list[int]:
        """How many tokens each image takes in a prompt; blocks while they are read.

        Errors: NotLoaded; BadRequest naming the image that is none; UnsupportedModel where the model sees nothing.
        """

    def detokenize(self, tokens: list[int]) -> str:
        """Errors: NotLoaded while there is no vocabulary; BadRequest for tokens outside it."""

    def close(self) -> None:
        """End every request with its terminal reply, stop the engine's thread and free the memory. Idempotent."""
