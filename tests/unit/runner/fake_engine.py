"""An EngineService without a model: it streams the words of the prompt from a thread of its own.

What a request does is written in its prompt: ``fail``, ``fail late``, ``refuse``, ``crash``, ``silent`` (prefill
without end), ``flood`` (as fast as it can, without end), ``count N`` (N pieces), else each word is a piece.
"""

from __future__ import annotations

import itertools
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from puna.errors import BadRequest, ContextOverflow, UnsupportedModel
from puna.runner.service import Handle, NotLoaded
from puna.wire import (
    CompletionReply,
    CompletionRequest,
    Done,
    EmbeddingReply,
    EmbeddingRequest,
    Failed,
    Health,
    HeldSequence,
    ImagesRequest,
    LoadReply,
    LoadRequest,
    Occupancy,
    Piece,
    SharedPrefix,
)


class FakeHandle:
    def __init__(self, request: CompletionRequest, emit: Callable[[CompletionReply], None]) -> None:
        self.request = request
        self.emit = emit
        self.cancelled_at = 0.0
        self.pieces = self._pieces(request.prompt)

    def cancel(self) -> None:
        self.cancelled_at = self.cancelled_at or time.perf_counter()

    @staticmethod
    def _pieces(prompt: str) -> Iterator[str]:
        if prompt == "flood":
            return itertools.repeat("x" * 10000)
        if prompt.startswith("count "):
            return (f"{i} " for i in range(int(prompt.split()[1])))
        return iter(prompt.split(" "))


def done(reason: str, n: int = 0) -> Done:
    return Done(
        reason="cancelled" if reason == "cancelled" else "stop",
        prompt_eval_count=3,
        cached_count=1,
        prompt_eval_duration=1,
        eval_count=n,
        eval_duration=1,
    )


class FakeEngine:
    def __init__(self, model_path: Path = Path("fake"), status: str = "ready", step_s: float = 0.0) -> None:
        self.is_loaded = status == "ready"
        self.status = status
        self.step_s = step_s
        self.handles: list[FakeHandle] = []
        self.is_closed = False
        self.close_s = 0.0
        self.steps = 0
        self._after_step: list[Callable[[], None]] = []
        self._new: queue.SimpleQueue[FakeHandle] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def health(self) -> Health:
        if self.status == "loading":
            return Health(status="loading", progress=0.25)
        if self.status == "error":
            return Health(status="error", error="the weights are gone")
        return Health(status="ready" if self.is_loaded else "launched", active=len(self.handles), steps=self.steps)

    def occupancy(self) -> Occupancy:
        held = HeldSequence(sequence=0, tokens=7, last_used=1, node=0)
        shared = SharedPrefix(parent=-1, begin=0, end=7, sequences=1)
        return Occupancy(computed=self.steps, sequences=[held], prefixes=[shared]) if self.is_loaded else Occupancy()

    def load(self, request: LoadRequest) -> LoadReply:
        if request.options.n_ctx > 1_000_000:
            return LoadReply(success=False, error="out of memory")
        self.is_loaded = request.operation == "commit"
        return LoadReply(success=True, n_ctx=request.options.n_ctx, engine="puna")

    def submit(self, request: CompletionRequest, emit: Callable[[CompletionReply], None]) -> Handle:
        if request.prompt == "refuse":
            raise ContextOverflow(9, 4)
        if request.prompt == "crash":
            raise RuntimeError("a bug")
        handle = FakeHandle(request, emit)
        self.handles.append(handle)
        self._new.put(handle)
        return handle

    def embed(self, request: EmbeddingRequest, emit: Callable[[EmbeddingReply | Failed], None]) -> Handle:
        """A vector of two numbers per input, from a thread of its own; ``silent`` never replies."""
        if "refuse" in request.inputs:
            raise UnsupportedModel("this model does not support embeddings")
        handle = FakeHandle(CompletionRequest(), lambda _: None)
        self.handles.append(handle)
        reply = EmbeddingReply(embeddings=[[float(len(text)), 0.5] for text in request.inputs], prompt_eval_count=7)
        answer = Failed(error="no luck", status=507) if "fail" in request.inputs else reply
        if "silent" not in request.inputs:
            threading.Thread(target=emit, args=(answer,)).start()
        return handle

    def after_step(self, call: Callable[[], None]) -> None:
        self._after_step.append(call)

    def image_tokens(self, request: ImagesRequest) -> list[int]:
        return [len(data) for data in request.images]

    def tokenize(self, text: str, add_special: bool, markers: Sequence[str] = ()) -> list[int]:
        if not self.is_loaded:
            raise NotLoaded
        return ([1] if add_special else []) + list(text.encode())

    def detokenize(self, tokens: list[int]) -> str:
        if any(not 0 <= token < 256 for token in tokens):
            raise BadRequest("token 999 is not in the vocabulary")
        return bytes(tokens).decode("utf-8", errors="replace")

    def close(self) -> None:
        time.sleep(self.close_s)
        self.is_closed = True
        self._thread.join(120)

    def _run(self) -> None:
        active: list[FakeHandle] = []
        while not self.is_closed:
            time.sleep(self.step_s or 0.0002)
            self.steps += 1
            while not self._new.empty():
                active.append(self._new.get())
            active = [handle for handle in active if not self._step(handle)]
            for call in self._after_step:
                call()
        for handle in active:
            handle.emit(Failed(error="the runner is ending", status=503))

    @staticmethod
    def _step(handle: FakeHandle) -> bool:
        """One piece or the end of one request; whether it ended."""
        prompt = handle.request.prompt
        if handle.cancelled_at:
            handle.emit(done("cancelled"))
        elif prompt == "silent":
            return False
        elif prompt == "fail":
            handle.emit(Failed(error="no luck", status=507))
        else:
            piece = next(handle.pieces, None)
            if piece is not None:
                handle.emit(Piece(content=piece))
                return False
            handle.emit(Failed(error="late", status=500) if prompt == "fail late" else done("stop", 7))
        handle.emit(done("stop"))  # an engine that errs: nothing may follow the terminal reply
        return True


if __name__ == "__main__":
    from puna.runner.process.main import main

    main(sys.argv[1:], lambda path: FakeEngine(path, status="launched"))
