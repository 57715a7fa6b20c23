"""What strangers may cost: connections that say nothing, little, too much, or read nothing."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from puna.server.process import protocol
from puna.server.process.connections import LINGER_S, Connections, Limits
from puna.server.process.protocol import BoundedProtocol, Reading
from tests.patience import PATIENCE_S, wait_until
from tests.unit.llm.scripted import events
from tests.unit.server.live import Live

FAR_TOO_MUCH = 64 << 20


class Clock:
    """By which a server's patience is measured. Only a test has it run ahead, so no connection waits for long by chance."""

    ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


def patient(folder: Path) -> Live:
    """With a clock that can be put forward."""
    live = Live(folder, client_timeout=PATIENCE_S)
    live.connections.clock = Clock()
    return live


def in_loop(live: Live, action: Callable[[], None]) -> None:
    async def act() -> None:
        action()

    asyncio.run_coroutine_threadsafe(act(), live.loop).result(PATIENCE_S)


def let_pass(live: Live, seconds: float) -> None:
    """And have the connections looked at."""
    clock = live.connections.clock
    assert isinstance(clock, Clock)
    clock.ahead_s += seconds
    in_loop(live, live.connections.check)


def server_end(live: Live, connection: socket.socket) -> BoundedProtocol:
    """Once the server has it."""
    name = connection.getsockname()
    found: list[Any] = []

    def look() -> bool:
        found[:] = [end for end in list(live.connections._all) if getattr(end, "client", None) == name]
        return bool(found)

    wait_until(look)
    end: BoundedProtocol = found[0]
    return end


@contextmanager
def connected(live: Live, data: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", live.port)) as connection:
        connection.settimeout(PATIENCE_S)
        connection.sendall(data)
        yield connection


def rest_of(connection: socket.socket) -> bytes:
    """All that comes until the other side hangs up."""
    found = b""
    try:
        while data := connection.recv(65536):
            found += data
    except ConnectionResetError:
        pass
    return found


def is_hung_up_on(connection: socket.socket, parts: Iterable[bytes]) -> bool:
    """Whether the other side ends it while all this is sent."""
    try:
        for part in parts:
            connection.sendall(part)
    except OSError:
        return True
    return False


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    server = patient(tmp_path_factory.mktemp("strangers"))
    server.add("hello")
    with server.running():
        yield server


def chat(live: Live) -> str:
    message = live.post("/api/chat", {"model": "hello", "messages": [{"role": "user", "content": "hi"}], "stream": False}).json()
    return str(message["message"]["content"])


def test_who_says_nothing_is_hung_up_on(live: Live) -> None:
    with connected(live) as silent:
        server_end(live, silent)
        let_pass(live, PATIENCE_S + 1)
        assert rest_of(silent) == b""


@pytest.mark.parametrize("head", [b"G", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nhost: localhost\r\n"])
def test_half_a_head_is_not_waited_for(live: Live, head: bytes) -> None:
    with connected(live, head) as slow:
        end = server_end(live, slow)
        wait_until(lambda: end._reading is Reading.HEAD)
        let_pass(live, PATIENCE_S + 1)
        assert rest_of(slow).startswith(b"HTTP/1.1 408 ")


def test_a_head_that_comes_a_byte_at_a_time_is_not_waited_for_either(live: Live) -> None:
    def parts() -> Iterator[bytes]:
        for byte in b"GET / HTTP/1.1\r\nx: " + b"x" * 1000:
            yield bytes([byte])
            let_pass(live, PATIENCE_S / 20)

    with connected(live) as slow:
        assert is_hung_up_on(slow, parts())


def test_half_a_body_is_not_waited_for(live: Live) -> None:
    with connected(live, b"POST /api/chat HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{") as slow:
        end = server_end(live, slow)
        wait_until(lambda: end._reading is Reading.BODY)
        let_pass(live, PATIENCE_S + 1)
        assert rest_of(slow).startswith(b"HTTP/1.1 408 ")
    assert chat(live) == "Hello world"


def send_slowly(live: Live, connection: socket.socket, body: bytes, pause_s: float) -> None:
    """In so many parts, with a pause after each that has come."""
    end, n = server_end(live, connection), len(body) // 20
    for begin in range(0, len(body), n):
        connection.sendall(body[begin : begin + n])
        n_sent = min(begin + n, len(body))
        if n_sent < len(body):
            wait_until(lambda n_sent=n_sent: end._n_body == n_sent or end._reading is Reading.CLOSING)  # type: ignore[misc]
            let_pass(live, pause_s)


def test_a_body_that_goes_on_is_waited_for(live: Live) -> None:
    body = json.dumps({"model": "hello", "prompt": "hi" * 20_000, "stream": False}).encode()
    with connected(live, b"POST /api/generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)) as slow:
        send_slowly(live, slow, body, 0.6 * PATIENCE_S)
        assert slow.recv(20).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"GET / HTTP/1.1\r\nx: ", b"x" * 65536),
        (b"GET / HTTP/1.1\r\n", b"x: y\r\n" * 10000),
        (b"GET /", b"x" * 65536),
        (b"", b"\r\n" * 32768),
        (b"POST /api/chat HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: ", b"x" * 65536),
        (b"POST /api/chat HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1;", b"x" * 65536),
    ],
    ids=["a header", "many headers", "a path", "nothing but ends of lines", "a trailer", "an extension of a chunk"],
)
def test_what_has_no_end_is_ended(live: Live, begin: bytes, more: bytes) -> None:
    """Long before the patience for it is over."""
    with connected(live, begin) as endless:
        assert is_hung_up_on(endless, itertools.repeat(more, FAR_TOO_MUCH // len(more)))
    assert chat(live) == "Hello world"


def test_what_has_too_many_headers_is_told_so(live: Live) -> None:
    head = b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"".join(b"x-%d: y\r\n" % i for i in range(protocol.MAX_HEADERS)) + b"\r\n"
    with connected(live, head) as one:
        assert rest_of(one).startswith(b"HTTP/1.1 431 ")
    with connected(
        live, b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * (protocol.MAX_HEAD_BYTES // 2) + b"\r\n\r\n"
    ) as other:
        assert other.recv(20).startswith(b"HTTP/1.1 200 ")


def test_requests_that_are_sent_in_advance_are_few(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.add("slow", n_pieces=1000, piece_delay_s=0.05)
    body = json.dumps({"model": "slow", "prompt": "hi"}).encode()
    with live.running(), connected(live) as eager:
        eager.sendall(b"POST /api/generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        assert eager.recv(20).startswith(b"HTTP/1.1 200 ")
        many = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * 100_000
        assert is_hung_up_on(eager, itertools.repeat(many, FAR_TOO_MUCH // len(many)))


def test_who_reads_nothing_does_not_hold_a_model(tmp_path: Path) -> None:
    live = patient(tmp_path)
    script = live.add("flood", pieces=["x" * 100_000] * 2000)
    body = json.dumps({"model": "flood", "prompt": "hi"}).encode()
    with live.running(), connected(live) as deaf:
        deaf.sendall(b"POST /api/generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: [event for event in events(script) if event[0] == "complete"])

        def is_free() -> bool:
            let_pass(live, PATIENCE_S / 4)
            return not live.scheduler.models[live.store.get("flood").model_path].n_users

        wait_until(is_free)
        assert live.client.get("/").status_code == 200


@pytest.mark.parametrize(("patience_s", "given_up_ms"), [(10.0, 60_000), (PATIENCE_S, 5000 * PATIENCE_S)])
def test_a_client_whose_machine_has_no_power_does_not_hold_a_model_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience_s: float, given_up_ms: float
) -> None:
    """The system asks for it, and does not go on for ever to send what nobody takes."""
    found: list[list[int]] = []
    made = protocol.BoundedProtocol.connection_made

    def connection_made(self: protocol.BoundedProtocol, transport: asyncio.Transport) -> None:
        made(self, transport)
        sock = transport.get_extra_info("socket")
        names = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE), (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)]
        found.append([sock.getsockopt(*name) for name in names])

    monkeypatch.setattr(protocol.BoundedProtocol, "connection_made", connection_made)
    live = Live(tmp_path, client_timeout=patience_s)
    with live.running(), connected(live, b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n") as connection:
        assert connection.recv(1)
    assert found == [[1, given_up_ms]]


def test_who_reads_slowly_gets_all(tmp_path: Path) -> None:
    """However long that takes, as long as there is less to be read each time that the server looks."""
    live = patient(tmp_path)
    live.add("flood", pieces=["x" * 15_000_000])  # at once, so that what is unread only becomes less
    body = json.dumps({"model": "flood", "prompt": "hi"}).encode()
    n_read, last, n_pauses = 0, b"", 0
    with live.running(), connected(live) as slow:
        end, clock = server_end(live, slow), live.connections.clock
        assert isinstance(clock, Clock)

        def pause() -> None:
            nonlocal n_pauses
            if 0 < end.transport.get_write_buffer_size() < end._n_unread:
                n_pauses += 1
                clock.ahead_s += 0.6 * PATIENCE_S
            live.connections.check()

        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # the system holds little of the answer
        slow.sendall(b"POST /api/generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        while not last.endswith(b"0\r\n\r\n"):
            last = slow.recv(1 << 16)
            assert last, "the server has hung up"
            n_read += len(last)
            in_loop(live, pause)
    assert n_read > 15_000_000
    assert n_pauses * 0.6 > 1.0


def test_an_answer_that_comes_before_the_whole_body_can_be_read(tmp_path: Path) -> None:
    """And the rest of the body is not waited for."""
    live = Live(tmp_path, api_keys=("secret",))
    with live.running(), connected(live) as stranger:
        stranger.sendall(b"POST /api/chat HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000000\r\n\r\n{")
        answer = rest_of(stranger)
        assert answer.startswith(b"HTTP/1.1 401 ")


def test_a_blob_that_is_there_already_may_be_sent_to_its_end(live: Live) -> None:
    """Whoever sends it cannot stop half way, and would take a connection that breaks off for a failure."""
    data = b"x" * 200_000
    path = f"/api/blobs/sha256:{hashlib.sha256(data).hexdigest()}"
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n".encode()
    for status in (b"201", b"200"):
        with connected(live, head) as slow:
            send_slowly(live, slow, data, 2 * LINGER_S)
            assert slow.recv(12) == b"HTTP/1.1 " + status


def test_silent_connections_make_way_and_who_has_asked_stays(tmp_path: Path) -> None:
    live = Live(tmp_path, max_connections=20)
    live.add("hello")
    live.add("slow", n_pieces=100, piece_delay_s=0.02)
    with live.running(), ExitStack() as stack:
        streaming = stack.enter_context(live.client.stream("POST", "/api/generate", json={"model": "slow", "prompt": "x"}))
        lines = streaming.iter_lines()
        next(lines)
        silent = [stack.enter_context(connected(live)) for _ in range(200)]
        assert chat(Peer(live)) == "Hello world"
        assert json.loads(list(lines)[-1])["done"]
        gone = [connection for connection in silent if _is_closed(connection)]
        assert 180 <= len(gone) < 200


class Peer(Live):
    """The same server, seen by a client with connections of its own."""

    def __init__(self, live: Live) -> None:
        self.__dict__.update(vars(live))

    def post(self, path: str, body: Any, **more: Any) -> Any:
        import httpx

        return httpx.post(self.url + path, json=body, timeout=PATIENCE_S)


def _is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.2)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


class Fake:
    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.has_left = False

    def check(self, now: float) -> None: ...

    def leave(self) -> None:
        self.has_left = True


def test_who_waits_longest_goes_first_and_one_peer_does_not_crowd_out_another() -> None:
    async def scenario() -> None:
        registry = Connections(Limits(n_connections=6, n_per_peer=4))
        busy, half, first, second = (Fake("a") for _ in range(4))
        for connection in (busy, half, first, second):
            assert registry.admit(connection)
        registry.keep(busy)
        registry.wait_for_body(half)
        third = Fake("a")
        assert registry.admit(third)
        assert [first.has_left, second.has_left, half.has_left] == [True, False, False]
        others = [Fake("b"), Fake("b"), Fake("b")]
        assert all(registry.admit(other) for other in others)
        assert second.has_left
        registry.keep(third)
        for other in others:
            registry.keep(other)
        assert registry.admit(Fake("c"))
        assert half.has_left, "half a body is worth more than no head, and less than a request"
        assert len(registry) == 6

    asyncio.run(scenario())


def test_where_all_are_busy_nobody_is_let_in() -> None:
    async def scenario() -> None:
        registry = Connections(Limits(n_connections=2, n_per_peer=2))
        busy = [Fake("a"), Fake("b")]
        for connection in busy:
            assert registry.admit(connection)
            registry.keep(connection)
        assert not registry.admit(Fake("c"))
        registry.forget(busy[0])
        assert registry.admit(Fake("c"))

    asyncio.run(scenario())
