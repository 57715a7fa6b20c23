from __future__ import annotations

import asyncio

import pytest

from puna.cluster.messages import LOST_AFTER_S, Alive, Cancel, decode_command, frame, read_frame
from tests import clock


def test_a_long_message_over_a_slow_line_is_no_silence() -> None:
    async def play() -> None:
        reader = asyncio.StreamReader()
        said = frame(Cancel(id=1 << 40))
        reading = asyncio.create_task(read_frame(reader, silence_s=LOST_AFTER_S))
        for byte in said:
            await asyncio.sleep(LOST_AFTER_S * 0.9)
            reader.feed_data(bytes([byte]))
        assert decode_command(await reading) == Cancel(id=1 << 40)

    clock.run(play())


@pytest.mark.parametrize("n_bytes", [0, 2, 6])
def test_who_stops_in_the_middle_of_a_message_is_silent(n_bytes: int) -> None:
    async def play() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(frame(Alive())[:n_bytes])
        with pytest.raises(TimeoutError):
            await read_frame(reader, silence_s=LOST_AFTER_S)
        assert asyncio.get_running_loop().time() == pytest.approx(LOST_AFTER_S)

    clock.run(play())


@pytest.mark.parametrize("n_bytes", [0, 2, 6])
def test_who_hangs_up_in_the_middle_of_a_message_has_gone(n_bytes: int) -> None:
    async def play() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(frame(Alive())[:n_bytes])
        reader.feed_eof()
        with pytest.raises(ConnectionResetError):
            await read_frame(reader, silence_s=LOST_AFTER_S)

    clock.run(play())
