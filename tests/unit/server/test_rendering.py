"""Templates are rendered in processes that may be killed: whatever one does, the server answers, and so do others' templates."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from puna.errors import BadRequest, Overloaded, TemplateError
from puna.prompt.exchange import PromptRequest, Source
from puna.prompt.limits import MAX_TEMPLATE_CHARS
from puna.prompt.worker import MAX_BYTES
from puna.server.rendering import MAX_PROCESSES, Renderers
from tests.patience import PATIENCE_S
from tests.unit.prompt import chat_templates as t

SLOW = "{% set l = range(100000) | list %}{% for i in range(100000) %}{{ 'x' if (i ~ '') in l }}{% endfor %}"
"""A second or so for each of a few steps: long before the template's own budget is used up."""


def asked(template: str, **more: object) -> PromptRequest:
    return PromptRequest(Source("", template), [t.USER], **more)  # type: ignore[arg-type]


@asynccontextmanager
async def pool(**options: object) -> AsyncIterator[Renderers]:
    renderers = Renderers(**options)  # type: ignore[arg-type]
    try:
        yield renderers
    finally:
        await renderers.close()


async def process_with(limit_s: float) -> Process:
    """One that has so much of a processor's time for a prompt, and whose templates have all the time that they want."""
    program = (
        "from puna.prompt import limits, worker\n"
        f"limits.Budget.__init__.__kwdefaults__['max_seconds'] = 1e6\nworker.LIMIT_S = {limit_s}\nworker.main()"
    )
    return await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)


def test_a_request_is_one_message_there_and_one_back() -> None:
    async def run() -> None:
        async with pool() as renderers:
            for n in range(1, 4):
                prompt = await renderers.render(asked(t.CHATML_JINJA))
                assert prompt.text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
                assert renderers.n_exchanges == n
            assert len(renderers._all) == 1

    asyncio.run(run())


def test_what_puna_wrote_needs_no_process() -> None:
    async def run() -> None:
        async with pool() as renderers:
            prompt = await renderers.render(PromptRequest(Source(has_im_start=True), [t.USER]))
            assert prompt.text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
            assert renderers.n_exchanges == 0
            assert not renderers._all

    asyncio.run(run())


def test_a_process_is_started_meanwhile() -> None:
    async def run() -> None:
        async with pool() as renderers:
            renderers.warm()
            renderers.warm()
            await renderers.render(asked("x"))
            assert len(renderers._all) == 1
            renderers.warm()
            assert len(renderers._all) == 1

    asyncio.run(run())


def test_errors_come_as_they_are_here() -> None:
    async def run() -> None:
        async with pool() as renderers:
            with pytest.raises(TemplateError, match="line 2"):
                await renderers.render(asked("\n{% if %}"))
            with pytest.raises(TemplateError, match="refuses these messages: no such role"):
                await renderers.render(asked("{{ raise_exception('no such role') }}"))
            with pytest.raises(BadRequest, match="does not support insert") as caught:
                await renderers.render(asked("x", prefix="a", suffix="b"))
            assert not isinstance(caught.value, TemplateError)
            assert (await renderers.render(asked("still here"))).text == "still here"
            n_exchanges = renderers.n_exchanges
            with pytest.raises(TemplateError, match="are not accepted"):
                await renderers.render(asked("x" * (MAX_TEMPLATE_CHARS + 1)))
            assert renderers.n_exchanges == n_exchanges, "that takes no process to see"

    asyncio.run(run())


def test_others_are_answered_while_a_template_takes_long() -> None:
    async def run() -> None:
        async with pool(start=partial(process_with, PATIENCE_S), limit_s=PATIENCE_S) as renderers:
            slow = [asyncio.create_task(renderers.render(asked(SLOW))) for _ in range(MAX_PROCESSES + 1)]
            await asyncio.sleep(0)
            assert (await renderers.render(asked("quick"))).text == "quick"
            assert not any(task.done() for task in slow)
        ends = await asyncio.gather(*slow, return_exceptions=True)
        assert {type(end) for end in ends} == {asyncio.CancelledError}

    asyncio.run(run())


def test_a_template_that_takes_too_long_is_killed() -> None:
    async def run() -> None:
        async with pool(start=partial(process_with, PATIENCE_S), limit_s=1.0) as renderers:
            for _ in range(MAX_PROCESSES + 1):
                with pytest.raises(TemplateError, match="does too much: it takes longer than 1 s"):
                    await renderers.render(asked(SLOW))
            renderers._limit_s = PATIENCE_S
            assert (await renderers.render(asked("quick"))).text == "quick"

    asyncio.run(run())


def test_the_kernel_ends_what_uses_up_its_processor_time() -> None:
    async def run() -> None:
        async with pool(start=partial(process_with, 0.3)) as renderers:
            with pytest.raises(TemplateError, match="of a processor's time"):
                await renderers.render(asked(SLOW))
            assert (await renderers.render(asked("quick"))).text == "quick"

    asyncio.run(run())


@pytest.mark.parametrize("is_asked", [True, False])
def test_what_is_being_started_at_the_end_has_ended_with_it(is_asked: bool) -> None:
    """The start of a process that nobody wants any more takes until that is gone."""
    events: list[str] = []

    async def start() -> asyncio.subprocess.Process:
        events.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(10):
                await asyncio.sleep(0)
            events.append("gone")
        raise AssertionError

    async def run() -> None:
        renderers = Renderers(start=start)
        asking = asyncio.create_task(renderers.render(asked("x"))) if is_asked else None
        if not is_asked:
            renderers.warm()
        while not events:
            await asyncio.sleep(0)
        await renderers.close()
        assert events == ["begun", "gone"]
        if asking is not None:
            with pytest.raises(asyncio.CancelledError):
                await asking

    asyncio.run(run())


def test_a_process_that_dies_is_an_error_of_one_request() -> None:
    async def run() -> None:
        async with pool() as renderers:
            await renderers.render(asked("x"))
            (worker,) = renderers._all
            task = asyncio.create_task(renderers.render(asked(SLOW)))
            while renderers._idle:
                await asyncio.sleep(0.01)
            os.kill(worker.process.pid, signal.SIGKILL)
            with pytest.raises(TemplateError, match="has crashed"):
                await task
            assert (await renderers.render(asked("x"))).text == "x"

    asyncio.run(run())


def test_a_process_that_died_while_idle_is_no_error() -> None:
    async def run() -> None:
        async with pool() as renderers:
            await renderers.render(asked("x"))
            (worker,) = renderers._all
            worker.process.kill()
            await worker.process.wait()
            assert (await renderers.render(asked("x"))).text == "x"

    asyncio.run(run())


def test_who_goes_away_leaves_nothing_half_read() -> None:
    async def run() -> None:
        async with pool() as renderers:
            await renderers.render(asked("x"))
            for n in range(20):
                task = asyncio.create_task(renderers.render(asked(f"a{n}")))
                await asyncio.sleep(0.0005 * n)
                task.cancel()
                assert (await renderers.render(asked(f"b{n}"))).text == f"b{n}"
            assert len(renderers._all) <= MAX_PROCESSES

    asyncio.run(run())


def test_no_process_can_be_started() -> None:
    async def refuse() -> Process:
        raise BlockingIOError("Resource temporarily unavailable")

    async def run() -> None:
        async with pool(start=refuse) as renderers:
            renderers.warm()
            with pytest.raises(Overloaded, match="no process can be started"):
                await renderers.render(asked("x"))

    asyncio.run(run())


def test_memory_is_limited() -> None:
    async def run() -> None:
        async with pool() as renderers:
            await renderers.render(asked("x"))
            (worker,) = renderers._all
            lines = Path(f"/proc/{worker.process.pid}/limits").read_text().splitlines()
            assert next(line for line in lines if line.startswith("Max address space")).split()[3] == str(MAX_BYTES)

    asyncio.run(run())
