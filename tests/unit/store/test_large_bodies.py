"""Large bodies come from the socket itself, and nothing of them is lost where an answer's head ends."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import h11
import pytest

from puna.store.sources.web import http as web
from puna.store.sources.web.http import Http, Passing

BODY = bytes(range(256)) * 4000
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY)


@contextmanager
def answering(*answers: list[bytes]) -> Iterator[str]:
    """A server that sends each of the answers in these very pieces, one per request and all on one connection if it lasts."""
    left = list(answers)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while left:
            try:
                connection = listener.accept()[0]
            except OSError:
                return
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while left and connection.recv(65536):
                    for piece in left.pop(0):
                        connection.sendall(piece)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        left.clear()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def received(url: str, http: Http) -> bytes:
    with http.ask("GET", url) as answer:
        return b"".join(bytes(block) for block in answer.blocks())


@pytest.fixture
def n_parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that went through the parser."""
    seen: list[int] = []
    real = h11.Connection.receive_data

    def counted(self: h11.Connection, data: bytes) -> None:
        seen.append(len(data))
        real(self, data)

    monkeypatch.setattr(h11.Connection, "receive_data", counted)
    return seen


@pytest.mark.parametrize("cut", [0, 1, 5, len(HEAD) - 3, len(HEAD) - 1, len(HEAD), len(HEAD) + 1, len(HEAD) + 5000])
def test_wherever_the_pieces_are_cut(cut: int, n_parsed: list[int]) -> None:
    whole = HEAD + BODY
    with answering([whole[:cut], whole[cut:]]) as url, Http("127.0.0.1") as http:
        assert received(url, http) == BODY
    assert sum(n_parsed) == len(HEAD)


def test_bodies_that_the_parser_must_see_go_through_it() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
    endless = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello"
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    bare = HEAD.replace(b"\r\n", b"\n")
    with answering([chunked], [interim, HEAD, BODY], [bare, BODY], [endless]) as url, Http("127.0.0.1") as http:
        assert received(url, http) == b"hello"
        assert received(url, http) == BODY
        assert received(url, http) == BODY
        assert received(url, http) == b"hello"


def test_short_answers_before_and_after_share_their_connection() -> None:
    small = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    with answering([small], [small], [HEAD, BODY], [small]) as url, Http("127.0.0.1") as http:
        for _ in range(2):
            with http.ask("GET", url) as answer:
                assert answer.read(10) == b"ok"
        assert received(url, http) == BODY
        with http.ask("GET", url) as answer:
            assert answer.read(10) == b"ok"


def test_a_body_that_breaks_off_is_a_failure_that_may_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [HEAD + BODY[:5000]]
    cause = pytest.raises(Passing, match="broke: 1019000 of 1024000 bytes did not come")
    with answering(broken) as url, Http("127.0.0.1") as http, cause:
        received(url, http)
    monkeypatch.setattr(web, "SILENCE_S", 0.05)
    with answering(broken, broken) as url, Http("127.0.0.1") as http, pytest.raises(Passing, match="said nothing for"):
        received(url, http)  # the server waits for another request on the same connection


def test_what_comes_after_the_body_is_not_of_it() -> None:
    with answering([HEAD + BODY + b"HTTP/1.1 200 OK\r\n\r\n"]) as url, Http("127.0.0.1") as http:
        assert received(url, http) == BODY
