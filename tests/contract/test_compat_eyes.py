"""What libllama's models see through libmtmd in the compatibility engine, against both driven by hand on the same files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from puna.compat import trial
from puna.compat.eyes import LlamaEyes
from puna.compat.trial import Facts, tried
from puna.errors import BadRequest, LoadError, PunaError, UnsupportedModel
from puna.kvcache.cache import resume_point
from puna.tokenizer.tokenizer import Tokenizer
from puna.vision.model import Prepared
from tests.compat_engine import CompatEngine
from tests.mmproj import write_listener, write_projector
from tests.models.dialect import Translation
from tests.mtmd_oracle import MtmdOracle
from tests.tiny import write_gemma3, write_llama
from tests.vision import conversation, gemma3, qwen
from tests.vision.conversation import Prompt, marked, prompt_of
from tests.vision.encoding import picture

Floats = npt.NDArray[np.float32]

ENERGY, WORST = 1e-3, 1e-2


@dataclass(frozen=True)
class Kind:
    text: Callable[[Path], Path]
    projector: Callable[[Path], Path]
    both_ways: bool = False
    has_axes: bool = False


KINDS = {
    "a clip and an mlp": Kind(
        write_llama, lambda p: write_projector(p, "mlp", n_text=256, class_token=True, pre_norm=True, post_norm=False)
    ),
    "gemma 3": Kind(gemma3.write_text, lambda p: gemma3.encoder().save(p), both_ways=True),
    # Not Pixtral's: libmtmd makes the rows that end lines from memory that it never sets; now and then they are no numbers.
    "qwen 2.5-vl": Kind(partial(qwen.write_text, architecture="qwen2vl"), lambda p: qwen.encoder25().save(p), has_axes=True),
    "qwen 3-vl": Kind(partial(qwen.write_text, architecture="qwen3vl"), lambda p: qwen.encoder3().save(p), has_axes=True),
}


class Engine(CompatEngine):
    """Asked for no row, it gives none; the runner asks for one always."""

    def decode(self, *given: Any, **options: Any) -> Floats:
        tokens, positions, sequences, outputs = given
        return super().decode(tokens, positions, sequences, outputs or [len(tokens) - 1], **options)[: len(outputs)]


class Eyes:
    """As tests.vision.encoding has it."""

    def __init__(self, path: Path, engine: CompatEngine, facts: Facts) -> None:
        self.model = LlamaEyes(Path(engine.model.file.path), path, facts)
        self.model.open(2)
        self.tokenizer = Tokenizer(engine.model.file.path)

    def numbered(self, prepared: Prepared) -> Floats:
        found = [self.model.run(piece, None, 0, 1) for piece in prepared.pieces]
        return np.concatenate([rows[0] for rows in found if rows])

    def close(self) -> None:
        self.model.close()
        self.tokenizer.close()


@dataclass
class Pair:
    kind: Kind
    engine: Any
    eyes: Any
    oracle: MtmdOracle
    facts: Facts

    def forget(self) -> None:
        self.engine.forget()
        self.oracle.forget()

    def prompt(self, *parts: Any) -> Prompt:
        return prompt_of(self.eyes, parts)

    def judged(self, *parts: Any, sequence: int = 0) -> Floats:
        return self.oracle.evaluate(self.oracle.chunks(*marked(parts)), sequence=sequence)[0]


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    kind, folder = KINDS[request.param], tmp_path_factory.mktemp("eyes")
    text, projector = kind.text(folder / "text.gguf"), kind.projector(folder / "mmproj.gguf")
    limits: dict[str, Any] = {"n_ctx": 1024, "n_sequences": 3, "n_batch": 512}
    with Engine(text, **limits) as engine, MtmdOracle(text, projector, **limits) as oracle:
        facts = tried(text, projector)
        eyes = Eyes(projector, engine, facts)
        yield Pair(kind, engine, eyes, oracle, facts)
        eyes.close()


@pytest.fixture
def fresh(pair: Pair) -> Pair:
    pair.forget()
    return pair


def compare(ours: Floats, theirs: Floats) -> None:
    assert np.isfinite(theirs).all()
    error = ours - theirs
    assert (error**2).sum() / (theirs**2).sum() <= ENERGY
    worst = np.abs(error).max()
    assert worst / np.abs(theirs).max() <= WORST
    assert theirs[ours.argmax()] >= theirs.max() - 2 * worst


def test_a_trial_tells_what_a_projector_gives(pair: Pair) -> None:
    facts = pair.facts
    assert (facts.sees, facts.hears, facts.n_out) == (True, False, pair.oracle.n_out)
    assert facts.has_axes == pair.kind.has_axes == pair.engine.model.has_axes
    n_rows, n_tokens = pair.eyes.model.size(*facts.largest)
    assert (n_rows, n_tokens) == (facts.n_rows, facts.n_tokens)
    assert facts.n_together == (n_rows if pair.kind.both_ways else 1)
    assert facts.working_bytes > 0


SIZES = [(56, 56), (168, 168), (200, 90), (64, 300), (1, 1), (1000, 5)]


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_sizes_are_known_before_anything_is_computed(pair: Pair, width: int, height: int) -> None:
    pixels = picture(width, height)
    prepared = pair.eyes.model.prepare(pixels)
    assert pair.eyes.model.size(width, height) == (prepared.n_rows, len(prepared.placed.tokens))
    rows = pair.eyes.numbered(pair.eyes.model.prepare(pixels))
    assert rows.shape == (prepared.n_rows, pair.eyes.model.n_out)
    assert np.array_equal(rows, pair.oracle.encoded(pixels))


CASES: dict[str, list[Any]] = {
    "one image": ["the fox ", (168, 168), " and the dog"],
    "an image first": ["", (200, 90), " is what"],
    "two": ["see ", (56, 56), " then ", (64, 300), " there"],
    "the same twice": ["", (56, 56), (56, 56), " and so on"],
    "text alone": ["the quick brown fox jumps"],
}


def parts_of(case: str) -> list[Any]:
    return [part if isinstance(part, str) else picture(*part) for part in CASES[case]]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n_batch", [0, 7])
def test_prompts_with_images(case: str, n_batch: int, fresh: Pair) -> None:
    parts = parts_of(case)
    if n_batch and fresh.kind.both_ways:
        n_batch = 0  # what sees each other is computed at once
    prompt = fresh.prompt(*parts)
    seen, axes, n_positions = conversation.placed_by_libmtmd(fresh.oracle, parts)
    assert prompt.seen == seen
    assert prompt.n_positions == n_positions
    if fresh.kind.has_axes:
        assert np.array_equal(np.concatenate(prompt.axes, 1), axes)
    compare(conversation.computed(fresh.engine, [prompt], n_batch=n_batch)[0], fresh.judged(*parts))
    fresh.engine.cache.check_integrity()


@pytest.mark.parametrize("case", CASES)
def test_answers_go_on_as_libllama_s(case: str, fresh: Pair) -> None:
    parts = parts_of(case)
    answer, rows = conversation.answered(fresh.engine, fresh.prompt(*parts), 8)
    text, images = marked(parts)
    theirs = fresh.oracle.answer(text, images, 8)
    for i, (ours, judged) in enumerate(zip(answer, theirs, strict=True)):
        if ours != judged:  # only where both are nearly as likely
            assert rows[i][judged] >= rows[i].max() - 2 * WORST * np.abs(rows[i]).max()
            break


def test_users_with_different_images_at_once(fresh: Pair) -> None:
    """In one batch: two with an image each, and one with none."""
    prompts: list[list[Any]] = [["the fox ", picture(168, 168), " and"], ["so ", picture(56, 56, 1), " it is"], ["hello world"]]
    ours = conversation.computed(fresh.engine, [fresh.prompt(*parts) for parts in prompts])
    for i, parts in enumerate(prompts):
        compare(ours[i], fresh.judged(*parts, sequence=i))
    fresh.engine.cache.check_integrity()


def test_a_conversation_goes_on_after_its_image(fresh: Pair) -> None:
    """What follows the image is forgotten and computed anew, here and in a copy."""
    image = picture(168, 168)
    before = fresh.prompt("the fox ", image, " and the dog sleep")
    after: list[Any] = ["the fox ", image, " in the sun"]
    conversation.computed(fresh.engine, [before])
    whole = fresh.prompt(*after)
    n_kept = len(fresh.prompt("the fox ", image).tokens)
    cache = fresh.engine.cache
    assert resume_point(cache, 0, n_kept) == n_kept
    cache.remove(0, n_kept)
    cache.copy_prefix(0, 1, n_kept)
    axes = np.concatenate(whole.axes, 1)[:, n_kept:] if fresh.kind.has_axes else None
    n = len(whole.tokens)
    for sequence in (0, 1):
        place = range(n_kept, n)
        ours = fresh.engine.decode(whole.tokens[n_kept:], place, [sequence] * len(place), [n - n_kept - 1], axes=axes)
        compare(ours[0], fresh.judged(*after, sequence=sequence))
    assert cache.length(0) == cache.length(1) == n


def test_an_image_is_not_gone_back_into(fresh: Pair) -> None:
    """Where its tokens share a position, a sequence goes on before it or after it."""
    prompt = fresh.prompt("the fox ", picture(168, 168), " and")
    conversation.computed(fresh.engine, [prompt])
    first = prompt.rows.index(0)
    if fresh.kind.has_axes:
        assert resume_point(fresh.engine.cache, 0, first + 2) == 0
    assert resume_point(fresh.engine.cache, 0, first) == first
    fresh.engine.cache.remove(0, first)
    assert fresh.engine.cache.length(0) == first
    fresh.engine.cache.check_integrity()


def test_batches_that_do_not_fit_are_refused(fresh: Pair) -> None:
    width = fresh.eyes.model.n_out
    for given in (([0], np.zeros((1, width - 1))), ([0, 0], np.zeros((2, width))), ([4], np.zeros((1, width)))):
        with pytest.raises(PunaError, match="embeddings"):
            fresh.engine.decode([1, 2, 3, 4], range(4), [0] * 4, [3], embedded=given)
    with pytest.raises(PunaError, match="both ways"):
        fresh.engine.decode([1, 2, 3, 4], range(4), [0] * 4, [3], embedded=([1], np.zeros((1, width))), bidirectional=[(1, 3)])
    with pytest.raises(PunaError, match="positions of shape"):
        fresh.engine.decode([1, 2, 3, 4], range(4), [0] * 4, [3], axes=np.zeros((4, 3)))
    assert fresh.engine.cache.length(0) == 0


def test_sides_that_differ_too_much_are_refused(pair: Pair) -> None:
    for width, height in ((201, 1), (1, 201), (0, 5)):
        with pytest.raises(BadRequest, match="image"):
            pair.eyes.model.size(width, height)


def without(name: str) -> Callable[[Translation], object]:
    return lambda file: file.tensors.pop(name)


def narrower(file: Translation) -> None:
    shape, kind, data = file.tensors["v.blk.1.ln1.weight"]
    file.tensors["v.blk.1.ln1.weight"] = (shape[0] - 1,), kind, data[:-4]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without("v.patch_embd.weight"), "dies"),
        (without("v.blk.1.attn_q.weight"), "dies"),
        (narrower, "dies"),
        (without("v.blk.1.attn_out.weight"), r"v\.blk\.1\.attn_out"),
        (without("mm.soft_emb_norm.weight"), "soft_emb_norm"),
    ],
)
def test_projectors_that_libmtmd_refuses_or_dies_of(change: Callable[[Translation], object], says: str, tmp_path: Path) -> None:
    text = write_gemma3(tmp_path / "text.gguf")
    options: dict[str, Any] = {"n_text": 128, "metadata": {"clip.vision.projector.scale_factor": 2}}
    file = Translation(write_projector(tmp_path / "sound.gguf", "gemma3", **options))
    change(file)
    broken = file.save(tmp_path / "broken.gguf", "clip")
    with pytest.raises(PunaError, match=says) as refused:
        tried(text, broken)
    assert str(broken) in str(refused.value)


def test_a_projector_that_hears(tmp_path: Path) -> None:
    text = write_llama(tmp_path / "text.gguf")
    facts = tried(text, write_listener(tmp_path / "ears.gguf", n_text=256))
    assert (facts.sees, facts.hears, facts.sample_rate, facts.n_out) == (False, True, 16_000, 256)
    with pytest.raises(UnsupportedModel, match=r"clip\.cpp:\d+: Invalid number of output tokens"):
        tried(text, write_listener(tmp_path / "other.gguf", n_text=256, n_stacked=8))


def test_a_projector_for_another_model(tmp_path: Path) -> None:
    text = write_llama(tmp_path / "llama.gguf")
    with pytest.raises(UnsupportedModel, match="rows have 128 values, this model takes 256"):
        tried(text, write_projector(tmp_path / "p.gguf", "mlp", n_text=128))
    with pytest.raises(UnsupportedModel, match=str(text)):
        tried(text, text)


def test_a_trial_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "TIMEOUT_S", 0.2)
    with pytest.raises(LoadError, match="busy"):
        trial.run("a", "b", (sys.executable, "-c", "import time; time.sleep(60)"))
