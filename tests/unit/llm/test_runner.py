from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from puna import wire
from puna.errors import BadRequest, LoadError, OutOfMemory, PunaError, RunnerDied
from puna.llm.runner import Runner, command_for, error_from
from puna.llm.stderr import Tail
from tests.patience import PATIENCE_S
from tests.tiny import write_llama
from tests.unit.llm.scripted import events, fake_command, requests_to, wait_for_event, write_script

ROOT = Path(__file__).resolve().parents[3]


@asynccontextmanager
async def running(path: Path, *, load: bool = True) -> AsyncIterator[Runner]:
    runner = await Runner.start(fake_command(path), timeout_s=PATIENCE_S)
    try:
        if load:
            await runner.load(wire.LoadRequest(), PATIENCE_S)
        yield runner
    finally:
        await runner.close()


async def text_of(runner: Runner, **fields: Any) -> tuple[str, wire.Done]:
    text = ""
    async for reply in runner.complete(wire.CompletionRequest(**fields)):
        if isinstance(reply, wire.Piece):
            text += reply.content
        else:
            assert isinstance(reply, wire.Done)
            return text, reply
    raise AssertionError("no last message")


def test_completes_tokenizes_and_ends(tmp_path: Path) -> None:
    path = write_script(tmp_path)

    async def scenario() -> None:
        async with running(path) as runner:
            text, done = await text_of(runner, prompt="a b c", return_tokens=True)
            assert text == "Hello world"
            assert (done.reason, done.prompt_eval_count, done.eval_count, done.tokens) == ("stop", 3, 4, [0, 1, 2, 3, 4, 5])
            assert await runner.tokenize("one two three") == [0, 1, 2]
            assert await runner.detokenize([7, 8]) == "7 8"
            assert (await runner.health()).status == "ready"
            assert runner.is_alive
        assert not runner.is_alive

    uvloop.run(scenario())
    assert requests_to(path, "/load")[0]["operation"] == "commit"


def test_who_asks_after_a_crash_is_told_of_it_though_the_runner_was_closed_meanwhile(tmp_path: Path) -> None:
    """Whoever watches the process closes the runner as soon as it has ended, perhaps before its requests know why."""

    async def scenario() -> None:
        async with running(write_script(tmp_path)) as runner:
            os.kill(runner.pid, signal.SIGABRT)
            await runner.wait()
            await runner.close()
            with pytest.raises(RunnerDied, match="unexpectedly stopped \\(signal SIGABRT\\)"):
                await runner.health()

    uvloop.run(scenario())


def test_who_asks_a_runner_that_was_closed_is_told_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(write_script(tmp_path)) as runner:
            await runner.close()
            with pytest.raises(RunnerDied, match="the model was unloaded"):
                await runner.health()

    uvloop.run(scenario())


def test_requests_run_side_by_side(tmp_path: Path) -> None:
    """None of them is answered before all have come."""
    path = write_script(tmp_path, n_pieces=10, together=8)

    async def scenario() -> None:
        async with running(path) as runner, asyncio.timeout(PATIENCE_S):
            results = await asyncio.gather(*(text_of(runner, prompt=str(n)) for n in range(8)))
            assert {text for text, _ in results} == {"x " * 10}

    uvloop.run(scenario())


@pytest.mark.parametrize(
    ("script", "error", "text"),
    [
        (
            {"exit_at_start": 3, "stderr": "ImportError: no ggml"},
            LoadError,
            r"terminated \(exit status 3\): ImportError: no ggml",
        ),
        ({"start_noise": "hello"}, LoadError, "does not say that it is there: a reply cannot be understood"),
        ({"start_noise": '{"port": 80}'}, LoadError, "does not say that it is there: a reply cannot be understood"),
        ({"load_error": "unknown architecture: x"}, LoadError, "unknown architecture: x"),
        ({"out_of_memory": True}, OutOfMemory, "more system memory"),
        (
            {"exit_at_load": 1, "stderr": "a\nGGML_ASSERT(x > 0) failed\nbye"},
            RunnerDied,
            r"exit status 1\): GGML_ASSERT\(x > 0\)",
        ),
    ],
)
def test_a_load_that_fails_says_why(tmp_path: Path, script: dict[str, Any], error: type[PunaError], text: str) -> None:
    path = write_script(tmp_path, **script)

    async def scenario() -> None:
        runner = await Runner.start(fake_command(path), timeout_s=PATIENCE_S)
        try:
            await runner.load(wire.LoadRequest(), PATIENCE_S)
        finally:
            await runner.close()

    with pytest.raises(error, match=text):
        uvloop.run(scenario())


def test_a_load_without_progress_is_given_up(tmp_path: Path) -> None:
    path = write_script(tmp_path, stall=True)

    async def scenario() -> None:
        runner = await Runner.start(fake_command(path), timeout_s=PATIENCE_S)
        try:
            assert (await runner.try_load(wire.LoadRequest(), PATIENCE_S)).success
            with pytest.raises(LoadError, match=r"progress 0\.00"):
                await runner.wait_until_ready(0.3)
        finally:
            await runner.close()

    uvloop.run(scenario())


def test_a_slow_load_that_makes_progress_is_waited_for(tmp_path: Path) -> None:
    """However short a pause it may make."""
    path = write_script(tmp_path, load_asks=20)

    async def scenario() -> None:
        runner = await Runner.start(fake_command(path), timeout_s=PATIENCE_S)
        try:
            assert (await runner.try_load(wire.LoadRequest(), PATIENCE_S)).success
            await runner.wait_until_ready(0.0)
            assert (await runner.health()).progress == 1.0
        finally:
            await runner.close()

    uvloop.run(scenario())


def test_a_runner_that_never_listens_is_given_up(tmp_path: Path) -> None:
    path = write_script(tmp_path, silent=True)
    with pytest.raises(LoadError, match=r"said nothing within 0.5 s"):
        uvloop.run(Runner.start(fake_command(path), timeout_s=0.5))


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="could not be started"):
        uvloop.run(Runner.start([str(tmp_path / "missing")]))


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ({"die_at_piece": 1, "stderr": "GGML_ASSERT: boom"}, r"unexpectedly stopped \(signal SIGKILL\): GGML_ASSERT: boom"),
        ({"die_at_piece": 0}, r"unexpectedly stopped \(signal SIGKILL\)$"),
        ({"drop_at_piece": 1}, r"unexpectedly stopped \(exit status 0\)"),  # without a line to its server a runner ends
    ],
)
def test_a_broken_completion_raises_runner_died(tmp_path: Path, script: dict[str, Any], text: str) -> None:
    path = write_script(tmp_path, piece_delay_s=0.01, **script)

    async def scenario() -> None:
        async with running(path) as runner:
            with pytest.raises(RunnerDied, match=text):
                await text_of(runner)
            assert not runner.is_alive

    uvloop.run(scenario())


def test_a_runner_that_has_lost_its_model_is_as_good_as_dead(tmp_path: Path) -> None:
    path = write_script(tmp_path, lose_at_piece=1)

    async def scenario() -> None:
        async with running(path) as runner:
            with pytest.raises(RunnerDied, match="has lost its model"):
                await text_of(runner)
            assert not runner.is_alive
            await asyncio.wait_for(runner.wait(), PATIENCE_S)

    uvloop.run(scenario())


def test_nobody_but_who_started_a_runner_can_reach_it(tmp_path: Path) -> None:
    """It listens nowhere: another user of the machine, or a web page, finds nothing to connect to."""

    async def scenario() -> None:
        runner = await Runner.start(command_for(write_llama(tmp_path / "tiny.gguf", n_layers=1)))
        try:
            await runner.load(wire.LoadRequest(), PATIENCE_S)
            assert [c for c in psutil.Process(runner.pid).net_connections() if c.status == psutil.CONN_LISTEN] == []
        finally:
            await runner.close()

    uvloop.run(scenario())


def test_a_long_answer_comes_whole_and_no_piece_is_lost_beside_it(tmp_path: Path) -> None:
    """Vectors of many texts take longer to read than a step takes; that is no reason to give up those who stream."""
    engine = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.unit.runner.fake_engine"]
    texts = ["x" * 1000] * 20_000  # 20 MB on their way there, and a vector each back

    async def scenario() -> None:
        runner = await Runner.start([*engine, "--channel", "--model", str(tmp_path)])
        try:
            await runner.load(wire.LoadRequest(), PATIENCE_S)
            streaming = asyncio.create_task(text_of(runner, prompt="count 2000"))
            reply = await runner.embed(wire.EmbeddingRequest(inputs=[*texts]))
            assert reply.embeddings == [[1000.0, 0.5]] * len(texts)
            text, _ = await streaming
            assert text == "".join(f"{i} " for i in range(2000))
        finally:
            await runner.close()

    uvloop.run(scenario())


def test_every_request_in_flight_hears_of_the_death(tmp_path: Path) -> None:
    path = write_script(tmp_path, n_pieces=100_000, piece_delay_s=0.05)

    async def scenario() -> None:
        async with running(path) as runner:
            tasks = [asyncio.create_task(text_of(runner)) for _ in range(3)]
            await wait_for_event(path, "complete", count=3)
            os.kill(runner.pid, signal.SIGSEGV)
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(result, RunnerDied)
                assert "signal SIGSEGV" in str(result)
            with pytest.raises(RunnerDied):
                await runner.health()

    uvloop.run(scenario())


def test_failed_is_a_message_not_an_exception(tmp_path: Path) -> None:
    path = write_script(tmp_path, fail_at_piece=1, fail_status=400, fail_text="too long")

    async def scenario() -> None:
        async with running(path) as runner:
            replies = [reply async for reply in runner.complete(wire.CompletionRequest())]
            assert replies == [wire.Piece(content="Hel"), wire.Failed(error="too long", status=400)]
            assert isinstance(error_from(wire.Failed(error="too long", status=400)), BadRequest)

    uvloop.run(scenario())


def test_closing_the_iterator_cancels_at_the_runner(tmp_path: Path) -> None:
    path = write_script(tmp_path, n_pieces=100_000, piece_delay_s=0.05)

    async def scenario() -> None:
        async with running(path) as runner:
            async with aclosing(runner.complete(wire.CompletionRequest())) as replies:
                async for _ in replies:
                    break
            await wait_for_event(path, "cancelled")

    uvloop.run(scenario())


def test_a_runner_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake ends at the end of its input, so that is kept from it by a shell in between."""
    monkeypatch.setattr("puna.llm.runner.CLOSE_GRACE_S", 0.2)
    script = "trap '' TERM; echo '[]' >&0; while :; do sleep 0.05; done"

    async def scenario() -> int:
        runner = await Runner.start(["sh", "-c", script])
        await runner.close()
        return await runner.wait()

    assert uvloop.run(scenario()) == -signal.SIGKILL


def test_cancelling_the_start_leaves_no_process(tmp_path: Path) -> None:
    path = write_script(tmp_path, silent=True)
    started: list[int] = []
    create = asyncio.create_subprocess_exec

    async def scenario() -> None:
        async def spy(*args: Any, **kwargs: Any) -> asyncio.subprocess.Process:
            process = await create(*args, **kwargs)
            started.append(process.pid)
            return process

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio, "create_subprocess_exec", spy)
            task = asyncio.create_task(Runner.start(fake_command(path)))
            while not started:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    uvloop.run(scenario())
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


def test_a_runner_ends_when_its_input_does(tmp_path: Path) -> None:
    """The server may be killed without a chance to say goodbye: the line's end then does it."""
    path = write_script(tmp_path)

    async def scenario() -> int:
        runner = await Runner.start(fake_command(path))
        runner._channel.close()
        code = await asyncio.wait_for(runner.wait(), PATIENCE_S)
        await runner.close()
        return code

    assert uvloop.run(scenario()) == 0
    assert ["end of input"] in events(path)


def lines(*texts: str) -> Tail:
    tail = Tail()
    for text in texts:
        tail.add(text)
    return tail


@pytest.mark.parametrize(
    ("tail", "reason"),
    [
        (lines(), ""),
        (lines("loading", "", "done"), "done"),
        (lines("error: harmless", "GGML_ASSERT(a) failed", "see the log"), "GGML_ASSERT(a) failed"),
        (lines("Traceback (most recent call last):", "  File x", "ValueError: bad", "ok"), "ValueError: bad"),
        (lines("puna.errors.LoadError: no", "error in something"), "puna.errors.LoadError: no"),
        (lines("first error", "second error", "bye"), "second error"),
    ],
)
def test_reason_prefers_what_names_the_cause(tail: Tail, reason: str) -> None:
    assert tail.reason == reason


def test_the_tail_is_bounded() -> None:
    tail = Tail()
    for number in range(10_000):
        tail.add(f"line {number} " + "x" * 100)
    tail.add("y" * 100_000)
    assert sum(map(len, tail._lines)) <= 8 * 1024
    assert len(tail.reason) <= 500
