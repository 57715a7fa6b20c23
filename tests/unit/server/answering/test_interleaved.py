from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from puna.server.answering.interleaved import interleaved


class Streams:
    def __init__(self) -> None:
        self.closed: list[int] = []

    async def one(self, number: int, n_parts: int, fails: bool = False) -> AsyncGenerator[str, None]:
        try:
            for part in range(n_parts):
                await asyncio.sleep(0)
                yield f"{number}.{part}"
            if fails:
                raise RuntimeError(f"{number} has failed")
        finally:
            self.closed.append(number)


@pytest.mark.parametrize("counts", [[3], [2, 5, 0, 1], [40, 40]])
def test_every_part_comes_once_and_in_its_streams_order(counts: list[int]) -> None:
    async def read() -> list[tuple[int, str]]:
        streams = Streams()
        found = [part async for part in interleaved([streams.one(i, n) for i, n in enumerate(counts)])]
        assert sorted(streams.closed) == list(range(len(counts)))
        return found

    found = asyncio.run(read())
    for number, count in enumerate(counts):
        assert [part for at, part in found if at == number] == [f"{number}.{i}" for i in range(count)]
    assert len(found) == sum(counts)
    if counts == [40, 40]:
        assert [number for number, _ in found] != [0] * 40 + [1] * 40


@pytest.mark.parametrize("others", [0, 1, 3])
def test_an_error_ends_all(others: int) -> None:
    async def read() -> Streams:
        streams = Streams()
        endless = [streams.one(i + 1, 10**6) for i in range(others)]
        with pytest.raises(RuntimeError, match="0 has failed"):
            async for _ in interleaved([streams.one(0, 3, fails=True), *endless]):
                pass
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return streams

    assert sorted(asyncio.run(read()).closed) == list(range(others + 1))


def test_who_stops_reading_closes_all() -> None:
    async def read() -> Streams:
        streams = Streams()
        parts = interleaved([streams.one(i, 10**6) for i in range(3)])
        async for _ in parts:
            break
        await parts.aclose()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return streams

    assert sorted(asyncio.run(read()).closed) == [0, 1, 2]
