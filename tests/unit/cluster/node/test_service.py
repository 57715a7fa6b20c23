from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from puna.cluster.head.line import Line
from puna.cluster.messages import MAX_GREETING_BYTES, Deliver, File, Open, decode_reply, frame, read_frame
from puna.cluster.node import files
from puna.errors import BadRequest, NodeLost, NotFound
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
            machine = await machines.add("a", grace_s=0.5)
            async with machines.head() as head:
                await asyncio.sleep(1.5)
                assert (await ask(head, machines.script())).text
                assert not machine.is_idle.is_set()
            await until(machine.is_idle.is_set)

    asyncio.run(play())
