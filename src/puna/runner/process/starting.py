"""An engine that is still being made: others talk to it before it is there.

Knows nothing of how an engine is made.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from puna.errors import LoadError, PunaError
from puna.runner.service import EngineService, Handle, NotLoaded
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

log = logging.getLogger(__name__)


class StartingEngine:
    """An EngineService that makes the real one in a thread, and stands for it until it is there.

    With *load*, the model is loaded as soon as the engine is made, and a failure shows in health.
    """

    def __init__(self, make: Callable[[], EngineService], load: LoadRequest | None = None) -> None:
        self._made = threading.Event()
        self._engine: EngineService | None = None
        self._error: PunaError | None = None
        self._after_step: list[Callable[[], None]] = []
        threading.Thread(target=self._start, args=(make, load), name="engine-start", daemon=True).start()

    def _start(self, make: Callable[[], EngineService], load: LoadRequest | None) -> None:
        try:
            engine = make()
            engine.after_step(self._step_ended)
            self._engine = engine
            self._made.set()
            if load is not None:
                reply = self._engine.load(load)
                if not reply.success:
                    raise LoadError(reply.error or "the model does not fit into memory")
        except PunaError as error:
            log.error("the model cannot be used: %s", error)
            self._error = error
        except Exception as error:
            log.exception("the engine failed to start")
            self._error = LoadError(f"the engine failed to start: {type(error).__name__}: {error}")
        finally:
            self._made.set()

    def _step_ended(self) -> None:
        for call in self._after_step:
            call()

    def after_step(self, call: Callable[[], None]) -> None:
        self._after_step.append(call)

    def _get(self) -> EngineService:
        if self._engine is not None:
            return self._engine
        if self._error is not None:
            raise self._error
        raise NotLoaded

    def health(self) -> Health:
        if self._error is not None:
            return Health(status="error", error=str(self._error))
        return Health(status="launched") if self._engine is None else self._engine.health()

    def occupancy(self) -> Occupancy:
        return Occupancy() if self._engine is None else self._engine.occupancy()

    def load(self, request: LoadRequest) -> LoadReply:
        """Waits for the engine to be made; a later success clears the error of an earlier attempt."""
        self._made.wait()
        reply = self._get().load(request)
        if reply.success:
            self._error = None
        return reply

    def submit(self, request: CompletionRequest, emit: Callable[[CompletionReply], None]) -> Handle:
        return self._get().submit(request, emit)

    def embed(self, request: EmbeddingRequest, emit: Callable[[EmbeddingReply | Failed], None]) -> Handle:
        return self._get().embed(request, emit)

    def tokenize(self, text: str, add_special: bool, markers: Sequence[str] = ()) -> list[int]:
        return self._get().tokenize(text, add_special, markers)

    def image_tokens(self, request: ImagesRequest) -> list[int]:
        return self._get().image_tokens(request)

    def detokenize(self, tokens: list[int]) -> str:
        return self._get().detokenize(tokens)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
