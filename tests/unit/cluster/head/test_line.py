from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from puna.cluster.head.line import Line
from puna.cluster.messages import LOST_AFTER_S, Alive, Opened, Report, decode_command, frame
from tests import clock


class _Recorded:
    """A connection: when what was written on it, and how much of that is still here."""

    def __init__(self) -> None:
        self.transport = self
        self.written: list[tuple[float, bytes]] = []
        self.n_unsent = 0

    def write(self, data: bytes) -> None:
        self.written.append((asyncio.get_running_loop().time(), data))

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return self.n_unsent

    def abort(self) -> None:
        pass


def test_a_head_says_often_enough_that_it_is_there_and_nothing_where_nothing_goes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = asyncio.StreamReader.__new__(asyncio.StreamReader), _Recorded()

    async def connected(*_: Any) -> tuple[asyncio.StreamReader, _Recorded]:
        return reader, writer

    async def wait(duration_s: int) -> None:
        for _ in range(duration_s):
            await asyncio.sleep(1.0)
            reader.feed_data(frame(Report(free=1, total=1)))

    async def play() -> None:
        reader.__init__()  # type: ignore[misc]  # in its loop
        reader.feed_data(frame(Opened(node="a", version="1")))
        line = await Line.connect("a machine", 1, "key", "head", lambda _: None)
        await wait(600)
        (_, _), *signs = writer.written
        assert [decode_command(data[4:]) for _, data in signs] == [Alive()] * len(signs)
        times = [0.0, *(time for time, _ in signs), 600.0]
        assert max(after - before for before, after in itertools.pairwise(times)) <= LOST_AFTER_S / 3
        writer.n_unsent, n_signs = 1, len(signs)
        await wait(600)
        assert len(writer.written) == 1 + n_signs
        await line.close()

    monkeypatch.setattr(asyncio, "open_connection", connected)
    clock.run(play())
