"""Whatever breaks, every request gets its last message, and the thread that computes goes on."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest
from tests.patience import PATIENCE_S
from tests.unit.runner.seeing import N_VOCAB
from tests.unit.runner.simulation import Asked, Simulation

from puna.errors import PunaError
from puna.kvcache.batch import Batch
from puna.llm.watchdog import until_stalled
from puna.runner.service import NotLoaded
from puna.runner.transport.inbox import Inbox
from puna.runner.transport.outbox import Outbox
from puna.sample.matcher import GrammarError, Matcher
from puna.wire import Done, Failed, Health, Piece


class Panic(BaseException):
    """What Rust raises is no Exception."""


def explode(*_arguments: Any, **_options: Any) -> Any:
    raise Panic("it panicked")


class BrokenMatcher:
    is_complete = False

    def join(self) -> None:
        explode()


def simulation() -> Simulation:
    return Simulation(n_ctx=256, n_parallel=2, n_batch=32)


def prompt(seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(1, N_VOCAB) for _ in range(40)]


def three(engine: Simulation) -> list[Asked]:
    """Two that run, one that waits."""
    asked = [engine.ask(prompt(seed), 200, ignore_eos=True) for seed in range(3)]
    engine.run(lambda: all(a.text for a in asked[:2]))
    return asked


def is_usable(engine: Simulation) -> bool:
    """Somebody who comes later is answered, and in the cache nothing contradicts itself."""
    late = engine.ask(prompt(9), 5, ignore_eos=True)
    engine.run()
    return late.done.eval_count == 5


@pytest.mark.parametrize("error", [Panic, RuntimeError, MemoryError])
def test_whatever_ends_a_step_ends_those_who_are_in_it(error: type[BaseException]) -> None:
    engine = simulation()
    asked = three(engine)

    def fail(_batch: Batch) -> None:
        engine.model.on_step = lambda _batch: None
        raise error("it broke")

    engine.model.on_step = fail
    engine.turn()
    assert [type(a.end) for a in asked] == [Failed, Failed, type(None)]
    engine.run()
    assert asked[2].done.eval_count == 200
    assert is_usable(engine)


@pytest.mark.parametrize("where", ["acquire", "record", "release"])
def test_whatever_breaks_in_the_books_everyone_is_told(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = simulation()
    asked = three(engine)
    monkeypatch.setattr(engine.slots, where, explode)
    asked[0].handle.cancel()
    engine.turn()
    engine.turn()
    monkeypatch.undo()
    assert isinstance(asked[0].end, Done if where == "acquire" else Done | Failed)
    assert [type(a.end) for a in asked[1:]] == [Failed, Failed]
    assert is_usable(engine)


@pytest.mark.parametrize("ends", ["cancelled", "finished", "failed"])
def test_a_grammar_that_panics_ends_its_own_request_only(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = simulation()
    asked = three(engine)
    broken: Any = BrokenMatcher()
    asked[0].request.matcher = broken
    if ends == "cancelled":
        asked[0].handle.cancel()
    elif ends == "finished":
        asked[0].request.finish("stop")
    else:
        monkeypatch.setattr(engine.slots, "acquire", explode)
        asked[1].handle.cancel()
    engine.turn()
    monkeypatch.undo()
    assert isinstance(asked[0].end, Done | Failed)
    assert is_usable(engine)
    assert all(a.end is not None for a in asked)
    if ends != "failed":
        assert asked[1].done.eval_count == asked[2].done.eval_count == 200


def test_a_text_that_cannot_be_ended_is_a_failure_and_not_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = simulation()
    asked = three(engine)
    monkeypatch.setattr(asked[0].request._text, "finish", explode)
    asked[0].handle.cancel()
    engine.run()
    assert isinstance(asked[0].end, Failed)
    assert asked[1].done.eval_count == asked[2].done.eval_count == 200


def test_whoever_cannot_be_told_disturbs_nobody() -> None:
    engine = simulation()
    asked = three(engine)
    asked[0].request._emit = explode
    engine.run()
    assert asked[0].end is None
    assert asked[2].done.eval_count == 200
    assert is_usable(engine)


def test_after_a_step_whoever_breaks_keeps_nobody_from_being_called() -> None:
    engine = simulation()
    called: list[int] = []
    engine.engine.after_step(explode)
    engine.engine.after_step(lambda: called.append(1))
    assert is_usable(engine)
    assert called


def test_books_that_cannot_be_mended_are_an_error_that_everyone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = simulation()
    asked = three(engine)
    monkeypatch.setattr(engine.slots, "record", explode)
    monkeypatch.setattr(engine.slots, "start_afresh", explode)
    engine.engine.loop.turn()
    assert [type(a.end) for a in asked] == [Failed] * 3
    assert engine.engine.health().status == "error"
    assert "it panicked" in engine.engine.health().error
    with pytest.raises(NotLoaded):
        engine.ask(prompt())


def start(engine: Simulation, monkeypatch: pytest.MonkeyPatch, load: Callable[..., None] = lambda _progress: None) -> None:
    """The engine's own thread."""
    monkeypatch.setattr(engine.loaded.backend, "load", load, raising=False)
    thread = threading.Thread(target=engine.engine.loop.run, daemon=True)
    engine.engine.loop.thread = thread
    thread.start()


def ended(engine: Simulation) -> None:
    assert engine.engine.loop.thread is not None
    engine.engine.loop.thread.join(PATIENCE_S)
    assert not engine.engine.loop.thread.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_all_the_same_tells_everyone_and_is_noticed_though_nobody_is_active(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = simulation()
    asked = three(engine)
    monkeypatch.setattr(engine.engine.loop.queue, "wait", explode)
    start(engine, monkeypatch)
    ended(engine)
    assert [type(a.end) for a in asked] == [Failed] * 3
    health = engine.engine.health()
    assert (health.status, health.active) == ("error", 0)
    with pytest.raises(NotLoaded):
        engine.ask(prompt())


def test_a_dead_thread_is_an_error_whatever_it_had_said_before() -> None:
    engine = simulation()
    assert engine.engine.health().status == "ready"
    engine.engine.loop.thread = threading.Thread(target=lambda: None)
    engine.engine.loop.thread.start()
    ended(engine)
    assert engine.engine.health().status == "error"
    with pytest.raises(NotLoaded):
        engine.ask(prompt())


@pytest.mark.parametrize("error", [PunaError, Panic])
def test_who_waited_for_weights_that_cannot_be_read_is_told(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = simulation()
    asked = [engine.ask(prompt(seed), 5) for seed in range(3)]

    def fail(_progress: object) -> None:
        raise error("no weights")

    start(engine, monkeypatch, fail)
    ended(engine)
    assert [a.end.error for a in asked if isinstance(a.end, Failed)] == ["no weights"] * 3
    assert engine.engine.health().status == "error"


def test_a_mask_that_panics_is_an_error_of_its_own_answer() -> None:
    matcher = Matcher.__new__(Matcher)
    matcher._error = None
    pending: Future[None] = Future()
    pending.set_exception(Panic("it panicked"))
    matcher.start(pending)
    matcher.join()
    with pytest.raises(GrammarError, match="it panicked"):
        matcher.allowed()


def test_a_reply_that_cannot_be_written_fails_its_own_request() -> None:
    """A lone surrogate, say, which UTF-8 does not have."""
    own_end, end = socket.socketpair()
    with own_end, end:
        outbox = Outbox(end)
        outbox.put(1, Piece(content="fine"))
        outbox.put(2, Piece(content="\ud800"))
        outbox.put(3, Piece(content="fine, too"))
        outbox.flush()
        first = msgspec.json.decode(own_end.recv(1 << 16))
        outbox.put(1, Piece(content="more"))
        outbox.flush()
        second = msgspec.json.decode(own_end.recv(1 << 16))
    assert [number for number, _ in first] == [1, 2, 3]
    assert "error" in first[1][1]
    assert [number for number, _ in second] == [1]


def test_a_thread_that_cannot_be_had_now_is_had_later(monkeypatch: pytest.MonkeyPatch) -> None:
    own_end, end = socket.socketpair()
    with own_end, end:
        outbox = Outbox(end)
        outbox.put(1, Piece(content="x" * (1 << 22)))  # more than the kernel takes at once
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", lambda _self: (_ for _ in ()).throw(RuntimeError("can't start new thread")))
            outbox.flush()
        assert outbox.n_unsent
        outbox.put(2, Piece(content="last"))
        outbox.flush()
        own_end.settimeout(PATIENCE_S)
        received = b""
        while received.count(b"\n") < 2:
            received += own_end.recv(1 << 20)
    assert [msgspec.json.decode(line)[0][0] for line in received.splitlines()] == [1, 2]


def test_a_line_that_cannot_be_dealt_with_keeps_none_of_the_others_from_that() -> None:
    handled: list[bytes] = []

    def handle(line: bytes) -> None:
        handled.append(line)
        explode()

    inbox = Inbox()
    inbox.feed(b"one\ntwo\n")
    inbox.follow(handle)
    inbox.feed(b"three\nfour\n")
    assert handled == [b"one", b"two", b"three", b"four"]


def watched(engine: Simulation) -> str:
    """What the watchdog says of it."""

    class Watched:
        is_alive = True

        async def health(self, timeout_s: float = 0) -> Health:
            return engine.engine.health()

    runner: Any = Watched()
    return asyncio.run(asyncio.wait_for(until_stalled(runner, 0.01), PATIENCE_S))


def test_a_dead_thread_is_noticed_though_nobody_is_active() -> None:
    engine = simulation()
    engine.engine.loop.thread = threading.Thread(target=lambda: None)
    engine.engine.loop.thread.start()
    ended(engine)
    assert "the engine's thread has ended" in watched(engine)


def test_requests_that_wait_while_no_step_ends_are_noticed_though_nobody_is_active() -> None:
    engine = simulation()
    engine.ask(prompt(), 5)
    assert "1 waiting" in watched(engine)
