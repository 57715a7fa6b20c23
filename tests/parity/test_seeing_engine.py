"""Every family that sees, through the runner's engine: images as files, several at once, and conversations that go on.

The references are forward passes without a runner, which tests/parity/test_seeing.py compares with libmtmd, and libmtmd itself
where libllama is the engine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Picture

from puna.errors import UnsupportedModel
from puna.runner.engine import Engine
from puna.runner.step.forward import Forward
from puna.vision.model import Pixels
from puna.wire import CompletionReply, CompletionRequest, Done, Image, LoadOptions, LoadRequest, Piece, SamplingOptions
from tests.hostile_images import encoded
from tests.mmproj import write_projector
from tests.mtmd_oracle import MtmdOracle
from tests.patience import PATIENCE_S
from tests.puna_engine import PunaEngine
from tests.tiny import write_llama
from tests.vision import gemma3
from tests.vision.conversation import Part, answered, marked, prompt_of
from tests.vision.encoding import opened_eyes, picture
from tests.vision.files import Encoder, add_tokens
from tests.vision.table import FAMILIES

N_CTX, N_TOKENS = 2048, 10
NEAR_TIE = 5e-3  # of the largest logit


class Running:
    """An engine with a model that sees."""

    def __init__(self, text: Path, projector: str, new_engine: bool | None = None, *, build_ahead: bool = False) -> None:
        self.engine = Engine(text, new_engine)
        options = LoadOptions(n_ctx=N_CTX, projector=projector, image_cache_bytes=1 << 26, n_threads=2, build_ahead=build_ahead)
        self.fitted = self.engine.load(LoadRequest(operation="fit", options=options))
        self.loaded = self.engine.load(LoadRequest(operation="commit", options=options))
        assert self.loaded.success, self.loaded.error
        deadline = time.monotonic() + PATIENCE_S
        while self.engine.health().status == "loading" and time.monotonic() < deadline:
            time.sleep(0.005)
        assert self.engine.health().status == "ready", self.engine.health().error

    def start(self, parts: list[Part], n_predict: int = N_TOKENS) -> Answer:
        images: list[Image] = []
        text = ""
        for part in parts:
            if isinstance(part, str):
                text += part
            else:
                images.append(Image(marker=f"[one of {len(images)}]", data=encoded("PNG", Picture.fromarray(part))))
                text += images[-1].marker
        answer = Answer()
        wire = CompletionRequest(
            prompt=text,
            images=images,
            n_predict=n_predict,
            sampling=SamplingOptions(temperature=0, repeat_penalty=1),
            ignore_eos=True,
            return_tokens=True,
        )
        self.engine.submit(wire, answer.emit)
        return answer

    def ask(self, parts: list[Part], n_predict: int = N_TOKENS) -> Done:
        return self.start(parts, n_predict).wait()

    def tokens(self, parts: list[Part]) -> list[int]:
        return self.ask(parts).tokens[-N_TOKENS:]


@dataclass
class Answer:
    replies: list[CompletionReply] = field(default_factory=list)
    has_ended: threading.Event = field(default_factory=threading.Event)

    def emit(self, reply: CompletionReply) -> None:
        self.replies.append(reply)
        if not isinstance(reply, Piece):
            self.has_ended.set()

    def wait(self) -> Done:
        assert self.has_ended.wait(PATIENCE_S)
        last = self.replies[-1]
        assert isinstance(last, Done), last
        return last


@dataclass(frozen=True)
class Kind:
    write_text: Callable[[Path], Path]
    encoder: Callable[[], Encoder]
    sizes: Sequence[tuple[int, int]]

    def write(self, folder: Path) -> tuple[Path, Path]:
        """The model that reads, and the projector."""
        return self.write_text(folder / "text.gguf"), self.encoder().save(folder / "projector.gguf")

    @property
    def pictures(self) -> list[Pixels]:
        return [picture(*size) for size in self.sizes]


ALL: dict[str, Kind] = {name: Kind(family.write_text, family.encoder, family.alone) for name, family in FAMILIES.items()}


@dataclass
class Seen:
    running: Running
    text: Path
    projector: Path
    pictures: list[Pixels]

    def check(self, found: Sequence[int], parts: list[Part], n: int = N_TOKENS) -> None:
        """An answer is the likeliest, token by token, up to where two tokens are as likely but for the order of sums."""
        with opened_eyes(self.projector, self.text) as eyes, PunaEngine(self.text, n_ctx=N_CTX, n_batch=N_CTX) as puna:
            tokens, rows = answered(puna, prompt_of(eyes, parts), n, sorted(eyes.tokenizer.end_tokens))
        assert len(found) == n
        parting = next((i for i, (one, other) in enumerate(zip(found, tokens, strict=True)) if one != other), None)
        if parting is not None:
            row = rows[parting]
            assert row.max() - row[found[parting]] < NEAR_TIE * np.abs(row[np.isfinite(row)]).max(), (list(found), tokens)


@pytest.fixture(scope="module", params=ALL)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    kind = ALL[request.param]
    text, projector = kind.write(tmp_path_factory.mktemp("seeing"))
    running = Running(text, str(projector))
    assert running.loaded.engine == "puna"
    yield Seen(running, text, projector, kind.pictures)
    running.engine.close()


def test_images_among_texts(seen: Seen) -> None:
    one, two, three = seen.pictures
    prompts: list[list[Part]] = [["What is it ", one, " there"], ["A ", two, " and ", one, " or ", three, " now"]]
    for parts in prompts:
        seen.check(seen.running.tokens(parts), parts)


def test_two_users_with_other_images_at_once_and_one_with_the_same(seen: Seen) -> None:
    one, two, three = seen.pictures
    before = seen.running.engine.health().images_encoded
    others: list[list[Part]] = [["Is this ", one, " red"], ["Where is ", two, " from"], ["A ", three, " and ", one, "?"]]
    answers = [seen.running.start(parts) for parts in others]
    for parts, answer in zip(others, answers, strict=True):
        seen.check(answer.wait().tokens[-N_TOKENS:], parts)
    assert seen.running.engine.health().images_encoded - before <= 3


def test_a_conversation_goes_on_behind_an_image(seen: Seen) -> None:
    one, *_ = seen.pictures
    begun: list[Part] = ["Why is ", one, " so"]
    seen.running.ask(begun)
    before = seen.running.engine.health().images_encoded
    done = seen.running.ask([*begun[:2], " so, and the dog"])
    assert done.cached_count > done.prompt_eval_count // 2
    assert seen.running.engine.health().images_encoded == before
    seen.check(done.tokens[-N_TOKENS:], [*begun[:2], " so, and the dog"])


def test_graphs_that_are_built_ahead_fit_steps_with_images(seen: Seen) -> None:
    one, two, _ = seen.pictures
    ahead = Running(seen.text, str(seen.projector), build_ahead=True)
    prompts: list[list[Part]] = [["Is this ", one, " red"], ["Where is ", two, " from ", one]]
    for parts in prompts:
        seen.check(ahead.ask([*parts, " then"], 30).tokens[-30:], [*parts, " then"], 30)
    forward = ahead.engine.loop.model.forward
    assert isinstance(forward, Forward)
    assert forward.n_used_ahead > 0
    ahead.engine.close()


def test_what_is_measured_is_what_is_taken(seen: Seen) -> None:
    """A projector's weights, and its working memory for the largest image; encoding one takes no more."""
    fitted, loaded = seen.running.fitted.memory, seen.running.loaded.memory
    assert fitted is not None
    assert loaded is not None
    ours, theirs = (sum(device.projector for device in memory.devices) for memory in (fitted, loaded))
    assert theirs > 0
    assert abs(ours - theirs) <= max(ours, theirs) / 10
    seen.running.ask([seen.pictures[0], "x"])
    now = seen.running.engine.loop.model.memory()
    assert sum(device.projector for device in now.devices) == theirs


def write_idefics3(path: Path, n_text: int) -> Path:
    """SigLIP as Gemma 3 has it, whose patches are put together in fours before one matrix."""
    side, cell = 4, 2
    made = gemma3.encoder(side=side, cell=cell)
    made.tensors = {name: values for name, values in made.tensors.items() if not name.startswith("mm.")}
    made.keys |= {"projector_type": "idefics3", "vision.projector.scale_factor": cell, "vision.projection_dim": n_text}
    made.keys |= {"vision.preproc_image_size": 2 * made.keys["vision.image_size"]}
    made.matrix("mm.model.fc.weight", n_text, made.keys["vision.embedding_length"] * cell**2)
    return made.save(path)


TILES = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]


def test_what_only_libmtmd_knows_is_seen_through_it(tmp_path: Path) -> None:
    text = write_llama(tmp_path / "text.gguf", n_ctx=N_CTX)
    poor = Running(text, str(write_idefics3(tmp_path / "of-others.gguf", n_text=256)))
    with pytest.raises(UnsupportedModel, match="vocabulary"):
        poor.start(["What is ", picture(64, 64)])
    poor.engine.close()
    rich = gemma3.write_text(tmp_path / "rich.gguf", n_ctx=N_CTX)  # which has empty lines as tokens
    add_tokens(rich, ["<fake_token_around_image>", "<global-img>", *TILES])
    running = Running(rich, str(write_idefics3(tmp_path / "projector.gguf", n_text=gemma3.N_EMBD_TEXT)))
    assert running.loaded.engine == "puna", "who reads need not be who sees"
    red, wide = picture(64, 64), picture(120, 60)
    alone = [running.tokens(["What is ", pixels, " there"]) for pixels in (red, wide)]
    assert alone[0] != alone[1]
    assert running.engine.health().images_encoded == 2
    answers = [running.start(["What is ", pixels, " there"]) for pixels in (red, wide)]
    assert [answer.wait().tokens[-N_TOKENS:] for answer in answers] == alone
    assert running.engine.health().images_encoded == 2
    running.engine.close()


@pytest.mark.parametrize("name", ["qwen2.5-vl", "llava"])
def test_libllama_sees_what_libmtmd_shows_it(name: str, tmp_path: Path) -> None:
    text, projector = ALL[name].write(tmp_path)
    running = Running(text, str(projector), new_engine=False)
    assert running.loaded.engine == "compat"
    one, two, *_ = ALL[name].pictures
    prompts: list[list[Part]] = [["What is ", one, " there"], ["A ", two, " or ", one, " now"]]
    with MtmdOracle(text, projector, n_ctx=N_CTX) as oracle:
        for parts in prompts:
            oracle.forget()
            assert running.tokens(parts) == oracle.answer(*marked(parts), N_TOKENS)
    assert running.engine.health().images_encoded == 2
    running.engine.close()


def test_a_projector_that_nobody_sees_with_leaves_a_model_that_reads(tmp_path: Path) -> None:
    text = write_llama(tmp_path / "text.gguf", n_ctx=N_CTX)
    running = Running(text, str(write_projector(tmp_path / "projector.gguf", "nobodys", n_text=256)))
    assert running.loaded.engine == "puna"
    assert running.ask(["reads on"]).eval_count == N_TOKENS
    with pytest.raises(UnsupportedModel, match="nobodys"):
        running.start(["What is ", picture(64, 64)])
    running.engine.close()


@pytest.mark.thorough
def test_an_answer_about_an_image_that_is_encoded_begins_sooner(tmp_path: Path) -> None:
    """Layers as wide as those of real encoders, fewer of them."""
    text = gemma3.write_text(tmp_path / "text.gguf", n_ctx=N_CTX)
    wide = gemma3.encoder(n_layers=2, n_embd=1152, n_heads=16, n_ff=4304, patch=14, side=32, cell=4, dtype="f16")
    running = Running(text, str(wide.save(tmp_path / "projector.gguf")))
    firsts: list[float] = []
    agains: list[float] = []
    for seed in range(5):
        pixels = np.random.default_rng(seed).integers(0, 256, (448, 448, 3), np.uint8)
        for words, found in (("A ", firsts), ("Another ", agains)):
            began = time.perf_counter()
            running.ask([words, pixels, " now"], 1)
            found.append(time.perf_counter() - began)
    running.engine.close()
    assert sorted(agains)[2] <= 0.3 * sorted(firsts)[2]
