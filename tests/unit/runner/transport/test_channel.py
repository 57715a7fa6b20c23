"""The line between a parent and its runner, from the runner's side: a real socket, and an engine without a model."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.patience import PATIENCE_S, wait_until
from tests.unit.runner.fake_engine import FakeEngine, done

from puna.errors import LoadError
from puna.runner.process.main import connection_to_parent
from puna.runner.service import Handle
from puna.runner.transport import channel as channel_module
from puna.runner.transport.channel import Channel
from puna.runner.transport.counters import Counters
from puna.runner.transport.inbox import Inbox
from puna.runner.transport.named_model import NamedModel
from puna.runner.transport.outbox import Outbox
from puna.wire import (
    Addressed,
    Answer,
    Call,
    Cancel,
    Command,
    Complete,
    CompletionReply,
    CompletionRequest,
    Device,
    Discovery,
    EmbeddingReply,
    EmbeddingRequest,
    Failed,
    Image,
    ImagesRequest,
    NameModel,
    Piece,
    Reply,
    decode,
    decode_addressed,
    encode,
)

DEVICES = Discovery(devices=[Device(name="CPU", library="CPU", kind="cpu", free=1, total=2)], physical_cores=3)
LOADING = "model is still loading (25%), wait for /health to say ready"


class Line:
    """Both ends of a runner's line: what the parent says goes through an inbox, what it hears comes from the socket."""

    def __init__(self, engine: FakeEngine) -> None:
        self.parent, end = socket.socketpair()
        self.parent.settimeout(PATIENCE_S)
        self.heard = self.parent.makefile("rb")
        self.engine, self.named, self.counters = engine, NamedModel(), Counters()
        self.outbox = Outbox(end)
        self.channel = Channel(engine, self.outbox, self.named, self.counters, lambda: DEVICES)
        self._end = end
        self._inbox = Inbox()
        self._inbox.follow(self.channel.handle)

    def say(self, command: Command | bytes) -> None:
        self._inbox.feed((command if isinstance(command, bytes) else encode(command)) + b"\n")

    def complete(self, number: int, prompt: str) -> None:
        self.say(Complete(id=number, request=CompletionRequest(prompt=prompt)))

    def hear(self) -> list[Addressed]:
        return decode_addressed(self.heard.readline())

    def answers(self, *numbers: int) -> dict[int, list[Reply]]:
        """All replies to these requests, and to no others."""
        found: dict[int, list[Reply]] = {number: [] for number in numbers}
        while not all(replies and not isinstance(replies[-1], Piece) for replies in found.values()):
            for number, reply in self.hear():
                found[number].append(reply)
        return found

    def close(self) -> None:
        self.engine.close()
        self.heard.close()
        self.parent.close()
        self._end.close()


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line(FakeEngine())
    yield line
    line.close()


def test_what_a_step_says_to_all_requests_leaves_in_one_line() -> None:
    line = Line(FakeEngine(step_s=0.05))
    try:
        for number in (7, 8, 9):
            line.complete(number, "count 4")
        heard = []
        ended: set[int] = set()
        while len(ended) < 3:
            heard.append(line.hear())
            ended |= {number for number, reply in heard[-1] if not isinstance(reply, Piece)}
        pieces = [[number for number, reply in replies if isinstance(reply, Piece)] for replies in heard]
        assert [7, 8, 9] in pieces
        assert sum(map(len, pieces)) == 12
    finally:
        line.close()


def test_every_request_hears_its_own_pieces_and_one_end(line: Line) -> None:
    prompts = ["one two", "count 30", "fail late", "fail", "\u20ac", "count 3"] * 5
    for number, prompt in enumerate(prompts):
        line.complete(number, prompt)
    for number, replies in line.answers(*range(len(prompts))).items():
        prompt = prompts[number]
        ends = {"fail late": Failed(error="late", status=500), "fail": Failed(error="no luck", status=507)}
        assert replies[-1] == ends.get(prompt, done("stop", 7))
        assert all(isinstance(reply, Piece) for reply in replies[:-1])
        words = [f"{i} " for i in range(int(prompt[6:]))] if prompt.startswith("count") else prompt.split(" ")
        assert [r.content for r in replies if isinstance(r, Piece)] == ([] if prompt == "fail" else words)
    assert line.counters.counts()["requests"] == 30
    assert line.counters.counts()["stop"] == 20
    assert line.counters.counts()["failed"] == 10


@pytest.mark.parametrize(
    ("prompt", "failed"),
    [
        ("refuse", Failed(error="the input length exceeds the context length (9 tokens, context 4)", status=400)),
        ("crash", Failed(error="internal error: RuntimeError: a bug", status=500)),
    ],
)
def test_a_request_that_cannot_start_is_told_so(line: Line, prompt: str, failed: Failed) -> None:
    line.complete(1, prompt)
    assert line.answers(1) == {1: [failed]}


def test_a_request_before_the_model_is_there_is_told_so() -> None:
    line = Line(FakeEngine(status="loading"))
    try:
        line.complete(1, "one")
        assert line.hear() == [(1, Failed(error=LOADING, status=503, lacks_model=True))]
    finally:
        line.close()


@pytest.mark.parametrize(
    ("nonsense", "error"),
    [
        (b'{"type": "complete", "id": 5, "request": {"prompt": 3}}', "Expected `str`, got `int` - at `$.request.prompt`"),
        (b'{"type": "sing", "id": 5}', "Invalid value 'sing' - at `$.type`"),
    ],
)
def test_a_command_that_is_wrong_is_answered_where_it_has_a_number(line: Line, nonsense: bytes, error: str) -> None:
    line.say(nonsense)
    assert line.hear() == [(5, Failed(error=error, status=400))]


@pytest.mark.parametrize("nonsense", [b"", b"hello", b"\xff\xfe", b"[1, 2]", b"null", b'{"id": "x"}'])
def test_nonsense_harms_nobody(line: Line, nonsense: bytes) -> None:
    line.say(nonsense)
    line.complete(1, "one")
    assert line.answers(1)[1][0] == Piece(content="one")


def test_a_cancelled_request_ends_and_the_engine_knows(line: Line) -> None:
    line.complete(1, "silent")
    wait_until(lambda: line.engine.handles)
    line.say(Cancel(id=1))
    assert line.answers(1) == {1: [done("cancelled")]}
    line.say(Cancel(id=1))  # too late
    line.say(Cancel(id=99))
    line.complete(2, "one")
    assert line.answers(2)[2] == [Piece(content="one"), done("stop", 7)]


def test_what_no_thread_can_be_started_for_is_refused(line: Line) -> None:
    """And not computed later, when there are threads again: whoever asked has been told."""

    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        line.complete(1, "silent")
    error = "no thread can be started for a request: can't start new thread"
    assert line.answers(1) == {1: [Failed(error=error, status=503)]}
    line.complete(2, "one")
    assert line.answers(2) == {2: [Piece(content="one"), done("stop", 7)]}
    assert [handle.request.prompt for handle in line.engine.handles] == ["one"]


def test_a_request_cancelled_before_the_engine_has_it_is_cancelled_there(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(FakeEngine())
    submit = line.engine.submit

    def slowly(request: CompletionRequest, emit: Callable[[Reply], None]) -> Any:
        time.sleep(0.1)
        return submit(request, emit)

    monkeypatch.setattr(line.engine, "submit", slowly)
    try:
        line.complete(1, "silent")
        line.say(Cancel(id=1))
        assert line.answers(1) == {1: [done("cancelled")]}
    finally:
        line.close()


def test_a_parent_that_does_not_read_delays_no_step_and_its_requests_fail_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_QUEUED_CHARACTERS", 3_000_000)
    line = Line(FakeEngine())
    try:
        line.complete(1, "flood")
        wait_until(lambda: line.engine.handles and line.engine.handles[0].cancelled_at)
        before = line.engine.steps
        wait_until(lambda: line.engine.steps > before + 20)
        replies = line.answers(1)[1]
        assert isinstance(replies[-1], Failed)
        assert "bytes of replies are left unread" in replies[-1].error
        line.complete(2, "count 5")  # whoever reads again is served again
        assert len(line.answers(2)[2]) == 6
    finally:
        line.close()


def test_replies_to_a_parent_that_has_left_are_dropped(line: Line) -> None:
    line.heard.close()
    line.parent.close()
    line.complete(1, "count 100")
    wait_until(lambda: line.counters.counts().get("stop"))
    assert line.outbox.n_unsent == 0


def test_once_closed_what_runs_ends_and_what_comes_is_not_answered(line: Line) -> None:
    line.complete(1, "silent")
    wait_until(lambda: line.engine.handles)
    line.channel.close()
    line.complete(2, "one")
    line.engine.close()
    assert line.answers(1) == {1: [Failed(error="the runner is ending", status=503)]}
    assert len(line.engine.handles) == 1


def test_the_first_word_names_the_model(line: Line) -> None:
    line.say(NameModel(path="a.gguf"))
    line.say(NameModel(path="b.gguf"))
    assert line.named.wait() == Path("a.gguf")
    named = NamedModel()
    named.fail("no model")
    named.set(Path("late.gguf"))
    with pytest.raises(LoadError, match="no model"):
        named.wait()


@given(st.lists(st.text("ab{}\u20ac", max_size=9), max_size=8), st.data())
def test_lines_arrive_whole_and_in_order_however_they_are_cut(texts: list[str], data: st.DataObject) -> None:
    stream = "".join(f"{text}\n" for text in texts).encode() + b"rest"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    follow_at = data.draw(st.integers(0, len(cuts) + 1))
    inbox, seen = Inbox(), list[bytes]()
    for i, (begin, end) in enumerate(zip([0, *cuts], [*cuts, len(stream)], strict=True)):
        if i == follow_at:
            inbox.follow(seen.append)
        inbox.feed(stream[begin:end])
    if follow_at > len(cuts):
        inbox.follow(seen.append)
    assert seen == [text.encode() for text in texts]


def test_only_a_socket_has_a_way_back() -> None:
    one, other = socket.socketpair()
    with one, other, open("/dev/null") as null:
        assert connection_to_parent(null.fileno()) is None
        found = connection_to_parent(one.fileno())
        assert found is not None
        with found:
            found.send(json.dumps({}).encode())
            assert other.recv(10) == b"{}"


def test_images_that_take_long_keep_no_text_waiting(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than there are threads, whatever is done with them."""
    are_read = threading.Event()
    submit, embed, image_tokens = line.engine.submit, line.engine.embed, line.engine.image_tokens

    def submit_slowly(request: CompletionRequest, emit: Callable[[CompletionReply], None]) -> Handle:
        if request.images:
            are_read.wait()
        return submit(request, emit)

    def count_slowly(request: ImagesRequest) -> list[int]:
        are_read.wait()
        return image_tokens(request)

    def embed_slowly(request: EmbeddingRequest, emit: Callable[[EmbeddingReply | Failed], None]) -> Handle:
        if request.images:
            are_read.wait()
        return embed(request, emit)

    monkeypatch.setattr(line.engine, "embed", embed_slowly)
    monkeypatch.setattr(line.engine, "submit", submit_slowly)
    monkeypatch.setattr(line.engine, "image_tokens", count_slowly)
    for number in range(6):
        image = Image(marker="<0>", data=b"slow")
        line.say(Complete(id=number, request=CompletionRequest(prompt="<0>", images=[image])))
        line.say(Call(id=10 + number, path="/images", body=msgspec.Raw(encode(ImagesRequest(images=[b"slow"])))))
        embedding = EmbeddingRequest(inputs=["<0>"], images=[image])
        line.say(Call(id=20 + number, path="/embedding", body=msgspec.Raw(encode(embedding))))
    line.complete(100, "text")
    line.say(Call(id=101, path="/embedding", body=msgspec.Raw(encode(EmbeddingRequest(inputs=["text"])))))
    assert line.answers(100, 101)
    are_read.set()
    assert all(line.answers(*range(6), *range(10, 16), *range(20, 26)).values())


def test_devices_are_told_before_there_is_a_model(line: Line) -> None:
    line.say(Call(id=1, path="/devices", body=msgspec.Raw(b"{}")))
    (answer,) = line.answers(1)[1]
    assert isinstance(answer, Answer)
    assert decode(Discovery, bytes(answer.body)) == DEVICES
