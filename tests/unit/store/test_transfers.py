from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing

import pytest

from puna.errors import NotFound, PunaError
from puna.store.progress import Progress, Report
from puna.store.transfers import Transfers
from tests.patience import PATIENCE_S


async def collect(transfers: Transfers, key: str, work: object) -> list[Progress]:
    return [line async for line in transfers.follow(key, work)]  # type: ignore[arg-type]


def test_every_line_is_seen_once_with_its_last_state() -> None:
    def work(report: Report) -> None:
        report(Progress("a"))
        for done in range(1, 1001):
            report(Progress("b", "digest", 1000, done))
        report(Progress("c"))

    lines = asyncio.run(collect(Transfers(), "x", work))
    assert [line.status for line in lines] == ["a", "b", "c"]
    assert lines[1].completed == 1000


def test_errors_come_after_all_lines() -> None:
    def work(report: Report) -> None:
        report(Progress("a"))
        raise NotFound("gone")

    async def run() -> list[str]:
        seen = []
        try:
            async for line in Transfers().follow("x", work):
                seen.append(line.status)
        except NotFound as error:
            seen.append(str(error))
        return seen

    assert asyncio.run(run()) == ["a", "gone"]


def test_a_panic_of_native_code_is_no_success() -> None:
    class Panic(BaseException):
        pass

    def work(report: Report) -> None:
        raise Panic("out of bounds")

    with pytest.raises(PunaError, match="internal error: Panic: out of bounds"):
        asyncio.run(collect(Transfers(), "x", work))


def test_work_that_no_thread_could_begin_is_begun_by_the_next() -> None:
    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def run() -> list[Progress]:
        transfers = Transfers()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading.Thread, "start", none_left)
            with pytest.raises(RuntimeError):
                await collect(transfers, "x", None)
        work = collect(transfers, "x", lambda report: report(Progress("a")))
        return await asyncio.wait_for(work, PATIENCE_S)

    assert [line.status for line in asyncio.run(run())] == ["a"]


def test_full_disks_are_said_plainly() -> None:
    def work(report: Report) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(PunaError, match="the model store could not be written: No space left on device"):
        asyncio.run(collect(Transfers(), "x", work))


def test_the_same_key_shares_the_work() -> None:
    begun = []
    go_on = threading.Event()

    def work(report: Report) -> None:
        begun.append(1)
        report(Progress("a"))
        assert go_on.wait(PATIENCE_S)
        report(Progress("b"))

    async def run() -> list[list[Progress]]:
        transfers = Transfers()
        first = asyncio.create_task(collect(transfers, "x", work))
        await asyncio.sleep(0.15)
        second = asyncio.create_task(collect(transfers, "x", work))
        await asyncio.sleep(0.15)
        go_on.set()
        return list(await asyncio.gather(first, second))

    assert [[line.status for line in lines] for lines in asyncio.run(run())] == [["a", "b"], ["a", "b"]]
    assert begun == [1]


def test_the_last_one_to_leave_cancels() -> None:
    ended = threading.Event()
    n_reports = 0

    def work(report: Report) -> None:
        nonlocal n_reports
        try:
            while True:
                n_reports += 1
                report(Progress("busy", "d", 10**9, n_reports))
                threading.Event().wait(0.005)
        finally:
            ended.set()

    async def leave_after(transfers: Transfers, n_lines: int) -> None:
        async with aclosing(transfers.follow("x", work)) as lines:
            async for _ in lines:
                n_lines -= 1
                if n_lines == 0:
                    return

    async def run() -> None:
        transfers = Transfers()
        second = asyncio.create_task(leave_after(transfers, 6))
        await leave_after(transfers, 1)
        assert not ended.is_set()
        await second
        assert await asyncio.to_thread(ended.wait, PATIENCE_S)

    asyncio.run(run())


def test_new_work_begins_after_cancelled_work() -> None:
    release = threading.Event()

    def slow(report: Report) -> None:
        report(Progress("slow"))
        release.wait(PATIENCE_S)

    async def run() -> list[Progress]:
        transfers = Transfers()
        async with aclosing(transfers.follow("x", slow)) as lines:
            async for _ in lines:
                break
        found = await collect(transfers, "x", lambda report: report(Progress("new")))
        release.set()
        return found

    assert [line.status for line in asyncio.run(run())] == ["new"]


def test_close_cancels_everything() -> None:
    def work(report: Report) -> None:
        while True:
            report(Progress("busy"))
            threading.Event().wait(0.005)

    async def run() -> None:
        transfers = Transfers()
        task = asyncio.create_task(collect(transfers, "x", work))
        await asyncio.sleep(0.1)
        transfers.close()
        with pytest.raises(PunaError, match="cancelled"):
            await asyncio.wait_for(task, PATIENCE_S)

    asyncio.run(run())
