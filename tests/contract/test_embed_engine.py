"""The engine's promises to those who want vectors: turns, one reply whatever happens, nothing for who has left."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from puna.errors import BadRequest, FileFormatError, UnsupportedModel
from puna.model import registry
from puna.runner.engine import Engine, RequestHandle
from puna.runner.service import NotLoaded
from puna.wire import CompletionRequest, EmbeddingReply, EmbeddingRequest, Failed, LoadOptions, LoadRequest
from tests.patience import PATIENCE_S, wait_until
from tests.tiny import CORPUS, write_bert, write_llama

LONG = [CORPUS[i % 300 :][:400] for i in range(600)]


def started(path: Path, **options: Any) -> Engine:
    engine = Engine(path)
    assert engine.load(LoadRequest(options=LoadOptions(**{"n_ctx": 128, "n_threads": 1, **options}))).success
    wait_until(lambda: engine.health().status == "ready")
    return engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert") / "model.gguf")


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    engine = started(model)
    yield engine
    engine.close()


class Answer:
    """What came for one request, and when."""

    def __init__(self, engine: Engine, inputs: list[str]) -> None:
        self.replies: list[EmbeddingReply | Failed] = []
        self.at_step = -1
        self._engine = engine
        self._there = threading.Event()
        self.handle: RequestHandle = engine.embed(EmbeddingRequest(inputs=[*inputs]), self._emit)

    def _emit(self, reply: EmbeddingReply | Failed) -> None:
        self.at_step = self._engine.health().steps
        self.replies.append(reply)
        self._there.set()

    @property
    def reply(self) -> EmbeddingReply | Failed:
        assert self._there.wait(PATIENCE_S)
        return self.replies[0]


def after_steps(engine: Engine, n: int, act: Callable[[], object]) -> None:
    """Act between two steps, once so many more are computed: on the engine's thread, which waits for that."""
    n_left = n

    def count() -> None:
        nonlocal n_left
        n_left -= 1
        if n_left == 0:
            act()

    engine.after_step(count)


def test_a_long_list_does_not_keep_a_short_one_waiting(engine: Engine) -> None:
    shorts: list[Answer] = []
    after_steps(engine, 2, lambda: shorts.append(Answer(engine, ["hello"])))
    before = engine.health().steps
    long = Answer(engine, LONG)
    assert isinstance(long.reply, EmbeddingReply)
    (short,), asked = shorts, before + 2
    assert isinstance(short.reply, EmbeddingReply)
    # What was taken up fills a batch; behind that the short one's turn comes at once.
    assert short.at_step - asked <= 3
    assert long.at_step - short.at_step > 10
    assert len(long.reply.embeddings) == len(LONG)


def test_a_cancelled_list_ends_soon_and_once(engine: Engine) -> None:
    may_cancel = threading.Event()

    def cancel() -> None:
        assert may_cancel.wait(PATIENCE_S)
        answer.handle.cancel()

    after_steps(engine, 1, cancel)
    before = engine.health().steps
    answer = Answer(engine, LONG)
    may_cancel.set()
    assert answer.reply == Failed(error="the request was cancelled", status=499)
    answer.handle.cancel()
    wait_until(lambda: engine.health().active == engine.health().waiting == 0)
    assert engine.health().steps <= before + 2
    assert isinstance(Answer(engine, ["still there"]).reply, EmbeddingReply)
    assert len(answer.replies) == 1


def test_many_at_once_get_what_they_get_alone(engine: Engine) -> None:
    texts = [CORPUS[i : i + 10 + 7 * i] for i in range(24)]
    alone = [Answer(engine, [text]).reply for text in texts]
    together = [Answer(engine, [text, "and more"]) for text in texts]
    for one, other in zip(alone, together, strict=True):
        assert isinstance(one, EmbeddingReply)
        assert isinstance(other.reply, EmbeddingReply)
        assert other.reply.embeddings[0] == pytest.approx(one.embeddings[0], abs=2e-3)


def test_closing_answers_everybody(model: Path) -> None:
    engine = started(model)
    answers = [Answer(engine, LONG) for _ in range(3)]
    engine.close()
    assert all(isinstance(answer.reply, Failed) and len(answer.replies) == 1 for answer in answers)
    with pytest.raises(NotLoaded):
        Answer(engine, ["hello"])


def test_a_text_as_long_as_the_context_has_a_step_to_itself(model: Path, tmp_path: Path) -> None:
    engine = started(write_bert(tmp_path / "long.gguf", n_ctx=1024), n_ctx=1024)
    answer = Answer(engine, ["hello", " ".join([CORPUS] * 3), "world"])
    assert isinstance(answer.reply, EmbeddingReply)
    assert answer.reply.prompt_eval_count > 512
    engine.close()


def test_each_model_does_what_it_is_for(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="computes embeddings"):
        engine.submit(CompletionRequest(prompt="hello"), lambda _: None)
    for path in (
        write_llama(tmp_path / "llama.gguf", n_layers=1),
        write_bert(tmp_path / "none.gguf", pooling=0),
        write_bert(tmp_path / "unsaid.gguf", pooling=None),
    ):
        other = started(path)
        with pytest.raises(UnsupportedModel, match="this model does not support embeddings"):
            Answer(other, ["hello"])
        other.close()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"pooling": 7}, "pooling_type 7 is not known"),
        ({"n_heads": 3}, "128 values do not divide into 3 heads"),
        ({"n_positions": 100}, "position_embd.weight has 100 positions, the context is 128"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, change: dict[str, Any], error: str) -> None:
    with pytest.raises(FileFormatError, match=error):
        started(write_bert(tmp_path / "bad.gguf", **change))


def test_measuring_takes_no_memory_and_says_what_loading_takes(model: Path) -> None:
    engine = Engine(model)
    options = LoadOptions(n_ctx=128, n_threads=1)
    fit = engine.load(LoadRequest(operation="fit", options=options)).memory
    taken = engine.load(LoadRequest(operation="alloc", options=options)).memory
    assert fit is not None
    assert fit == taken
    assert sum(fit.devices[0].cache) == 0
    engine.close()


def test_an_architecture_that_knows_no_pooling_is_refused_instead_of_pooling_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "can_pool", lambda *_: False)
    path = write_llama(tmp_path / "embedder.gguf", n_layers=1, metadata={"llama.pooling_type": 1})
    engine = Engine(path, new_engine=True)
    with pytest.raises(UnsupportedModel, match="embeddings of a llama model are not supported yet"):
        engine.load(LoadRequest())
