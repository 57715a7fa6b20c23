"""``from puna import Engine``: a program owns a model and the process that computes it."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from puna import AsyncEngine, Chunk, Engine
from puna.errors import BadRequest, NotFound, PunaError, UnsupportedModel
from puna.local.batch import in_order
from puna.store.store import Store
from tests.conftest import STARTER
from tests.patience import PATIENCE_S, wait_until
from tests.processes import command_of
from tests.tiny import RANK, write_bert, write_llama

PROMPT = "the quick brown fox"
N_CTX = 1 << 16  # an answer of ten times as many tokens goes on for longer than a test takes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("python") / "tiny.gguf", seed=5, n_layers=1, n_embd=64, n_ff=64, n_ctx=N_CTX)


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(model, n_ctx=512, parallel=4, models=tmp_path_factory.mktemp("models")) as opened:
        yield opened


def runners() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True) if "runner" in command_of(child)}


def test_an_answer_says_what_it_took(engine: Engine) -> None:
    answer = engine.generate(PROMPT, num_predict=7, ignore_eos=True, temperature=0.0, logprobs=2)
    assert (answer.tokens, answer.reason) == (7, "length")
    assert answer.prompt_tokens > 4
    assert str(answer) == answer.text != ""
    assert len(answer.logprobs) == 7
    assert all(len(entry.top) == 2 and entry.logprob <= 0 for entry in answer.logprobs)


def test_a_link_to_a_file_with_another_name_is_a_model(model: Path, tmp_path: Path) -> None:
    """As those in a hub's cache are."""
    (tmp_path / "blob").hardlink_to(model)
    link = tmp_path / "linked.gguf"
    link.symlink_to("blob")
    with Engine(link, n_ctx=64, models=tmp_path / "models") as engine:
        assert engine.generate(PROMPT, num_predict=1, ignore_eos=True).tokens == 1


def test_pieces_of_a_stream_are_the_answer(engine: Engine) -> None:
    whole = engine.generate(PROMPT, num_predict=12, ignore_eos=True, temperature=0.0)
    stream = engine.stream_generate(PROMPT, num_predict=12, ignore_eos=True, temperature=0.0)
    pieces = list(stream)
    assert len(pieces) > 1
    assert all(isinstance(piece, Chunk) for piece in pieces)
    assert "".join(map(str, pieces)) == whole.text == stream.answer.text
    talk = engine.stream_chat([{"role": "user", "content": PROMPT}], num_predict=3, ignore_eos=True)
    assert "".join(map(str, talk)) == talk.answer.text


def test_who_closes_a_stream_early_cancels_it(engine: Engine) -> None:
    stream = engine.stream_generate(PROMPT, num_predict=400, ignore_eos=True)
    next(iter(stream))
    stream.close()
    # The engine is free for others, and what was cancelled has no end.
    assert engine.generate(PROMPT, num_predict=2).tokens <= 2
    with pytest.raises(PunaError, match="the answer has not ended"):
        stream.answer  # noqa: B018


def test_a_stream_is_read_by_hand_too(engine: Engine) -> None:
    stream = engine.stream_generate(PROMPT, num_predict=3, ignore_eos=True, temperature=0.0)
    with pytest.raises(PunaError, match="the answer has not ended"):
        stream.answer  # noqa: B018
    first = next(stream)
    assert str(first) + "".join(map(str, stream)) == stream.answer.text
    with pytest.raises(StopIteration):
        next(stream)


def test_what_has_no_room_is_told_in_the_answer_and_nowhere_else(model: Path, tmp_path: Path) -> None:
    program = f"""
from puna import Engine
with Engine({str(model)!r}, n_ctx=32, models={str(tmp_path)!r}) as engine:
    print(*engine.generate("the quick brown fox " * 50, num_predict=1, ignore_eos=True).warnings)
"""
    assert run(program).startswith("the prompt did not fit the context: at least")


def run(program: str) -> str:
    """What it prints; it must end by itself, and well."""
    forks = ["-W", "ignore::DeprecationWarning"]  # newer Pythons advise against that beside threads
    done = subprocess.run(
        [sys.executable, *forks, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def test_many_prompts_are_answered_in_their_order_and_as_alone(engine: Engine) -> None:
    prompts = [f"{PROMPT} {number}" for number in range(40)]
    alone = [engine.generate(prompt, num_predict=3, temperature=0.0, ignore_eos=True).text for prompt in prompts[:5]]
    together = engine.generate_many(prompts, num_predict=3, temperature=0.0, ignore_eos=True)
    assert [answer.text for answer in together[:5]] == alone
    assert len(together) == 40
    assert len(engine.chat_many([PROMPT, [{"role": "user", "content": PROMPT}]], num_predict=2)) == 2
    assert engine.generate_many([]) == []


def test_no_more_than_so_many_at_once_and_the_first_error_says_whose_it_is() -> None:
    running = most = 0

    async def work(item: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        if item == 17:
            raise BadRequest("no seventeens")
        return -item

    assert asyncio.run(in_order(work, range(10), shows=False, at_once=3)) == [-n for n in range(10)]
    assert most == 3
    with pytest.raises(BadRequest) as caught:
        asyncio.run(in_order(work, range(30), shows=False, at_once=3))
    assert caught.value.__notes__ == ["item 17 of 30"]


def test_threads_share_one_engine(engine: Engine) -> None:
    answers: list[int] = []

    def ask() -> None:
        answers.append(engine.generate(PROMPT, num_predict=5, ignore_eos=True).tokens)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert answers == [5] * 6


def test_no_number_of_prompts_is_too_many(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a server says of a queue protects it from strangers; a program waits for itself."""
    monkeypatch.setenv("OLLAMA_MAX_QUEUE", "2")
    with Engine(model, n_ctx=64, parallel=1, models=tmp_path / "models") as engine:
        answers = engine.generate_many([PROMPT] * 12, num_predict=1, ignore_eos=True)
        assert [answer.tokens for answer in answers] == [1] * 12


def test_what_is_collected_in_the_engines_own_thread_ends_there(model: Path, tmp_path: Path) -> None:
    """Garbage is collected in whichever thread happens to."""
    before = runners()
    engine = Engine(model, n_ctx=512, models=tmp_path / "models")
    loop = engine._loop
    stream = engine.stream_generate(PROMPT, num_predict=400, ignore_eos=True)
    next(iter(stream))
    circle: list[object] = [stream]
    circle.append(circle)
    del stream, circle
    loop._loop.call_soon_threadsafe(gc.collect)
    assert engine.generate(PROMPT, num_predict=1, ignore_eos=True).tokens == 1
    circle = [engine]
    circle.append(circle)
    del engine, circle
    loop._loop.call_soon_threadsafe(gc.collect)
    wait_until(lambda: not loop._thread.is_alive())
    assert runners() <= before


def test_a_stream_that_outlives_its_engine_goes_quietly(model: Path, tmp_path: Path) -> None:
    with Engine(model, n_ctx=512, models=tmp_path / "models") as engine:
        stream = engine.stream_generate(PROMPT, num_predict=400, ignore_eos=True)
        next(iter(stream))
    del stream
    gc.collect()


def test_what_cannot_be_is_refused_by_name(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="temprature"):
        engine.generate(PROMPT, temprature=1)  # type: ignore[call-arg]
    with pytest.raises(PunaError, match='"temperature" must be'):
        engine.generate(PROMPT, temperature="hot")  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="does not support images"):
        engine.chat([{"role": "user", "content": PROMPT, "images": [b"\x89PNG"]}])
    with pytest.raises(UnsupportedModel, match="does not support embeddings"):
        engine.embed(PROMPT)
    with pytest.raises(BadRequest, match="nothing that a model could be sent"):
        engine.chat([{"role": "user", "content": object()}])
    with pytest.raises(NotFound, match=r"no such GGUF file: .*missing\.gguf"):
        Engine(tmp_path / "missing.gguf")


def test_files_that_are_not_there_are_not_looked_for_elsewhere(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled: list[str] = []
    monkeypatch.setattr(Store, "pull", lambda self, reference, *_: pulled.append(reference))
    monkeypatch.chdir(tmp_path)
    for name in ("missing.gguf", "models/missing.gguf", "MISSING.GGUF"):
        with pytest.raises(NotFound, match=f"no such GGUF file, and no model of that name: {name}"):
            Engine(name, models=tmp_path / "models")
    assert pulled == []
    (tmp_path / "weights.bin").hardlink_to(model)
    with pytest.raises(NotFound, match=r"the name of one ends in \.gguf: ./weights\.bin"):
        Engine("./weights.bin", models=tmp_path / "models")
    (tmp_path / "TINY.GGUF").hardlink_to(model)
    with Engine("TINY.GGUF", n_ctx=64, models=tmp_path / "models") as engine:
        assert engine.generate(PROMPT, num_predict=1, ignore_eos=True).tokens == 1


def test_numbers_that_cannot_be_are_refused_before_anything_is_started(model: Path) -> None:
    before = runners()
    with pytest.raises(BadRequest, match="n_ctx must not be negative: -5"):
        Engine(model, n_ctx=-5)
    with pytest.raises(TypeError, match="parallel must be a number, not str"):
        Engine(model, parallel="2")  # type: ignore[arg-type]
    assert runners() <= before


def test_an_engine_says_which_it_is_and_is_not_copied(engine: Engine, model: Path) -> None:
    assert repr(engine) == f"<Engine {str(model)!r}>"
    assert repr(AsyncEngine(model)) == f"<AsyncEngine {str(model)!r}, closed>"
    for each in (engine, AsyncEngine(model)):
        with pytest.raises(TypeError, match="cannot be copied or sent to another process: open one there"):
            pickle.dumps(each)


def test_a_closed_engine_has_no_process_and_says_so(model: Path, tmp_path: Path) -> None:
    before = runners()
    engine = Engine(model, models=tmp_path)
    assert runners() > before
    engine.close()
    assert runners() <= before
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.generate(PROMPT)


def test_an_engine_that_nobody_has_any_more_ends(model: Path, tmp_path: Path) -> None:
    before = runners()
    engine = Engine(model, models=tmp_path)
    assert runners() > before
    del engine
    gc.collect()
    wait_until(lambda: runners() <= before)


def test_a_file_that_is_no_model_leaves_nothing_behind(tmp_path: Path) -> None:
    before = runners()
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + b"\xff" * 100)
    with pytest.raises(PunaError, match=r"bad\.gguf"):
        Engine(tmp_path / "bad.gguf", models=tmp_path)
    assert runners() <= before


def test_vectors_and_scores(tmp_path: Path) -> None:
    texts = ["the quick brown fox", "a lazy dog"]
    path = write_bert(tmp_path / "embedding.gguf", seed=3, n_ctx=64)
    with Engine(path, models=tmp_path) as engine:
        vectors = engine.embed(texts)
        assert len(vectors) == 2
        assert all(abs(sum(value * value for value in vector) - 1) < 1e-3 for vector in vectors)
        assert engine.embed(texts[0])[0] == pytest.approx(vectors[0], abs=1e-5)
        assert engine.embed([]) == []
        with pytest.raises(UnsupportedModel):
            engine.score("fox", texts)
        with pytest.raises(TypeError, match="texts must be a list, not bytes"):
            engine.embed(b"fox")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="each of texts is a text, not int"):
            engine.embed([1, 2])  # type: ignore[list-item]
    ranking = write_bert(tmp_path / "rank.gguf", seed=3, n_ctx=64, pooling=RANK)
    with Engine(ranking, models=tmp_path) as engine:
        scores = engine.score("fox", texts)
        best = engine.rerank("fox", texts, top_n=1)
        assert [round(item.score, 6) for item in best] == [round(max(scores), 6)]
        assert best[0].document == texts[best[0].index]
        assert engine.score("fox", []) == []
        with pytest.raises(TypeError, match="a query is a text, not NoneType"):
            engine.score(None, texts)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="documents must be a list, not str"):
            engine.rerank("fox", "a lazy dog")
        with pytest.raises(BadRequest, match="top_n must not be negative: -1"):
            engine.rerank("fox", texts, top_n=-1)


def test_the_asynchronous_one_in_a_loop_that_is_running(model: Path, tmp_path: Path) -> None:
    async def program() -> None:
        async with AsyncEngine(model, models=tmp_path) as engine:
            answers = await asyncio.gather(*(engine.generate(PROMPT, num_predict=4, ignore_eos=True) for _ in range(3)))
            assert [answer.tokens for answer in answers] == [4, 4, 4]
            stream = engine.stream_chat(PROMPT, num_predict=4, ignore_eos=True)
            assert "".join([str(chunk) async for chunk in stream]) == stream.answer.text
            # As in a notebook, whose own loop is running: the other kind brings a thread.
            with Engine(model, models=tmp_path) as other:
                assert other.generate(PROMPT, num_predict=1, ignore_eos=True).tokens == 1
        with pytest.raises(PunaError, match="closed"):
            await engine.generate(PROMPT)

    asyncio.run(program())


def test_a_model_that_is_missing_is_pulled(starter_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pulled: list[str] = []
    model = starter_store.get(STARTER).model_path

    def pull(self: Store, reference: str, *_: object, **__: object) -> object:
        pulled.append(reference)
        return self.from_file(copy)

    copy = tmp_path / "copy.gguf"
    os.link(model, copy)
    monkeypatch.setattr(Store, "pull", pull)
    with pytest.raises(NotFound):  # the pull that stands in for the real one stores nothing under the name
        Engine(STARTER, models=tmp_path / "models", progress=True)
    assert pulled == [STARTER]


def test_what_is_half_read_ends_with_its_engine(model: Path, tmp_path: Path) -> None:
    """In silence, but for who reads on."""
    complaints: list[str] = []

    async def program() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
        async with AsyncEngine(model, n_ctx=512, models=tmp_path) as engine:
            half, whole = (engine.stream_generate(PROMPT, num_predict=n, ignore_eos=True) for n in (400, 2))
            await anext(half)
            assert len([chunk async for chunk in whole]) <= 2
        with pytest.raises(PunaError, match="the engine was closed before the answer had ended"):
            await anext(half)
        with pytest.raises(StopAsyncIteration):
            await anext(whole)
        assert whole.answer.tokens == 2

    asyncio.run(program())
    assert complaints == []


def test_the_asynchronous_one_belongs_to_its_loop(model: Path, tmp_path: Path) -> None:
    async def program() -> None:
        engine = AsyncEngine(model, n_ctx=64, models=tmp_path)
        await engine.close()  # of what was never opened there is nothing to close
        await engine.open()
        with pytest.raises(PunaError, match="the engine is open"):
            await engine.open()

        async def elsewhere() -> None:
            with pytest.raises(PunaError, match="belongs to the event loop that opened it"):
                await engine.generate(PROMPT)
            with pytest.raises(PunaError, match="belongs to the event loop that opened it"):
                await engine.close()

        await asyncio.to_thread(asyncio.run, elsewhere())
        assert (await engine.generate(PROMPT, num_predict=1, ignore_eos=True)).tokens == 1
        await engine.close()
        await engine.open()
        await engine.close()

    asyncio.run(program())


@pytest.mark.parametrize("wait_s", [0.0, 0.02, 0.3])
def test_ctrl_c_ends_the_wait_and_the_work(wait_s: float, model: Path, tmp_path: Path) -> None:
    """Also in the first moments of the first call."""
    program = f"""
import sys
from puna import Engine
with Engine({str(model)!r}, n_ctx={N_CTX}, models={str(tmp_path)!r}) as engine:
    try:
        print("ready", flush=True)
        engine.generate("fox", num_predict={10 * N_CTX}, ignore_eos=True)
    except KeyboardInterrupt:
        print("interrupted", engine.generate("fox", num_predict=2, ignore_eos=True).tokens, flush=True)
print("closed", flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            time.sleep(wait_s)  # the answer takes far longer
            process.send_signal(signal.SIGINT)
            rest, _ = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert rest.splitlines() == ["interrupted 2", "closed"]


def test_a_program_that_forgets_to_close_leaves_no_process(model: Path, tmp_path: Path) -> None:
    program = (
        f"from puna import Engine; e = Engine({str(model)!r}, models={str(tmp_path)!r}); print(e.generate('fox', num_predict=1))"
    )
    before = runners()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    wait_until(lambda: runners() <= before)


def test_a_program_may_end_with_a_stream_half_read(model: Path, tmp_path: Path) -> None:
    """Also where something holds on to it until the interpreter is taken down."""
    program = f"""
from puna import Engine
engine = Engine({str(model)!r}, n_ctx=512, models={str(tmp_path)!r})
chunks = iter(engine.stream_generate("fox", num_predict=400, ignore_eos=True))
print("some" if next(chunks) else "none")
"""
    assert run(program) == "some"


def test_a_forked_process_is_told_that_the_engine_is_not_its_own(model: Path, tmp_path: Path) -> None:
    program = f"""
import gc, os, sys
from puna import Engine
engine = Engine({str(model)!r}, n_ctx=512, models={str(tmp_path)!r})
stream = engine.stream_generate("fox", num_predict=400, ignore_eos=True)
next(stream)

def forked(work):
    process = os.fork()
    if not process:
        try:
            work()
        except RuntimeError as error:
            print(error, flush=True)
            os._exit(3)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

def forget():
    global engine, stream
    del engine, stream
    gc.collect()

ends = [forked(work) for work in (lambda: engine.generate("fox"), lambda: engine.close(), lambda: stream.close(), forget)]
assert ends == [3, 0, 0, 0], ends
assert engine.generate("fox", num_predict=2, ignore_eos=True).tokens == 2
engine.close()
"""
    assert run(program) == "an engine belongs to the process that opened it: open one in this process"


def test_the_package_shows_what_it_has() -> None:
    import puna

    assert set(puna.__all__) == {*("Answer", "AsyncEngine", "Chunk", "Engine", "Logprob", "Ranked", "ToolCall", "__version__")}
    assert set(puna.__all__) <= set(dir(puna))
