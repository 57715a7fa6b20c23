"""The real engine, slots, host cache and caches, turn by turn on the test's own thread, over a model that checks what it sees.

Nothing here depends on time or on a model file. Time is counted in steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.unit.runner.seeing import END, KINDS, N_VOCAB, NEVER, SeeingModel, make_cache, next_token
from tests.unit.runner.seeing_library import KINDS as LIBRARY_KINDS
from tests.unit.runner.seeing_library import LibraryModel, make_library_cache

from puna.engines import Choice
from puna.kvcache.cache import Limits
from puna.model.pooling import Pooling
from puna.runner.engine import Engine, RequestHandle, StepLoop
from puna.runner.loading.engines import SEQUENCES_PER_REQUEST
from puna.runner.loading.load import Loaded
from puna.runner.prefixes.slots import Slots
from puna.runner.scheduling.admission import MIN_SHARED
from puna.runner.tasks.completion import Completion
from puna.wire import CompletionReply, CompletionRequest, Done, Failed, Health, Piece, SamplingOptions

MEGABYTE = 1 << 20


class Numbers:
    """A tokenizer whose texts are the tokens' numbers."""

    n_tokens = N_VOCAB
    end_tokens = frozenset({END})

    def encode(self, text: str, **_options: bool) -> list[int]:
        return [int(number) for number in text.split()]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))

    def piece(self, token: int, special: bool = False) -> bytes:
        del special
        return b"%d " % token


class Host:
    """What holds the memory of a model that has none."""

    def abort(self) -> None:
        """Steps are not broken off here."""

    def clear_abort(self) -> None:
        """There is nothing to clear."""

    def close(self) -> None:
        """There is nothing to close."""


def alike(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens they have in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass
class Asked:
    """One request and what it was told."""

    number: int  # in the order of arrival
    prompt: list[int]
    n_predict: int
    shift: bool
    arrived: int  # in steps
    handle: RequestHandle
    text: str = ""
    end: Done | Failed | None = None
    ended: int = -1
    is_cancelled: bool = False
    is_unlucky: bool = False  # it was in a step that failed, or its rows are NaN
    spoilt_from: int = NEVER  # the position from which they are
    older: list[Asked] = field(default_factory=list)  # those that had not ended when it came

    @property
    def request(self) -> Completion:
        request = self.handle._request
        assert isinstance(request, Completion)
        return request

    @property
    def done(self) -> Done:
        assert isinstance(self.end, Done), self.end
        return self.end


class Simulation:
    def __init__(
        self,
        kind: str = "full",
        *,
        n_ctx: int = 2048,
        n_pool: int = 0,
        n_parallel: int = 4,
        n_batch: int = 512,
        host_cache_bytes: int = 0,
        eyes: Any = None,
        homes: Any = None,
        image_cache_bytes: int = MEGABYTE,
        token_gap_s: float = math.inf,
        seeing: Callable[..., Any] = SeeingModel,
    ) -> None:
        self.layers = {**KINDS, **LIBRARY_KINDS}[kind]
        limits = Limits(n_parallel * SEQUENCES_PER_REQUEST, n_ctx, n_batch, n_pool or n_ctx * n_parallel)
        self.limits = limits
        if kind in KINDS:
            self.cache = make_cache(self.layers, limits)
            self.model: Any = seeing(self.cache, self.layers, self._history, self._spoilt_from)
        else:
            self.cache, memory = make_library_cache(self.layers, limits)
            self.model = library = LibraryModel(self.cache, self.layers, self._history, self._spoilt_from)
            library.memory, library.n_cells = memory, limits.n_cells
        tokenizer: Any = Numbers()
        host: Any = Host()
        nothing: Any = None
        self.engine = Engine(Path("simulated"))
        self.loaded = Loaded(
            Choice("puna", ""),
            host,
            self.cache,
            self.model,
            limits,
            N_VOCAB,
            Pooling.NONE,
            False,
            nothing,
            nothing,
            tokenizer=tokenizer,
            eyes=eyes,
            homes=homes,
            image_cache_bytes=image_cache_bytes,
        )
        host_cache = self.loaded.host_cache(host_cache_bytes)
        if host_cache is not None:
            host_cache._spare = lambda: MEGABYTE << 10
        self.slots = Slots(self.cache, n_parallel, limits.max_sequences, host_cache)
        self.engine._loader.model, self.engine._loader.state = self.loaded, Health(status="ready")
        self.engine._loop = StepLoop(self.engine._loader, self.loaded, self.slots, token_gap_s, self.engine._after_step)
        self.asked: list[Asked] = []
        self._asked_by: dict[int, Asked] = {}  # by the identity of its request
        self.n_pauses = 0

    def _of(self, sequence: int) -> Asked:
        """Whose sequence it is."""
        (request,) = (r for r in self.engine.loop.scheduler.running if r.slot == sequence)
        return self._asked_by[id(request)]

    def _history(self, sequence: int) -> Sequence[int]:
        return self._of(sequence).request.tokens

    def _spoilt_from(self, sequence: int) -> int:
        return self._of(sequence).spoilt_from

    @property
    def n_computed(self) -> int:
        return int(self.model.n_tokens)

    @property
    def running(self) -> list[Completion]:
        return [r for r in self.engine.loop.scheduler.running if isinstance(r, Completion)]

    def ask(self, prompt: Sequence[int], n_predict: int = 20, *, shift: bool = False, text: str = "", **fields: Any) -> Asked:
        """*text*: the prompt as it is sent, where that is not its tokens' numbers."""
        wire = CompletionRequest(
            prompt=text or " ".join(map(str, prompt)),
            sampling=SamplingOptions(temperature=0),
            n_predict=n_predict,
            shift=shift,
            return_tokens=True,
            **fields,
        )

        def emit(reply: CompletionReply) -> None:
            assert asked.end is None, "a reply after the last one"
            if isinstance(reply, Piece):
                asked.text += reply.content
            else:
                asked.end, asked.ended = reply, self.model.n_steps

        older = [a for a in self.asked if a.end is None]
        handle = self.engine.submit(wire, emit)
        asked = Asked(len(self.asked), list(prompt), n_predict, shift, self.model.n_steps, handle, older=older)
        self.asked.append(asked)
        self._asked_by[id(asked.request)] = asked
        return asked

    def turn(self) -> None:
        """One turn of the engine, after which the books are right and nobody was passed over."""
        before, paused = self.running, [r for r in self.running if r.is_paused]
        waiting = [r for r in self.engine.loop.queue._waiting if isinstance(r, Completion)]
        self.engine.loop.turn()
        assert not self.model.faults, self.model.faults[0]
        self.slots.check_integrity()
        self.cache.check_integrity()
        still_waiting = {id(r) for r in self.engine.loop.queue._waiting}
        started = [r for r in waiting if id(r) not in still_waiting and r.order]
        self._check_starts(before, paused, started, [r for r in waiting if id(r) in still_waiting])
        self._check_pauses(paused)

    def _check_starts(
        self, before: list[Completion], paused: list[Completion], started: list[Completion], waiting: list[Completion]
    ) -> None:
        assert not (started and paused), "somebody was started while another had given way"
        for passed in waiting:
            younger = [r for r in started if self._arrival(r) > self._arrival(passed)]
            computing = [r for r in (*before, *started) if alike(r.tokens, passed.tokens) >= MIN_SHARED]
            assert not younger or computing, "somebody was passed over who was not waiting for a prefix"

    def _check_pauses(self, paused: list[Completion]) -> None:
        going = [r.order for r in self.running if not r.is_paused]
        resting = [r for r in self.running if r.is_paused]
        assert all(r.order > max(going, default=0) for r in resting), "somebody goes on past one who came before"
        self.n_pauses += len([r for r in resting if all(r is not p for p in paused)])

    def _arrival(self, request: Completion) -> int:
        return self._asked_by[id(request)].number

    def run(self, until: Callable[[], bool] | None = None, turns: int = 20_000) -> None:
        """Until nobody is left, or something has happened."""
        for _ in range(turns):
            if until() if until else not (self.engine.loop.scheduler.running or self.engine.loop.queue._waiting):
                return
            self.turn()
        loop = self.engine.loop
        raise AssertionError(f"after {turns} turns {len(loop.scheduler.running)} run and {len(loop.queue)} wait")

    def expected(self, asked: Asked) -> tuple[list[int], str]:
        """The tokens of the answer, and the reason for its end, in any company."""
        tokens, answer = list(asked.prompt), list[int]()
        n_ctx, n_keep = self.limits.n_ctx, asked.request.n_keep
        assert len(tokens) <= n_ctx
        if not asked.request.n_predict:
            return [], "length"
        while True:
            if len(tokens) > n_ctx:
                if not asked.shift:
                    return answer, "length"
                del tokens[n_keep : n_keep + max((n_ctx - n_keep) // 2, 1)]
            token = next_token(self.layers, tokens)
            if token == END and asked.request.wire.ignore_eos:
                token = END + 1  # the first of all others, which are equally likely
            answer.append(token)
            if token == END:
                return answer, "stop"
            if len(answer) >= asked.request.n_predict:
                return answer, "length"
            tokens.append(token)

    def check_answers(self) -> None:
        """Everyone has ended once, with what each would have been told alone."""
        for asked in self.asked:
            assert asked.end is not None
            if asked.is_unlucky:
                continue
            done = asked.done
            answer, reason = self.expected(asked)
            told = done.tokens[len(asked.prompt) :]
            if done.reason == "cancelled":
                assert asked.is_cancelled
                assert told == answer[: len(told)]
            else:
                assert (told, done.reason) == (answer, reason)
                assert asked.text == "".join(f"{token} " for token in told if token != END)
