"""The engine: one thread that computes what all requests want next, step after step.

Knows nothing of HTTP. Requests come from any thread through ``submit``; their replies leave on the engine's thread.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from puna.errors import BadRequest, OutOfMemory, PunaError, UnsupportedModel
from puna.kvcache.batch import batch
from puna.kvcache.cache import NotSupported, resume_point
from puna.model.pooling import Pooling
from puna.native.log import route_to_logging
from puna.runner.loading.load import Loaded, allocate, measure, read_weights
from puna.runner.loading.model_file import ModelFile
from puna.runner.prefixes.checkpoints import stopping
from puna.runner.prefixes.groups import cut
from puna.runner.prefixes.slots import Slots
from puna.runner.scheduling.admission import QUEUE_WINDOW, Answers, Room, make_room, next_to_start, resume_paused
from puna.runner.scheduling.pace import UNBOUNDED, work
from puna.runner.scheduling.schedule import schedule
from puna.runner.scheduling.step_times import StepTimes
from puna.runner.scheduling.turns import Turns
from puna.runner.service import NotLoaded
from puna.runner.step.forward import Forward
from puna.runner.step.lookahead import next_batch
from puna.runner.step.sampling import has_number, sample
from puna.runner.tasks.completion import Request
from puna.runner.tasks.embedding import (
    PACKED_TOKENS,
    EmbeddedText,
    EmbeddingJob,
    Task,
    Waiting,
    embed,
    fills_no_batch,
    pair_separator,
    schedule_whole,
    take,
)
from puna.sample.transforms import Floats
from puna.wire import (
    CompletionReply,
    CompletionRequest,
    EmbeddingReply,
    EmbeddingRequest,
    Failed,
    Health,
    LoadReply,
    LoadRequest,
)

log = logging.getLogger(__name__)

ENDED = Health(status="error", error="the engine's thread has ended")


class RequestHandle:
    """Lets the submitter end its request."""

    def __init__(self, engine: Engine, request: Waiting) -> None:
        self._engine = engine
        self._request = request

    def cancel(self) -> None:
        self._engine.cancel(self._request)


class Engine:
    """``_lock`` guards what other threads see: the waiting requests, who is in the step, the state."""

    def __init__(self, model_path: Path, new_engine: bool | None = None) -> None:
        self._file = ModelFile(model_path)
        self._new_engine = new_engine  # which engine must be used; None: whichever supports the file
        self._lock = threading.Lock()
        self._load_lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._loaded: Loaded | None = None
        self._slots: Slots | None = None
        self._times = StepTimes(math.inf)
        self._pace = UNBOUNDED  # of the step at hand
        self._answers = Answers()
        self._turns = Turns()
        self._waiting: deque[Waiting] = deque()
        self._running: list[Task] = []
        self._in_step: Sequence[Task] = ()
        self._health = Health(status="launched")
        self._n_steps = 0
        self._n_admitted = 0
        self._is_closing = False
        self._after_step: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        route_to_logging()

    # Loading.

    def health(self) -> Health:
        h = self._health if self._is_computing() else ENDED
        n_cells, n_free = self._cells()
        slots = self._slots
        host_cache = slots.host_cache if slots else None
        return Health(
            status=h.status,
            progress=h.progress,
            error=h.error,
            active=len(self._running),
            waiting=len(self._waiting),
            steps=self._n_steps,
            cache_cells=n_cells,
            cache_used=n_cells - n_free,
            host_cache_bytes=host_cache.n_bytes + self._need().remembered_bytes if host_cache else 0,
            host_cache_entries=host_cache.n_entries if host_cache else 0,
        )

    def _cells(self) -> tuple[int, int]:
        """Cells of the cache, and those of them that are free. Read while the engine's thread works: a moment's picture."""
        loaded = self._loaded
        if loaded is None:
            return 0, 0
        n_cells = loaded.cache.n_cells
        return (n_cells, loaded.cache.n_free) if n_cells else (0, 0)

    def load(self, request: LoadRequest) -> LoadReply:
        with self._load_lock:
            if request.operation == "close":
                self._unload()
                return LoadReply(success=True)
            if self._loaded is not None:
                raise BadRequest("model already loaded")
            try:
                if request.operation == "fit":
                    memory, choice = measure(self._file, request.options, self._new_engine)
                    return LoadReply(success=True, memory=memory, engine=choice.engine, engine_reason=choice.reason)
                return self._allocate(request)
            except OutOfMemory as error:
                return LoadReply(success=False, error=str(error))

    def _allocate(self, request: LoadRequest) -> LoadReply:
        loaded = allocate(self._file, request.options, self._new_engine)
        reply = LoadReply(
            success=True,
            memory=loaded.memory(),
            n_ctx=loaded.limits.n_ctx,
            engine=loaded.choice.engine,
            engine_reason=loaded.choice.reason,
        )
        if request.operation == "alloc":
            # The memory was there; commit takes it again. Between the two the layout may still change.
            loaded.close()
            return reply
        self._loaded = loaded
        host_cache = loaded.host_cache(request.options.host_cache_bytes)
        self._slots = Slots(loaded.cache, loaded.n_parallel, loaded.limits.max_sequences, host_cache)
        self._times = StepTimes(request.options.token_gap_s or math.inf)
        self._health = Health(status="loading")
        thread = threading.Thread(target=self._run, name="engine", daemon=True)
        thread.start()
        self._thread = thread  # once it runs: one that does not is taken for dead
        return reply

    def _is_computing(self) -> bool:
        """Whether the thread is there that the state speaks of."""
        thread = self._thread
        is_expected = self._health.status in ("ready", "loading") and not self._is_closing
        return thread is None or thread.is_alive() or not is_expected

    def _run(self) -> None:
        loaded = self._need()
        try:
            read_weights(loaded, lambda share: self._set_health(Health(status="loading", progress=share)))
        except BaseException as error:
            log.exception("the weights could not be read")
            self._give_up(error)
            return
        self._set_health(Health(status="ready", progress=1.0))
        try:
            while self._wait_for_work():
                self._turn()
        except BaseException as error:
            self._give_up(error)
            raise

    def _give_up(self, error: BaseException) -> None:
        """Nothing is computed any more: everyone is told why, and so is whoever asks for the state. Never raises."""
        with self._lock:
            self._health = Health(status="error", error=str(error) or type(error).__name__)
            unlucky = [*self._running, *self._waiting]
            self._running.clear()
            self._waiting.clear()
        for request in unlucky:
            request.fail(error)

    def _set_health(self, health: Health) -> None:
        self._health = health

    # Requests.

    def submit(self, request: CompletionRequest, emit: Callable[[CompletionReply], None]) -> RequestHandle:
        loaded = self._need()
        if loaded.is_encoder or loaded.pooling is not Pooling.NONE:
            raise BadRequest("this model computes embeddings, it does not generate text")
        return self._queue(Request(request, loaded.tokenizer, loaded.limits.n_ctx, emit))

    def embed(self, request: EmbeddingRequest, emit: Callable[[EmbeddingReply | Failed], None]) -> RequestHandle:
        loaded = self._need()
        if request.query is not None and loaded.pooling is not Pooling.RANK:
            raise UnsupportedModel("this model does not support ranking: its file has no rank head")
        if request.query is None and loaded.pooling in (Pooling.NONE, Pooling.RANK):
            raise UnsupportedModel("this model does not support embeddings")
        file = loaded.backend.file
        separator = pair_separator(file, loaded.tokenizer)
        template = file.metadata.string("tokenizer.chat_template.rerank", "")
        has_probabilities = request.query is not None and file.architecture.startswith("qwen3")  # their head ends in softmax
        job = EmbeddingJob(request, loaded.tokenizer, loaded.limits.n_ctx, emit, separator, template, has_probabilities)
        return self._queue(job)

    def after_step(self, call: Callable[[], None]) -> None:
        self._after_step.append(call)

    def _queue(self, request: Waiting) -> RequestHandle:
        with self._lock:
            if self._is_closing or self._health.status not in ("ready", "loading") or not self._is_computing():
                raise NotLoaded
            self._waiting.append(request)
            self._work.notify()
        return RequestHandle(self, request)

    def cancel(self, request: Waiting) -> None:
        """A step whose every request was cancelled is not worth finishing."""
        with self._lock:
            request.is_cancelled = True
            if self._loaded and self._in_step and all(r.is_cancelled for r in self._in_step):
                self._loaded.backend.abort()
            self._work.notify()

    def tokenize(self, text: str, add_special: bool) -> list[int]:
        return self._need().tokenizer.encode(text, add_special=add_special)

    def detokenize(self, tokens: list[int]) -> str:
        return self._need().tokenizer.decode(tokens)

    def _need(self) -> Loaded:
        if self._loaded is None:
            raise NotLoaded
        return self._loaded

    # The engine's thread.

    def _wait_for_work(self) -> bool:
        with self._lock:
            while not (self._waiting or self._running or self._is_closing):
                self._work.wait()
            return not self._is_closing

    def _turn(self) -> None:
        """All that lies between one step and the next. Never raises: without its thread every request would wait for ever."""
        try:
            self._admit()
            self._step()
            self._call_after_step()
            self._retire()
        except BaseException as error:  # a panic in a library is no Exception
            log.exception("the engine is out of step; every request fails, the next ones start afresh")
            self._start_afresh(error)
            self._call_after_step()

    def _call_after_step(self) -> None:
        for call in self._after_step:
            try:
                call()
            except BaseException:
                log.exception("what follows a step could not be done")

    def _admit(self) -> None:
        """Start those who wait, as long as there are places."""
        slots = self._slots
        assert slots is not None
        with self._lock:
            for unwanted in [r for r in self._waiting if r.is_cancelled]:
                self._waiting.remove(unwanted)
                unwanted.finish("cancelled")
        # Room that comes free is for those who gave way, until none of them is left.
        while slots.n_free and self._waiting and not any(r.is_paused for r in self._running):
            room = self._room()
            with self._lock:
                request = self._next(slots, room)
            if request is None:
                return
            self._running.append(request)
            self._start(request, slots, room)

    def _room(self) -> Room:
        assert self._slots is not None
        return Room(self._need().cache, self._slots, self._answers, self._running)

    def _next(self, slots: Slots, room: Room) -> Task | None:
        """Whoever waits and may start now, taken from the queue."""
        if self._need().pooling is not Pooling.NONE:
            return take(self._waiting) if fills_no_batch(self._running) else None
        running = [r for r in self._running if isinstance(r, Request)]
        request = next_to_start((r for r in self._waiting if isinstance(r, Request)), running, slots)
        if request is None or not room.has_room(request):
            return None
        self._waiting.remove(request)
        return request

    def _start(self, request: Task, slots: Slots, room: Room) -> None:
        self._n_admitted += 1
        request.order = self._n_admitted
        if isinstance(request, EmbeddedText):
            request.slot, _ = slots.acquire(request.tokens[:1])  # a prefix of one token is never reused
            return
        n_needed = room.n_promised(request) + room.n_needed(request, len(request.tokens))
        request.slot, request.n_cached = slots.acquire(request.tokens, request.groups, n_needed)
        request.n_computed = request.n_cached
        request.start()
        if request.n_predict == 0:
            request.finish("length")

    def _step(self) -> None:
        loaded = self._need()
        assert self._slots is not None
        active: Sequence[Task] = [r for r in self._running if self._is_active(r)]
        self._retire()  # who has just ended leaves room to this step
        resume_paused(active, self._room(), self._slots)
        active = [r for r in active if not r.is_paused]
        active = self._turns.order(active, loaded.limits.n_batch)
        progress = [r.progress for r in active]
        with self._lock:
            waiting = [r.tokens for _, r in zip(range(QUEUE_WINDOW), self._waiting, strict=False) if isinstance(r, Request)]
        if loaded.prompt_tail:
            progress = [stopping(r, waiting, loaded.prompt_tail) if isinstance(r, Request) else r.progress for r in active]
        has_prompts = loaded.pooling is Pooling.NONE and any(p.n_behind > 1 for p in progress)
        self._pace = self._times.pace if has_prompts else UNBOUNDED
        n_batch = loaded.limits.n_batch
        counts = schedule_whole(progress, PACKED_TOKENS) if loaded.is_encoder else schedule(progress, n_batch, self._pace)
        # Rows of neighbouring sequences stand together, so that the cache can read them with one view.
        wanted = sorted(((r, n) for r, n in zip(active, counts, strict=True) if n), key=lambda pair: pair[0].slot)
        chosen = make_room(wanted, self._running, loaded.cache, self._slots, waiting)
        if not chosen:
            return
        with self._lock:
            self._in_step = [r for r, _ in chosen]
            if all(r.is_cancelled for r in self._in_step):
                self._in_step = ()
                return
        self._turns.note([r for r, _ in chosen])
        try:
            with loaded.paced(sum(n for _, n in chosen)):
                if loaded.pooling is Pooling.NONE:
                    self._compute(loaded, [(r, n) for r, n in chosen if isinstance(r, Request)])
                else:
                    # Of a model in which tokens see what came before them, the last one has read both query and text.
                    is_last = loaded.pooling is Pooling.RANK and not loaded.is_encoder
                    pooling = Pooling.LAST if is_last else loaded.pooling
                    embed(loaded.forward, pooling, [(r, n) for r, n in chosen if isinstance(r, EmbeddedText)])
        except BaseException as error:  # one bad batch must not end the process: it ends the requests that were in it
            log.exception("a step failed")
            for request, _ in chosen:
                request.fail(error)
        finally:
            with self._lock:
                self._in_step = ()
                loaded.backend.clear_abort()
        self._n_steps += 1

    def _is_active(self, request: Task) -> bool:
        """Ends those who are cancelled; makes room in a full context. Who may not shift ends before it is full."""
        if request.is_cancelled:
            request.finish("cancelled")
        elif isinstance(request, Request) and not request.is_done and len(request.tokens) > request.n_ctx:
            self._shift(request)
        return not request.is_done

    def _shift(self, request: Request) -> None:
        """Drop half of what follows the kept tokens, and compute what cannot be moved again."""
        assert self._slots is not None
        cache = self._need().cache
        n_discard = max((request.n_ctx - request.n_keep) // 2, 1)
        begin, end = cut(request.n_keep, request.n_keep + n_discard, request.groups)
        request.drop(begin, end)
        try:
            cache.remove(request.slot, begin, end)
            request.n_computed -= end - begin
        except NotSupported:
            request.n_computed = resume_point(cache, request.slot, begin)
            cache.remove(request.slot, request.n_computed)
        self._slots.replace(request.slot, request.tokens, request.n_computed)

    def _compute(self, loaded: Loaded, chosen: list[tuple[Request, int]]) -> None:
        began = time.perf_counter()
        done = work((request.n_computed, count) for request, count in chosen)
        tokens: list[int] = []
        positions: list[int] = []
        sequences: list[int] = []
        outputs: list[int] = []
        for request, count in chosen:
            begin, end = request.n_computed, request.n_computed + count
            tokens += request.tokens[begin:end]
            positions += range(begin, end)
            sequences += [request.slot] * count
            outputs.append(len(tokens) - 1)  # also in the middle of a prompt, to know whether what was computed is sound
        if isinstance(loaded.forward, Forward) and loaded.forward.builds_ahead:
            loaded.forward.expect(next_batch(chosen, loaded.limits.n_batch, self._pace))
        logits = loaded.forward(batch(tokens, positions, sequences, outputs))
        if logits is None:
            for request, _ in chosen:
                request.finish("cancelled")
            return
        finishing: list[tuple[Request, Floats]] = []
        for (request, count), row in zip(chosen, logits, strict=True):
            request.n_computed += count
            if not has_number(row):
                # What this step computed is never seen again: nobody has copied it yet, and the slot is emptied with it.
                request.n_computed = 0
                request.fail(request.sampler.no_token())
            elif request.n_computed == len(request.tokens):
                finishing.append((request, row))
        sample([row for _, row in finishing], [request for request, _ in finishing])
        self._times.note(done, time.perf_counter() - began)

    def _retire(self) -> None:
        """Give back the slots of requests that ended; their computed tokens stay for the next with the same prefix."""
        assert self._slots is not None
        for request in self._running:
            self._slots.record(request.slot, request.tokens, request.n_computed)
        for request in [r for r in self._running if r.is_done]:
            if isinstance(request, Request):
                self._answers.note(request.n_generated)
            self._need().cache.remove(request.slot, request.n_computed)
            self._slots.release(request.slot)
            self._running.remove(request)

    def _start_afresh(self, error: BaseException) -> None:
        """Everyone fails, and nothing is held; if not even that can be had, the model is of no use any more. Never raises."""
        with self._lock:
            unlucky = [*self._running, *self._waiting]
            self._running.clear()
            self._waiting.clear()
        for request in unlucky:
            request.fail(error)
        try:
            assert self._slots is not None
            self._slots.start_afresh()
        except BaseException as worse:
            log.exception("what sequences hold cannot be forgotten")
            self._give_up(worse)

    # The end.

    def _unload(self) -> None:
        with self._lock:
            self._is_closing = True
            for request in (*self._waiting, *self._running):
                request.is_cancelled = True
            if self._loaded:
                self._loaded.backend.abort()
            self._work.notify_all()
        if self._thread and self._thread is not threading.current_thread():
            self._thread.join()
        for request in (*self._waiting, *self._running):
            request.fail(PunaError("the model was unloaded"), status=503)
        self._waiting.clear()
        self._running.clear()
        if self._loaded:
            self._loaded.close()
        self._file.close()
        self._loaded, self._slots, self._thread = None, None, None
        self._health = Health(status="launched")
        self._is_closing = False

    def close(self) -> None:
        with self._load_lock:
            self._unload()
