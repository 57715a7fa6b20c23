"""Requests with images through the real engine, whoever encodes them, and where cross attention looks at what was encoded.

Whichever engine reads and whichever encodes, the answers are those of libmtmd and libllama driven by hand, or of plain numpy for
what they do not have: images one after another, several users at once, the same image again. Where libmtmd prepares images in
another way than Puna's encoder, answers are those of model and encoder called by hand, which tests/parity/test_seeing.py judges.
"""

from __future__ import annotations

import io
import threading
import wave
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image as Pillow

from puna.errors import BadRequest
from puna.kvcache.batch import Batch, Encoded
from puna.kvcache.encoder import EncoderCache
from puna.runner.engine import Engine
from puna.runner.images.homes import ImageHomes
from puna.runner.images.prices import Prices
from puna.runner.images.storing import FEWEST
from puna.runner.loading.load import measure
from puna.runner.tasks.completion import Completion
from puna.tokenizer.tokenizer import Tokenizer
from puna.vision.model import Pixels
from puna.wire import CompletionReply, CompletionRequest, Done, Image, LoadOptions, LoadRequest, Piece, SamplingOptions
from tests.mmproj import write_listener, write_projector
from tests.models.mllama import IMAGE, write_eyes, write_mllama
from tests.mtmd_oracle import MARKER, MtmdOracle
from tests.patience import PATIENCE_S, wait_until
from tests.puna_engine import PunaEngine
from tests.tiny import write_llama
from tests.vision import gemma3, mllama, qwen
from tests.vision.conversation import after, marked, prompt_of
from tests.vision.encoding import opened_eyes, picture
from tests.vision.table import FAMILIES, Family

N_ANSWER = 8
WORST = 1e-2  # of an error over the largest logit; fused attention sums in F16
Floats = npt.NDArray[np.float32]
Part = str | Pixels


def write_janus(path: Path) -> Path:
    """A projector that Puna has no encoder for."""
    return write_projector(path, "janus_pro", n_text=256, image_size=84)


class NumpyJudge:
    """What plain numpy goes on with."""

    def __init__(self, path: Path, eyes: Path) -> None:
        self._see, self._read, self._tokenizer = mllama.Eyes(eyes), mllama.Text(path), Tokenizer(path)

    def followed(self, parts: Sequence[Part], answer: Sequence[int]) -> Floats:
        """What it holds for likely in place of each token of the answer, after those before it."""
        ids: list[int] = []
        images: list[tuple[int, Any]] = []
        for number, part in enumerate(parts):
            if isinstance(part, str):
                ids += self._tokenizer.encode(part, add_special=not number)
            else:
                images.append((len(ids), self._see(part)))
                ids += self._tokenizer.encode(IMAGE, add_special=False)
        logits = self._read([*ids, *answer], images)
        return logits[len(ids) - 1 : -1].astype(np.float32)

    def close(self) -> None:
        self._tokenizer.close()


class ByHandJudge:
    """What Puna's model and encoder, called by hand, go on with."""

    def __init__(self, path: Path, projector: Path) -> None:
        self._open = ExitStack()
        self._eyes = self._open.enter_context(opened_eyes(projector, path))
        self._puna = self._open.enter_context(PunaEngine(path, n_ctx=1024, n_batch=1024))

    def followed(self, parts: Sequence[Part], answer: Sequence[int]) -> Floats:
        self._puna.forget()
        prompt = prompt_of(self._eyes, parts)
        return np.stack([after(self._puna, prompt, answer[:i]) for i in range(len(answer))])

    def close(self) -> None:
        self._open.close()


class LibmtmdJudge:
    def __init__(self, path: Path, projector: Path) -> None:
        self._oracle = MtmdOracle(path, projector, n_ctx=512)

    def followed(self, parts: Sequence[Part], answer: Sequence[int]) -> Floats:
        self._oracle.forget()
        row, position = self._oracle.evaluate(self._oracle.chunks(*marked(parts)))
        rows = [row]
        for i, token in enumerate(answer[:-1]):
            rows.append(self._oracle.decode([token], [position + i], [0], [0])[0])
        return np.stack(rows)

    def close(self) -> None:
        self._oracle.close()


@dataclass(frozen=True)
class Kind:
    write: Callable[[Path], Path]
    projector: Callable[[Path], Path] | None
    new_engine: bool | None = None
    judge: Callable[[Path, Path], Any] = LibmtmdJudge


def by_hand(family: Family) -> Kind:
    return Kind(family.write_text, lambda path: family.encoder().save(path), judge=ByHandJudge)


KINDS = {
    "Puna reads, libmtmd encodes": Kind(write_llama, write_janus),
    "libllama reads": Kind(write_llama, write_janus, new_engine=False),
    "libllama reads gemma 3": Kind(gemma3.write_text, lambda path: gemma3.encoder().save(path), new_engine=False),
    # Not Pixtral's: libmtmd makes the rows that end lines from memory that it never sets; now and then they are no numbers.
    "libllama reads qwen 2.5-vl": Kind(
        partial(qwen.write_text, architecture="qwen2vl"), lambda path: qwen.encoder25().save(path), new_engine=False
    ),
    "mllama in one file": Kind(partial(write_mllama, n_silent=1, n_padding=7), None, judge=NumpyJudge),
    "mllama in two files": Kind(partial(write_mllama, n_silent=1, n_padding=7, eyes=False), write_eyes, judge=NumpyJudge),
    **{f"{name} by hand": by_hand(family) for name, family in FAMILIES.items()},
}


def png(pixels: Pixels) -> bytes:
    out = io.BytesIO()
    Pillow.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def request(parts: Sequence[Part], **fields: Any) -> CompletionRequest:
    prompt = ""
    images: list[Image] = []
    for part in parts:
        if isinstance(part, str):
            prompt += part
        else:
            marker = f"[[{len(images)}]]"
            images.append(Image(marker=marker, data=png(part)))
            prompt += marker
    sampling = SamplingOptions(temperature=0)
    options = {"n_predict": N_ANSWER, "ignore_eos": False, "return_tokens": True, "sampling": sampling, **fields}
    return CompletionRequest(prompt=prompt, images=images, **options)


class Asked:
    """One request's replies."""

    def __init__(self, engine: Engine, asked: CompletionRequest) -> None:
        self._end: CompletionReply | None = None
        self._ended = threading.Event()
        self.handle = engine.submit(asked, self._take)

    def _take(self, reply: CompletionReply) -> None:
        if not isinstance(reply, Piece):
            self._end = reply
            self._ended.set()

    def end(self) -> Done:
        assert self._ended.wait(PATIENCE_S)
        assert isinstance(self._end, Done), self._end
        return self._end


@dataclass
class Seeing:
    engine: Engine
    judge: Any
    options: LoadOptions

    def ask(self, parts: Sequence[Part], **fields: Any) -> Asked:
        return Asked(self.engine, request(parts, **fields))

    def check(self, parts: Sequence[Part], asked: Asked) -> Done:
        end = asked.end()
        answer = end.tokens[-end.eval_count :]
        assert len(answer) == N_ANSWER or end.reason == "stop"
        likely = self.judge.followed(parts, answer)
        # Each token is the likeliest, or as likely within what the order of sums changes.
        chosen, best = likely[np.arange(len(answer)), answer], likely.max(-1)
        assert (chosen >= best - WORST * np.abs(likely).max()).all(), (answer, likely.argmax(-1).tolist())
        return end


@pytest.fixture(scope="module", params=KINDS)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    kind, folder = KINDS[request.param], tmp_path_factory.mktemp("seeing")
    path = kind.write(folder / "text.gguf")
    projector = kind.projector(folder / "eyes.gguf") if kind.projector else None
    judge = kind.judge(path, projector or path)
    engine = Engine(path, kind.new_engine)
    options = LoadOptions(
        n_ctx=1024, n_parallel=3, n_threads=1, projector=str(projector or ""), image_cache_bytes=1 << 24, n_batch=128
    )
    assert engine.load(LoadRequest(options=options)).success
    wait_until(lambda: engine.health().status == "ready")
    assert engine.loop.model.eyes is not None, engine.loop.model.blindness
    yield Seeing(engine, judge, options)
    engine.close()
    judge.close()


CASES: dict[str, list[Any]] = {
    "one": ["the fox ", (84, 84), " and the dog"],
    "first": ["", (200, 90), " is what"],
    "two": ["see ", (56, 56), " then ", (64, 300), " there"],
    "side by side": ["see ", (42, 42), (84, 42), " both"],
    "more than there is room for": ["see ", (42, 42), (300, 300), (300, 200), " all"],
    "blind": ["the quick brown fox"],
}


def parts_of(case: str) -> list[Part]:
    return [part if isinstance(part, str) else picture(*part) for part in CASES[case]]


@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_the_reference(case: str, seeing: Seeing) -> None:
    seeing.check(parts_of(case), seeing.ask(parts_of(case)))


def test_users_at_once(seeing: Seeing) -> None:
    another: list[Part] = ["so ", picture(84, 84, 7), " it"]
    asked = [(parts, seeing.ask(parts)) for parts in (*map(parts_of, CASES), another)]
    for parts, handle in asked:
        seeing.check(parts, handle)
    wait_until(lambda: seeing.engine.health().active == 0)
    seeing.engine.loop.model.cache.check_integrity()
    seeing.engine.loop.scheduler.slots.check_integrity()


LOOKING = pytest.mark.parametrize("seeing", [kind for kind in KINDS if kind.startswith("mllama")], indirect=True, scope="module")


@dataclass
class Noted:
    """What is stored for cross attention, and what steps begin with."""

    parts: list[tuple[int, int]]  # sequence, rows
    in_steps: list[Encoded]
    on_part: Callable[[], bool] = lambda: True  # False: it is as if it had been aborted

    @staticmethod
    def of(seeing: Seeing, monkeypatch: pytest.MonkeyPatch) -> Noted:
        noted = Noted([], [])
        start, store = EncoderCache.start_forward, ImageHomes.store

        def noted_start(self: EncoderCache, batch: Batch) -> Any:
            noted.in_steps += batch.encoded
            return start(self, batch)

        def noted_store(self: ImageHomes, sequence: int, rows: Floats, begin: int) -> bool:
            noted.parts.append((sequence, len(rows)))
            return store(self, sequence, rows, begin) and noted.on_part()

        monkeypatch.setattr(EncoderCache, "start_forward", noted_start)
        monkeypatch.setattr(ImageHomes, "store", noted_store)
        turns = seeing.engine.loop.images
        assert turns is not None
        assert turns.storing is not None
        turns.storing._prices = Prices()  # as if nothing had been stored yet
        return noted


@LOOKING
def test_images_are_stored_in_parts_before_the_steps_of_their_tokens(seeing: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of users with different images at once, one of them with two."""
    noted = Noted.of(seeing, monkeypatch)
    images = [picture(200, 180, seed) for seed in range(40, 44)]
    prompts: list[list[Part]] = [["see ", image, " and"] for image in images[:3]]
    prompts.append(["see ", images[3], " or ", images[0], " now"])
    for parts, asked in [(parts, seeing.ask(parts)) for parts in prompts]:
        seeing.check(parts, asked)
    assert len(noted.in_steps) == 5
    assert sum(n for _, n in noted.parts) == sum(new.n_rows for new in noted.in_steps)
    assert noted.parts[0][1] == FEWEST < noted.in_steps[0].n_rows
    for new in noted.in_steps:
        assert new.n_rows <= sum(n for sequence, n in noted.parts if sequence == new.sequence)


@LOOKING
def test_who_is_cancelled_while_a_second_image_is_stored_keeps_what_was_before_the_first(
    seeing: Seeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Noted.of(seeing, monkeypatch)
    begins = "the quick brown fox jumps over the lazy dog and runs"
    seconds = [picture(200, 180, seed) for seed in (50, 51)]
    first, second = (list[Part]([begins, picture(42, 42, 52), " then ", image, " there"]) for image in seconds)
    asked = seeing.ask(first)

    def cancel() -> bool:
        if len(noted.in_steps) == 1:
            asked.handle.cancel()
            return False
        return True

    noted.on_part = cancel
    assert asked.end().reason == "cancelled"
    assert [new.n_rows for new in noted.in_steps] == [10]
    cache = seeing.engine.loop.model.cache
    wait_until(lambda: seeing.engine.health().active == 0)
    cache.check_integrity()
    seeing.engine.loop.scheduler.slots.check_integrity()
    noted.on_part = lambda: True
    end = seeing.check(second, seeing.ask(second))
    assert end.cached_count >= 10
    cache.check_integrity()


def test_users_who_bring_images_that_are_encoded_are_told_what_each_sees(seeing: Seeing) -> None:
    images = [picture(56, 56, seed) for seed in range(20, 23)]
    for asked in [seeing.ask([image, " first"]) for image in images]:
        asked.end()
    prompts: list[list[Part]] = [["see ", image, " and"] for image in images]
    for parts, asked in [(parts, seeing.ask(parts)) for parts in prompts]:
        seeing.check(parts, asked)


def test_an_image_is_wanted_again_by_one_that_stands_beside_it(seeing: Seeing) -> None:
    """The first is found in the cache, and was forgotten by whoever encodes; the second is new."""
    sight = seeing.engine.loop.model.sight
    assert sight is not None
    first, second = picture(42, 42, 31), picture(84, 42, 32)
    before: list[Part] = ["look ", first, " at"]
    seeing.check(before, seeing.ask(before))
    wait_until(lambda: seeing.engine.health().active == 0)
    for image in sight.kept._images.values():
        image.rows = image.pieces = None
    after: list[Part] = ["look ", first, second, " at"]
    seeing.check(after, seeing.ask(after))


def test_the_same_image_is_encoded_once_and_a_conversation_goes_on(seeing: Seeing) -> None:
    sight = seeing.engine.loop.model.sight
    assert sight is not None
    image = picture(84, 84, 11)
    before = sight.kept.n_encoded
    first: list[Part] = ["now ", image, " hello"]
    seeing.check(first, seeing.ask(first))
    again: list[Part] = ["now ", image, " hello world"]
    end = seeing.check(again, seeing.ask(again))
    assert sight.kept.n_encoded == before + 1
    assert end.cached_count > 3
    other: list[Part] = ["what ", image, " is"]
    seeing.check(other, seeing.ask(other))
    assert sight.kept.n_encoded == before + 1


def test_a_context_that_is_full_lets_whole_images_go(seeing: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever engine reads: the answer goes on, and no image is left in part."""
    shift = Completion.shift
    cuts: list[tuple[list[tuple[int, int]], tuple[int, ...], int]] = []

    def noted(task: Completion) -> Any:
        images = [(at.begin, at.end) for at in task.images]
        removed = shift(task)
        cuts.append((images, removed, len(task.images)))
        return removed

    monkeypatch.setattr(Completion, "shift", noted)
    parts: list[Part] = ["the fox ", picture(42, 42, 31), " and the dog ", picture(84, 84, 32), " in the sun"]
    end = seeing.ask(parts, n_predict=1).end()
    n_prompt = end.prompt_eval_count
    last = seeing.ask(parts, n_predict=40, n_ctx=n_prompt + 8, ignore_eos=True).end()
    assert last.eval_count == 40
    assert cuts
    for images, (low, high, *_), n_left in cuts:
        assert not any(first < edge < behind for first, behind in images for edge in (low, high))
        assert n_left == sum(not low <= first < high for first, _ in images)
    assert cuts[-1][2] < 2, "one of them went"
    seeing.engine.loop.model.cache.check_integrity()


def test_an_image_that_is_none_is_refused_and_the_others_go_on(seeing: Seeing) -> None:
    good = seeing.ask(parts_of("one"))
    broken = CompletionRequest(prompt="see [[0]]", images=[Image(marker="[[0]]", data=b"no image")], n_predict=4)
    with pytest.raises(BadRequest, match="image 1"):
        seeing.engine.submit(broken, lambda _reply: None)
    seeing.check(parts_of("one"), good)


def test_memory_tells_of_the_eyes(seeing: Seeing) -> None:
    report = seeing.engine.loop.model.memory()
    assert sum(device.projector for device in report.devices) > 50_000
    assert np.isfinite(report.host)


@LOOKING
def test_memory_of_what_is_stored_was_measured(seeing: Seeing) -> None:
    model = seeing.engine.loop.model
    seeing.ask(["see ", picture(200, 180, 60), " all"]).end()
    measured, _ = measure(seeing.engine._loader._file, seeing.options)
    known, taken = (sum(device.graph for device in report.devices) for report in (measured, model.memory()))
    # Whoever shifted has turned a few keys besides.
    assert known == pytest.approx(taken, rel=0.02)
    assert model.homes is not None
    assert sum(model.homes.reserve_sizes()) > 0.04 * known


def wav_of(samples: npt.NDArray[np.float32]) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(np.round(samples * 32768).astype("<i2").tobytes())
    return out.getvalue()


def sound(seconds: float, seed: int) -> npt.NDArray[np.float32]:
    """As exact as a file of 16 bits has it."""
    random = np.random.default_rng(seed)
    time = np.arange(round(seconds * 16_000)) / 16_000
    waves = sum(np.sin(2 * np.pi * f * time + p) for f, p in random.uniform(100, 3000, (4, 2)))
    exact: Floats = (np.round(waves / 8 * 32768) / 32768).astype(np.float32)
    return exact


@pytest.mark.parametrize("new_engine", [None, False], ids=["Puna reads", "libllama reads"])
def test_sound_is_heard(new_engine: bool | None, tmp_path: Path) -> None:
    """A word, and more than the half minute that is encoded at once; a picture is refused, and what is no sound."""
    text, projector = write_llama(tmp_path / "text.gguf"), write_listener(tmp_path / "ears.gguf", n_text=256)
    engine = Engine(text, new_engine)
    options = LoadOptions(n_ctx=1024, n_parallel=2, n_threads=1, projector=str(projector))
    assert engine.load(LoadRequest(options=options)).success
    wait_until(lambda: engine.health().status == "ready")
    sampling = SamplingOptions(temperature=0)
    common: dict[str, Any] = {"n_predict": 6, "return_tokens": True, "sampling": sampling}
    with MtmdOracle(text, projector, n_ctx=1024) as judge:
        for seconds in (0.5, 31.0):
            heard = sound(seconds, 3)
            asked = Asked(engine, CompletionRequest(prompt="the [[0]] fox", images=[Image("[[0]]", wav_of(heard))], **common))
            judge.forget()
            theirs = judge.answer(f"the {MARKER} fox", [heard], 6)
            end = asked.end()
            assert end.tokens[-end.eval_count :] == theirs[: end.eval_count]
            assert end.prompt_eval_count > (300 if seconds > 30 else 150)
    for data, says in (
        (png(picture(20, 20)), "does not see"),
        (wav_of(sound(0.5, 1))[:40], "no samples"),
        (b"ID3" + bytes(20), "MP3"),
    ):
        with pytest.raises(BadRequest, match=f"image 1: .*{says}"):
            engine.submit(CompletionRequest(prompt="[[0]]", images=[Image("[[0]]", data)], **common), lambda _reply: None)
    engine.close()


def test_a_model_that_only_sees_does_not_hear(seeing: Seeing) -> None:
    with pytest.raises(BadRequest, match=r"image 1: .*does not hear"):
        seeing.engine.submit(
            CompletionRequest(prompt="[[0]]", images=[Image("[[0]]", wav_of(sound(0.1, 1)))]), lambda _reply: None
        )
