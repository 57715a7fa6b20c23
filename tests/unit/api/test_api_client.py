from __future__ import annotations

import hashlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
from tests.patience import PATIENCE_S
from tests.ports import kept_free
from tests.unit.api.fake_server import PS, SHOWN, TAGS, FakeServer, running

from puna.api.client import Client
from puna.errors import BadRequest, NotFound, PunaError, ServerUnreachable
from puna.settings import Address


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeServer]:
    with running() as server:
        yield server


@pytest.fixture
def client(fake: FakeServer) -> Iterator[Client]:
    with Client(fake.address) as opened:
        yield opened


def test_plain_replies(client: Client) -> None:
    assert client.version() == "9.9.9"
    assert client.tags() == TAGS
    assert client.ps() == PS
    assert client.show("echo")["template"] == SHOWN["template"]
    assert client.embed({"model": "embedder", "input": "x"}) == {"embeddings": [[0.6, 0.8]]}


def test_replies_without_body(client: Client, fake: FakeServer) -> None:
    client.copy("echo", "other")
    client.delete("echo")
    assert fake.bodies("/api/copy")[-1] == {"source": "echo", "destination": "other"}
    assert fake.bodies("/api/delete")[-1] == {"model": "echo"}


def test_a_stream_yields_its_events(client: Client) -> None:
    events = list(client.generate({"model": "echo", "prompt": "one zwei 三"}))
    assert [event["response"] for event in events] == ["one ", "zwei ", "三 ", ""]
    assert events[-1]["done"]


def test_only_a_line_feed_ends_a_line(client: Client) -> None:
    """Servers may leave in JSON what Unicode takes for the end of a line."""
    events = client.generate({"model": "echo", "prompt": "a\x85b\u2028 c\u2029"})
    assert "".join(event["response"] for event in events) == "a\x85b\u2028 c\u2029 "


def test_a_reply_without_line_end_is_an_event(client: Client) -> None:
    (event,) = client.generate({"model": "echo"})
    assert event["done_reason"] == "load"


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda c: c.show("nobody"), NotFound, "model 'nobody' not found"),
        (lambda c: c.copy("nobody", "x"), NotFound, 'model "nobody" not found'),
        (lambda c: list(c.generate({"model": "nobody", "prompt": "x"})), NotFound, "model 'nobody' not found"),
        (lambda c: list(c.create({"model": "a?b"})), BadRequest, "invalid model name"),
        (lambda c: list(c.pull("nowhere")), PunaError, "pull model manifest: file does not exist"),
    ],
)
def test_errors_carry_the_servers_text(client: Client, call: Any, kind: type[PunaError], text: str) -> None:
    with pytest.raises(kind) as caught:
        call(client)
    assert str(caught.value) == text


def test_an_error_in_a_stream_comes_after_what_went_before(client: Client) -> None:
    events = client.generate({"model": "broken", "prompt": "so far"})
    assert [next(events)["response"], next(events)["response"]] == ["so ", "far "]
    with pytest.raises(PunaError, match=r"^the model fell over$"):
        next(events)


def test_closing_a_stream_cancels_the_answer(client: Client, fake: FakeServer) -> None:
    with closing(cast("Any", client.generate({"model": "endless", "prompt": "x"}))) as events:
        next(events)
    assert fake.cancelled.wait(PATIENCE_S)


def test_blobs(client: Client, fake: FakeServer, tmp_path: Path) -> None:
    content = bytes(range(256)) * 10_000
    path = tmp_path / "weights.gguf"
    path.write_bytes(content)
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    sent: list[int] = []
    assert not client.has_blob(digest)
    client.upload_blob(digest, path, sent.append)
    assert client.has_blob(digest)
    assert fake.blobs[digest] == content
    assert sent == sorted(sent)
    assert sent[-1] == len(content)
    with pytest.raises(BadRequest, match="digest mismatch"):
        client.upload_blob("sha256:" + "0" * 64, path, sent.append)


def test_nobody_listens() -> None:
    with kept_free() as port, Client(Address(port=port)) as client, pytest.raises(ServerUnreachable) as caught:
        client.tags()
    assert str(caught.value) == f'could not connect to a Puna server at http://127.0.0.1:{port}, start one with "puna serve"'


def _canned(reply: bytes) -> Iterator[Address]:
    """An address where one connection gets *reply*, whatever it asks, and is closed."""
    with socket.create_server(("127.0.0.1", 0)) as sock:

        def answer() -> None:
            connection, _ = sock.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(reply)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        yield Address(port=sock.getsockname()[1])
        thread.join(PATIENCE_S)


@pytest.fixture
def canned(request: pytest.FixtureRequest) -> Iterator[Address]:
    yield from _canned(request.param)


@pytest.mark.parametrize(
    ("canned", "kind", "text"),
    [
        (b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n12\r\n{"response":"a"}\n\r\n', ServerUnreachable, "lost the"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n[1, 2, 3]", PunaError, "something other than a JSON object"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>", PunaError, "something other than a JSON object"),
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n", PunaError, "the server answered 502 Bad Gateway"),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 10\r\n\r\nplain text", PunaError, "plain text"),
        (b"garbage", ServerUnreachable, "lost the connection"),
    ],
    indirect=["canned"],
)
def test_hostile_servers(canned: Address, kind: type[PunaError], text: str) -> None:
    with Client(canned) as client, pytest.raises(kind, match=text):
        list(client.generate({"model": "m", "prompt": "x"}))


def test_importing_the_client_does_not_import_httpxs_command_line() -> None:
    code = (
        "import sys; from puna.api.client import Client; from puna.settings import Address; Client(Address()).close();"
        "print([m for m in ('rich', 'pygments', 'httpx._main', 'pydantic') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
