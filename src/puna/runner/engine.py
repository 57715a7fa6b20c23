"""The engine: one thread that computes what all requests want next, step after step.

Knows nothing of HTTP. Requests come from any thread through ``submit`` and ``embed``; their replies leave on the engine's thread.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from puna.errors import PunaError
from puna.native.log import route_to_logging
from puna.runner.images.storing import Storing
from puna.runner.loading.load import Loaded
from puna.runner.loading.loader import Loader
from puna.runner.prefixes.slots import Slots
from puna.runner.scheduling.queue import Queue
from puna.runner.scheduling.scheduler import Plan, Scheduler
from puna.runner.scheduling.task import Waiting
from puna.runner.service import NotLoaded
from puna.runner.step.abort import CurrentStep
from puna.runner.step.compute import compute
from puna.runner.step.image_turn import ImageTurns
from puna.runner.step.lookahead import look_ahead
from puna.runner.step.trace import Trace
from puna.runner.tasks.prompt import cut_at
from puna.wire import (
    CompletionReply,
    CompletionRequest,
    EmbeddingReply,
    EmbeddingRequest,
    Failed,
    Health,
    ImagesRequest,
    LoadOptions,
    LoadReply,
    LoadRequest,
    Occupancy,
)

log = logging.getLogger(__name__)

ENDED = Health(status="error", error="the engine's thread has ended")


class StepLoop:
    """The engine's thread, from the reading of the weights to the close of the model."""

    def __init__(
        self,
        loader: Loader,
        model: Loaded,
        slots: Slots,
        token_gap_s: float,
        after_step: Sequence[Callable[[], None]],
        trace: Trace | None = None,
    ) -> None:
        self.model = model
        self.workload = model.workload()
        self.queue: Queue[Any] = Queue()
        storing = Storing(model.homes) if model.homes is not None else None
        self.scheduler = Scheduler[Any, Any](
            self.workload, model.cache, slots, model.limits, token_gap_s, model.prompt_tail, storing
        )
        self.step = CurrentStep(model.backend)
        self.images = _image_turns(model, token_gap_s, storing)
        self.n_steps = 0
        self.n_tokens = 0  # computed, of prompts and of answers
        self.n_answer_tokens = 0  # of them, those of answers
        self.thread: threading.Thread | None = None
        self._loader = loader
        self._after_step = after_step
        self._trace = trace
        self._is_ending = False
        self.queue.open()

    def start(self) -> None:
        thread = threading.Thread(target=self.run, name="engine", daemon=True)
        thread.start()
        self.thread = thread  # once it runs: one that does not is taken for dead

    def run(self) -> None:
        try:
            self._loader.read_weights()
        except BaseException as error:
            log.exception("the weights could not be read")
            self._give_up(error)
            return
        try:
            while self.queue.wait(self._is_busy):
                self.turn()
        except BaseException as error:
            self._give_up(error)
            raise

    def _is_busy(self) -> bool:
        return bool(self.scheduler.running)

    def turn(self) -> None:
        """One step, and all that lies before the next. Never raises: without its thread every request would wait for ever."""
        try:
            self.scheduler.admit(self.queue)
            plan = self.scheduler.plan(self.queue)
            began = time.perf_counter()
            if plan is not None:
                self._compute(plan)
            if self.images is not None:
                self.images.turn(self.scheduler.running, time.perf_counter() - began, is_idle=plan is None)
            self._emit()
            self.scheduler.retire()
        except BaseException as error:  # a panic in a library is no Exception
            log.exception("the engine is out of step; every request fails, the next ones start afresh")
            self._start_afresh(error)
            self._emit()

    def _compute(self, plan: Plan[Any]) -> None:
        """The forward pass, and what becomes of its output: tokens are sampled, or vectors pooled."""
        model, tasks = self.model, plan.tasks
        if not self.step.begin(tasks):
            return
        try:
            with model.paced(plan.n_tokens):
                began = time.perf_counter()
                if self.workload.streams:
                    look_ahead(model.forward, plan.parts, model.limits.n_batch, plan.pace)
                outputs = compute(model.forward, plan.parts)
                if outputs is None:
                    for task in tasks:
                        task.finish("cancelled")
                else:
                    self.workload.accept(plan.parts, outputs)
                    took_s = time.perf_counter() - began
                    self.n_tokens += plan.n_tokens
                    self.n_answer_tokens += sum(part.begin >= part.task.n_prompt for part in plan.parts)
                    self.scheduler.note(plan, took_s)
                    self._write_down(plan, took_s)
        except BaseException as error:  # one bad batch must not end the process: it ends the requests that were in it
            log.exception("a step failed")
            for task in tasks:
                task.fail(error)
        finally:
            self.step.end()
        self.n_steps += 1

    def _write_down(self, plan: Plan[Any], took_s: float) -> None:
        if self._trace is not None:
            n_running, n_waiting = len(self.scheduler.running), len(self.queue)
            self._trace.write(self.n_steps, plan, took_s, self.model.cache, n_running=n_running, n_waiting=n_waiting)

    def _emit(self) -> None:
        """What the step has added to answers leaves."""
        for call in self._after_step:
            try:
                call()
            except BaseException:
                log.exception("what follows a step could not be done")

    def _start_afresh(self, error: BaseException) -> None:
        """Everyone fails, and nothing is held; if not even that can be had, the model is of no use any more. Never raises."""
        self._fail_all(error)
        try:
            self.scheduler.slots.start_afresh()
        except BaseException as worse:
            log.exception("what sequences hold cannot be forgotten")
            self._give_up(worse)

    def _give_up(self, error: BaseException) -> None:
        """Nothing is computed any more: everyone is told why, and so is whoever asks for the state. Never raises."""
        self._loader.fail(error)
        self.queue.close()
        self._fail_all(error)

    def _fail_all(self, error: BaseException, status: int = 500) -> None:
        for request in [*self.scheduler.take_all(), *self.queue.take_all()]:
            request.fail(error, status)

    # Called from other threads.

    def submit(self, request: Waiting) -> RequestHandle:
        """Errors: NotLoaded."""
        if not self.is_alive:
            raise NotLoaded
        self.queue.put(request)
        return RequestHandle(self, request)

    def cancel(self, request: Waiting) -> None:
        """A step whose every request was cancelled is not worth finishing."""
        request.is_cancelled = True
        self.step.abort_unwanted()

    @property
    def is_alive(self) -> bool:
        """Whether the thread is there that the state speaks of."""
        is_expected = self._loader.takes_requests and not self._is_ending
        return self.thread is None or self.thread.is_alive() or not is_expected

    def health(self) -> Health:
        """A moment's picture: the thread works on."""
        state = self._loader.state if self.is_alive else ENDED
        cache, host_cache = self.model.cache, self.scheduler.slots.host_cache
        kept = self.model.sight.kept if self.model.sight else None
        return Health(
            status=state.status,
            progress=state.progress,
            error=state.error,
            active=len(self.scheduler.running),
            waiting=len(self.queue),
            steps=self.n_steps,
            tokens=self.n_tokens,
            answer_tokens=self.n_answer_tokens,
            cache_cells=cache.n_cells,
            cache_used=cache.n_cells - cache.n_free if cache.n_cells else 0,
            host_cache_bytes=host_cache.n_bytes + self.model.remembered_bytes if host_cache else 0,
            host_cache_entries=host_cache.n_entries if host_cache else 0,
            images_encoded=kept.n_encoded if kept else 0,
            images_reused=kept.n_reused if kept else 0,
            image_cache_bytes=kept.n_bytes if kept else 0,
        )

    def occupancy(self) -> Occupancy:
        """A moment's picture, too."""
        from puna.runner.prefixes.occupancy import look  # when somebody looks on: most runners never need it

        return look(self.scheduler.slots, list(self.scheduler.running), self.n_tokens)

    def end(self) -> None:
        """Break off the step, end the thread, and every request that is left."""
        self._is_ending = True
        for request in [*self.queue.first(len(self.queue)), *self.scheduler.running]:
            request.is_cancelled = True
        self.queue.close()
        self.step.abort_last()
        if self.images is not None:
            self.images.abort()
        if self.thread and self.thread is not threading.current_thread():
            self.thread.join()
        self._fail_all(PunaError("the model was unloaded"), 503)
        if self.model.sight is not None:
            self.model.sight.kept.close()


def _image_turns(model: Loaded, token_gap_s: float, storing: Storing | None) -> ImageTurns | None:
    if model.sight is None or model.eyes is None:
        return None
    return ImageTurns(model.eyes.encoder, model.sight.kept, model.eyes.backend, token_gap_s, storing)


class RequestHandle:
    """Lets the submitter end its request."""

    def __init__(self, loop: StepLoop, request: Waiting) -> None:
        self._loop = loop
        self._request = request

    def cancel(self) -> None:
        self._loop.cancel(self._request)


class Engine:
    """One model file, loaded and closed at will; an EngineService."""

    def __init__(self, model_path: Path, new_engine: bool | None = None, trace: Path | None = None) -> None:
        """*trace*: a file that is to have a line for each step. Errors: OSError when it cannot be written."""
        self._loader = Loader(model_path, new_engine)
        self._load_lock = threading.Lock()
        self._loop: StepLoop | None = None
        self._after_step: list[Callable[[], None]] = []
        self._trace = Trace(trace) if trace else None
        route_to_logging()

    @property
    def loop(self) -> StepLoop:
        """Errors: NotLoaded."""
        if self._loop is None:
            raise NotLoaded
        return self._loop

    def health(self) -> Health:
        loop = self._loop
        return self._loader.state if loop is None else loop.health()

    def occupancy(self) -> Occupancy:
        loop = self._loop
        return Occupancy() if loop is None else loop.occupancy()

    def load(self, request: LoadRequest) -> LoadReply:
        with self._load_lock:
            if request.operation == "close":
                self._unload()
                return LoadReply(success=True)
            reply = self._loader.load(request)
            if self._loader.model is not None:
                self._start(self._loader.model, request.options)
            return reply

    def _start(self, model: Loaded, options: LoadOptions) -> None:
        try:
            slots = Slots(model.cache, model.n_parallel, model.limits.max_sequences, model.host_cache(options.host_cache_bytes))
            self._loop = StepLoop(self._loader, model, slots, options.token_gap_s or math.inf, self._after_step, self._trace)
            self._loop.start()
        except BaseException:
            self._loop = None
            self._loader.close()
            raise

    @contextmanager
    def _asked(self) -> Iterator[StepLoop]:
        """The loop, for a question of another thread's; what it ends with when the model goes in its midst is that there is none.

        Errors: NotLoaded.
        """
        loop = self.loop
        try:
            yield loop
        except Exception as error:
            if self._loop is loop:
                raise
            raise NotLoaded from error

    def submit(self, request: CompletionRequest, emit: Callable[[CompletionReply], None]) -> RequestHandle:
        with self._asked() as loop:
            return loop.submit(loop.workload.complete(request, emit))

    def embed(self, request: EmbeddingRequest, emit: Callable[[EmbeddingReply | Failed], None]) -> RequestHandle:
        with self._asked() as loop:
            return loop.submit(loop.workload.embed(request, emit))

    def after_step(self, call: Callable[[], None]) -> None:
        self._after_step.append(call)

    def tokenize(self, text: str, add_special: bool, markers: Sequence[str] = ()) -> list[int]:
        first, *others = cut_at(text, markers)[::2]
        with self._asked() as loop:
            tokens = loop.model.tokenizer.encode(first, add_special=add_special)
            for part in others:
                tokens += loop.model.tokenizer.encode(part, add_special=False)
        return tokens

    def image_tokens(self, request: ImagesRequest) -> list[int]:
        with self._asked() as loop:
            return loop.workload.image_tokens(request)

    def detokenize(self, tokens: list[int]) -> str:
        with self._asked() as loop:
            return loop.model.tokenizer.decode(tokens)

    def _unload(self) -> None:
        if self._loop is not None:
            self._loop.end()
        self._loop = None
        self._loader.close()

    def close(self) -> None:
        with self._load_lock:
            self._unload()
            if self._trace is not None:
                self._trace.close()
