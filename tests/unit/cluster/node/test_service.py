from __future__ import annotations

import asyncio
import gc
import hashlib
import socket
import struct
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvloop

from puna import wire
from puna.api.options import Options
from puna.cluster.head.description import described
from puna.cluster.head.line import Line
from puna.cluster.messages import (
    ALIVE_S,
    LOST_AFTER_S,
    MAX_GREETING_BYTES,
    Alive,
    Answer,
    Ask,
    Cancel,
    Deliver,
    File,
    Hold,
    Model,
    Open,
    Report,
    decode_reply,
    encode,
    frame,
    read_frame,
)
from puna.cluster.node import files, service
from puna.cluster.node.node import Node
from puna.errors import BadRequest, DiskFull, NodeLost, NotFound, StoreError
from puna.llm.load import load_requirements
from puna.settings import FOREVER, Settings
from puna.store.store import Store
from tests import clock
from tests.patience import PATIENCE_S
from tests.unit.cluster.fleet import KEY, Scripted, ask, fleet, requirements, until
from tests.unit.llm.scripted import write_script


def blob(folder: Path, content: bytes) -> Scripted:
    path = folder / f"sha256-{hashlib.sha256(content).hexdigest()}"
    path.write_bytes(content)
    return Scripted(path)


def test_who_does_not_know_the_key_learns_nothing(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a") as machines:
            port = machines.machines_["a"].port
            for greeting in (
                frame(Open(key="another", head="x", version="1")),
                frame(Deliver(key="another", digest="sha256:" + "0" * 64, n_bytes=1)),
                b"GET / HTTP/1.1\r\n\r\n",
                (MAX_GREETING_BYTES + 1).to_bytes(4, "big") + b"x",
            ):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(greeting)
                assert await reader.read() == b""
                writer.close()
            with pytest.raises(NodeLost, match="cannot be reached"):
                await Line.connect("127.0.0.1", port, "another", "x", lambda _: None)

    asyncio.run(play())


def test_a_file_that_a_node_lacks_is_sent_there_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "is_same", lambda *_: False)  # the machines share no folder

    async def play() -> None:
        script = write_script(tmp_path, "script", pieces=["sent"]).read_bytes()
        async with fleet(tmp_path, "a") as machines, machines.head() as head:
            model = blob(tmp_path, script)
            store = machines.machines_["a"].service.node.store
            assert [told.text for told in await asyncio.gather(*(ask(head, model) for _ in range(3)))] == ["sent"] * 3
            assert store.blobs.path(model.model_path.name).read_bytes() == script
            assert head.nodes["a"].found == {model.model_path.name.replace("-", ":")}
            # What is no blob has no name but its path, and nobody could say whether it arrived whole.
            told = await ask(head, machines.script("plain"))
            assert isinstance(told.error, NotFound)
            assert "puna create" in str(told.error)

    asyncio.run(play())


@pytest.mark.parametrize("fails", ["has", "writer"])
def test_a_node_whose_disk_fails_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    monkeypatch.setattr(files, "is_same", lambda *_: False)

    def failing(*_: Any) -> None:
        raise StoreError("the file system is read-only")

    async def play() -> None:
        script = write_script(tmp_path, "script", pieces=["sent"]).read_bytes()
        async with fleet(tmp_path, "a", "b") as machines, machines.head() as head:
            broken = machines.machines_["a"].service.node.store.blobs
            monkeypatch.setattr(broken, fails, failing)
            told = await ask(head, blob(tmp_path, script))
            assert (told.text, told.error) == ("sent", None)
            monkeypatch.setattr(machines.machines_["b"].service.node.store.blobs, fails, failing)
            assert "read-only" in str((await ask(head, blob(tmp_path, script + b" "))).error)  # nobody is left

    asyncio.run(play())


def test_a_file_is_sent_whatever_else_of_its_model_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "is_same", lambda *_: False)

    async def play() -> None:
        script = write_script(tmp_path, "script", pieces=["sent"]).read_bytes()
        async with fleet(tmp_path, "a") as machines, machines.head() as head:
            model, adapter = blob(tmp_path, script), blob(tmp_path, b"an adapter")
            assert (await ask(head, model)).error is None
            told = await ask(head, model, options=requirements(adapters=[str(adapter.model_path)]))
            assert (told.text, told.error) == ("sent", None)

    asyncio.run(play())


@pytest.mark.parametrize("comes_back", [False, True], ids=["removed", "node begins anew"])
def test_a_file_that_a_node_has_lost_is_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes_back: bool) -> None:
    monkeypatch.setattr(files, "is_same", lambda *_: False)

    async def play() -> None:
        script = write_script(tmp_path, "script", pieces=["sent"]).read_bytes()
        async with fleet(tmp_path, "a") as machines, machines.head() as head:
            model = blob(tmp_path, script)
            assert (await ask(head, model)).error is None
            blobs = machines.machines_["a"].service.node.store.blobs
            if comes_back:
                await machines.machines_["a"].service.close()
            blobs.path(model.model_path.name).unlink()
            if comes_back:
                await machines.add("a")
            told = await ask(head, model)
            assert (told.text, told.error) == ("sent", None)

    asyncio.run(play())


def test_what_is_not_what_its_digest_says_stays_nowhere(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a") as machines:
            store = machines.machines_["a"].service.node.store
            line = await Line.connect("127.0.0.1", machines.machines_["a"].port, KEY, "x", lambda _: None)
            forged = tmp_path / "forged"
            forged.write_bytes(b"something else")
            digest = "sha256:" + hashlib.sha256(b"something").hexdigest()
            with pytest.raises(BadRequest, match="digest mismatch"):
                await line.deliver(forged, digest, len(b"something else"))
            with pytest.raises(BadRequest, match="invalid digest"):
                await line.deliver(forged, "sha256:../../etc/passwd", 1)
            assert not store.blobs.has(digest)
            assert list(store.blobs.folder.iterdir()) == []
            await line.close()

    asyncio.run(play())


def test_a_file_is_closed_whose_delivery_ends_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opening, go_on, opened = threading.Event(), threading.Event(), list[Any]()
    given, plain = tmp_path / "given", Path.open

    def slow(path: Path, *arguments: Any, **options: Any) -> Any:
        if path != given:
            return plain(path, *arguments, **options)
        opening.set()
        go_on.wait()
        opened.append(plain(path, *arguments, **options))
        return opened[0]

    async def play() -> None:
        async with fleet(tmp_path, "a") as machines:
            line = await Line.connect("127.0.0.1", machines.machines_["a"].port, KEY, "x", lambda _: None)
            delivery = asyncio.create_task(line.deliver(given, "sha256:" + "0" * 64, 5))
            await asyncio.to_thread(opening.wait)
            delivery.cancel()
            await asyncio.wait({delivery})
            go_on.set()
            await line.close()

    given.write_bytes(b"bytes")
    monkeypatch.setattr(Path, "open", slow)
    asyncio.run(play())
    assert [file.closed for file in opened] == [True]


def test_what_is_begun_for_a_delivery_that_ends_meanwhile_is_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opening, go_on = threading.Event(), threading.Event()
    blobs = Store(tmp_path / "store").blobs
    plain = blobs.writer

    def slow(n_bytes: int) -> Any:
        opening.set()
        go_on.wait()
        return plain(n_bytes)

    async def play() -> None:
        receiving = asyncio.create_task(files.receive(blobs, "sha256:" + "0" * 64, 5, asyncio.StreamReader()))
        await asyncio.to_thread(opening.wait)
        receiving.cancel()
        go_on.set()
        await asyncio.wait({receiving})
        assert receiving.cancelled()

    monkeypatch.setattr(blobs, "writer", slow)
    asyncio.run(play())
    gc.collect()  # a file that is open still would complain here
    assert list(blobs.folder.iterdir()) == []


def test_a_delivery_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a") as machines:
            store = machines.machines_["a"].service.node.store
            reader, writer = await asyncio.open_connection("127.0.0.1", machines.machines_["a"].port)
            digest = "sha256:" + hashlib.sha256(b"something").hexdigest()
            writer.write(frame(Deliver(key=KEY, digest=digest, n_bytes=9)) + b"some")
            writer.write_eof()
            assert "have not come" in str(decode_reply(await read_frame(reader)))
            writer.close()
            assert list(store.blobs.folder.iterdir()) == []

    asyncio.run(play())


@pytest.mark.parametrize("n_bytes", [5, 6])
def test_a_path_counts_where_the_file_has_the_same_length(tmp_path: Path, n_bytes: int) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"12345")
    assert files.is_same(path, File(path=str(path), n_bytes=n_bytes)) == (n_bytes == 5)
    assert not files.is_same(tmp_path / "gone", File(path="", n_bytes=0))


def test_a_node_without_any_head_ends_after_a_while(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path) as machines:
            machine = await machines.add("a")
            async with machines.head() as head:
                machine.service._grace_s = 0.5
                await asyncio.sleep(1.5)
                assert (await ask(head, machines.script())).text
                assert not machine.is_idle.is_set()
            await until(machine.is_idle.is_set)

    asyncio.run(play())


def test_a_delivery_ends_with_the_line_to_its_node(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a") as machines:
            line = await Line.connect("127.0.0.1", machines.machines_["a"].port, KEY, "x", lambda _: None)
            kept: list[asyncio.StreamWriter] = []
            async with await asyncio.start_server(lambda _, writer: kept.append(writer), "127.0.0.1", 0) as silent:
                line._address = ("127.0.0.1", silent.sockets[0].getsockname()[1], KEY)
                delivery = asyncio.create_task(line.deliver(blob(tmp_path, b"x").model_path, "sha256:" + "0" * 64, 1))
                await until(lambda: kept)
                line.lose("it has no power")
                with pytest.raises(NodeLost, match="no power"):
                    await asyncio.wait_for(delivery, PATIENCE_S)
                for writer in kept:
                    writer.close()
            await line.close()

    asyncio.run(play())


def test_a_delivery_that_is_refused_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise DiskFull("the disk is full", 7)

    async def play() -> None:
        async with fleet(tmp_path, "a") as machines:
            line = await Line.connect("127.0.0.1", machines.machines_["a"].port, KEY, "x", lambda _: None)
            monkeypatch.setattr(machines.machines_["a"].service.node.store.blobs, "writer", full)
            long = blob(tmp_path, b"x" * (64 << 20)).model_path
            with pytest.raises(DiskFull, match="the disk is full"):
                await line.deliver(long, "sha256:" + "0" * 64, 64 << 20)
            await line.close()

    asyncio.run(play())


def test_a_delivery_that_no_longer_comes_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "STALL_S", 0.1)

    async def play() -> None:
        async with fleet(tmp_path, "a") as machines:
            reader, writer = await asyncio.open_connection("127.0.0.1", machines.machines_["a"].port)
            writer.write(frame(Deliver(key=KEY, digest="sha256:" + "0" * 64, n_bytes=9)) + b"some")
            async with asyncio.timeout(PATIENCE_S):
                assert "5 bytes of" in str(decode_reply(await read_frame(reader)))
            writer.close()
            assert list(machines.machines_["a"].service.node.store.blobs.folder.iterdir()) == []

    asyncio.run(play())


def test_what_is_sent_on_a_line_that_has_just_closed_is_lost_with_its_node(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a") as machines:
            line = await Line.connect("127.0.0.1", machines.machines_["a"].port, KEY, "x", lambda _: None)
            line._writer.transport.abort()
            with pytest.raises(NodeLost):
                line.send(Cancel(id=1))
            await asyncio.sleep(0)
            with pytest.raises(NodeLost):
                line.send(Cancel(id=1))
            await line.close()

    uvloop.run(play())


def test_a_head_that_has_gone_while_its_requests_end_stops_no_reports(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a") as machines:
            node, heard = machines.machines_["a"].service, 0

            def hear(_: Report) -> None:
                nonlocal heard
                heard += 1

            line = await Line.connect("127.0.0.1", machines.machines_["a"].port, KEY, "x", lambda _: None)
            other = await Line.connect("127.0.0.1", machines.machines_["a"].port, KEY, "y", hear)
            await until(lambda: len(node._lines) == 2)
            first = min(node._lines, key=lambda found: found.number)
            ending = asyncio.Event()

            async def takes_long() -> None:
                try:
                    await asyncio.get_running_loop().create_future()
                finally:
                    await ending.wait()

            first._tasks[77] = asyncio.create_task(takes_long())
            await asyncio.sleep(0)
            sock = line._writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # as a process that was killed
            line._writer.transport.abort()
            await until(first._writer.is_closing)
            n_heard = heard
            await until(lambda: heard > n_heard + 1)
            ending.set()
            await line.close()
            await other.close()

    uvloop.run(play())


def test_a_head_that_reads_nothing_fills_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "REPORT_S", 0.0)

    async def play() -> None:
        async with fleet(tmp_path, "a") as machines:
            lines = machines.machines_["a"].service._lines
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.connect(("127.0.0.1", machines.machines_["a"].port))
                sock.sendall(frame(Open(key=KEY, head="x", version="1")))
                await until(lambda: lines)
                (line,) = lines
                transport = line._writer.transport
                sizes: list[int] = []
                while len(sizes) < 20 or len(set(sizes[-20:])) > 1 or not sizes[-1]:  # until no more is added
                    await asyncio.sleep(0.01)
                    sizes.append(transport.get_write_buffer_size())
                    assert sizes[-1] < 1 << 18

    asyncio.run(play())


def test_a_head_without_power_keeps_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a") as machines:
            node = machines.machines_["a"].service.node
            model = described(machines.script(), requirements(), FOREVER)
            reader, writer = await asyncio.open_connection("127.0.0.1", machines.machines_["a"].port)
            writer.write(frame(Open(key=KEY, head="x", version="1")) + frame(Hold(id=1, model=model)))
            while not isinstance(decode_reply(await read_frame(reader)), Answer):
                pass
            (loaded,) = node.loaded()
            assert loaded.n_users == 1
            monkeypatch.setattr(service, "LOST_AFTER_S", 0.1)
            writer.write(frame(Alive()))  # the last that is ever heard; the connection stays open
            await until(lambda: loaded.n_users == 0)
            writer.close()

    asyncio.run(play())


class _Written:
    """Takes whatever is written, as a system does for a machine that is not there any more."""

    def __init__(self) -> None:
        self.transport = self
        self.is_aborted = False

    def write(self, _: bytes) -> None:
        pass

    async def drain(self) -> None:
        pass

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True


class _Holding:
    """A node whose models are held for so long as its clock says."""

    def __init__(self) -> None:
        self.begun = self.ended = -1.0

    @asynccontextmanager
    async def place(self, _: Model) -> AsyncGenerator[Any, None]:
        self.begun = asyncio.get_running_loop().time()
        try:
            yield SimpleNamespace(loaded=SimpleNamespace(n_ctx=1, options=wire.LoadOptions(), reply=None))
        finally:
            self.ended = asyncio.get_running_loop().time()


@pytest.mark.parametrize("n_signs", [0, 1000])
def test_a_model_is_held_as_long_as_its_head_gives_signs_of_life(tmp_path: Path, n_signs: int) -> None:
    async def play() -> None:
        node, reader, writer = _Holding(), asyncio.StreamReader(), _Written()
        line = service._Line(cast(Any, SimpleNamespace(node=node, is_retiring=False)), reader, cast(Any, writer), "x")
        serving = asyncio.create_task(line.serve())
        reader.feed_data(frame(Hold(id=1, model=described(Scripted(tmp_path), requirements(), None))))
        for _ in range(n_signs):
            await asyncio.sleep(ALIVE_S)
            reader.feed_data(frame(Alive()))
        await serving
        assert node.begun == 0.0
        assert node.ended == pytest.approx(n_signs * ALIVE_S + LOST_AFTER_S)
        assert writer.is_aborted

    clock.run(play())


def test_what_is_cancelled_before_it_began_is_nothing(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a") as machines:
            reader, writer = await asyncio.open_connection("127.0.0.1", machines.machines_["a"].port)
            writer.write(frame(Open(key=KEY, head="x", version="1")))
            await read_frame(reader)
            writer.write(frame(Ask(id=1, path="/find", body=encode([]))) + frame(Cancel(id=1)))
            writer.write(frame(Ask(id=2, path="/find", body=encode([]))))
            answers: list[Answer] = []
            while not answers:
                answers = [reply for reply in [decode_reply(await read_frame(reader))] if isinstance(reply, Answer)]
            assert [answer.id for answer in answers] == [2]
            writer.close()

    asyncio.run(play())
    gc.collect()  # who was never begun complains when it goes


def test_packed_weights_of_files_in_a_shared_folder_are_kept_on_the_machine_that_computes(tmp_path: Path) -> None:
    at_the_head, here = (Settings(models=tmp_path / name, warm_spare=False) for name in ("head", "here"))
    wanted = Node(here)._here(load_requirements(Options(), at_the_head))
    assert wanted.options.models == str(tmp_path / "here")
