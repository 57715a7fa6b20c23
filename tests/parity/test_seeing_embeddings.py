"""Vectors of images and of texts with images among them, against libmtmd and libllama on the same tiny files."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image as Picture

from puna.errors import BadRequest, ContextOverflow, UnsupportedModel
from puna.model.pooling import Pooling
from puna.wire import EmbeddingReply, Image
from tests.hostile_images import encoded
from tests.mtmd_oracle import MtmdOracle
from tests.parity.test_embeddings import Running
from tests.vision import qwen
from tests.vision.conversation import Part, marked
from tests.vision.encoding import difference, picture
from tests.vision.files import Encoder
from tests.vision.table import FAMILIES

N_CTX = 512


class How(NamedTuple):
    name: str
    worst: float = 1e-3  # normalised
    is_flash: bool = False
    new_engine: bool | None = None


# Flash attention sums in F16, in either engine in another order.
WAYS = [How("puna"), How("flash", 3e-3, is_flash=True), How("libllama", new_engine=False)]
SMALL = {"qwen2vl": (168, 112), "qwen3vl": (192, 128)}
TEXTS = ["hello world", "What is it ", " and the dog ", " why is the sky blue"]


def wired(inputs: Sequence[Sequence[Part]]) -> tuple[list[Any], list[Image]]:
    """Each input as the runner takes it, and the images of all."""
    texts, images = [], list[Image]()
    for parts in inputs:
        text = ""
        for part in parts:
            if isinstance(part, str):
                text += part
            else:
                images.append(Image(marker=f"[one of {len(images)}]", data=encoded("PNG", Picture.fromarray(part))))
                text += images[-1].marker
        texts.append(text)
    return texts, images


@dataclass
class Pair:
    running: Running
    oracle: MtmdOracle
    pooling: Pooling
    pictures: list[npt.NDArray[np.uint8]]  # wide, tall, small
    worst: float

    def ours(self, *inputs: Sequence[Part], **fields: Any) -> npt.NDArray[np.float32]:
        texts, images = wired(inputs)
        return self.running.embed(texts, images=images, normalize=False, **fields).astype(np.float32)

    def theirs(self, *inputs: Sequence[Part]) -> npt.NDArray[np.float32]:
        found = []
        for parts in inputs:
            self.oracle.forget()
            states = self.oracle.hidden_states(self.oracle.chunks(*marked(parts)))
            found.append(states[-1] if self.pooling is Pooling.LAST else states.mean(0))
        return np.stack(found)


KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {  # family of the eyes, what the text is
    "qwen2-vl last": ("qwen2-vl", "qwen2vl", {"pooling_type": 3}),
    "qwen2.5-vl mean": ("qwen2.5-vl", "qwen2vl", {"pooling_type": 1}),
    "qwen3-vl last": ("qwen3-vl", "qwen3vl", {"pooling_type": 3}),
    "qwen3-vl mean": ("qwen3-vl", "qwen3vl", {"pooling_type": 1}),
    "qwen3-vl last, an end token": (
        "qwen3-vl",
        "qwen3vl",
        {"pooling_type": 3, "metadata": {"tokenizer.ggml.add_eos_token": True}},
    ),
}


def files(kind: str, folder: Path) -> tuple[Path, Path]:
    family, architecture, options = KINDS[kind]
    text = qwen.write_text(folder / "text.gguf", architecture, n_ctx=N_CTX, **options)
    encoder: Encoder = FAMILIES[family].encoder()
    return text, encoder.save(folder / "projector.gguf")


@pytest.fixture(scope="module", params=itertools.product(KINDS, WAYS), ids=lambda case: f"{case[0]}, {case[1].name}")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    kind, how = request.param
    text, projector = files(kind, tmp_path_factory.mktemp("seeing"))
    family, architecture, options = KINDS[kind]
    sizes = [*FAMILIES[family].alone[:2], SMALL[architecture]]
    eyes: dict[str, Any] = {"projector": str(projector), "image_cache_bytes": 1 << 26}
    running = Running(text, n_ctx=N_CTX, n_batch=64, new_engine=how.new_engine, flash_attention=how.is_flash, **eyes)
    theirs: dict[str, Any] = {"embeddings": True, "pools": False, "flash_attention": how.is_flash}
    with MtmdOracle(text, projector, n_ctx=N_CTX, **theirs) as oracle:
        yield Pair(running, oracle, Pooling(options["pooling_type"]), [picture(*size) for size in sizes], how.worst)
    running.engine.close()


def test_text_alone(pair: Pair) -> None:
    assert difference(pair.ours([TEXTS[0]]), pair.theirs([TEXTS[0]])) <= pair.worst


def test_an_image_alone(pair: Pair) -> None:
    for one in pair.pictures:
        assert difference(pair.ours([one]), pair.theirs([one])) <= pair.worst


def test_images_between_texts(pair: Pair) -> None:
    wide, tall, small = pair.pictures
    _, begin, middle, end = TEXTS
    prompts: list[list[Part]] = [[begin, wide, end], [begin, tall, middle, small, end], [small, end, small]]
    for parts in prompts:
        assert difference(pair.ours(parts), pair.theirs(parts)) <= pair.worst
    assert difference(pair.theirs([begin, wide, end]), pair.theirs([begin, tall, end])) > 50 * pair.worst


def test_several_inputs_of_one_request(pair: Pair) -> None:
    wide, tall, small = pair.pictures
    inputs: list[list[Part]] = [[wide, TEXTS[1]], [TEXTS[0]], [TEXTS[1], small], [tall], [TEXTS[2], small, TEXTS[3]]]
    found, expected = pair.ours(*inputs), pair.theirs(*inputs)
    for one, other in zip(found, expected, strict=True):
        assert difference(one, other) <= pair.worst


def test_an_image_is_encoded_once_and_given_back(pair: Pair) -> None:
    engine, own = pair.running.engine, picture(96, 96, seed=7)
    before = engine.health().images_encoded
    pair.ours(["a", own], [own, "b"])
    pair.ours([own])
    assert engine.health().images_encoded == before + 1
    assert engine.loop.model.sight is not None
    assert all(image.n_holders == 0 for image in engine.loop.model.sight.kept._images.values())


def test_truncation_leaves_an_image_whole_or_out(pair: Pair) -> None:
    wide, _, small = pair.pictures
    long = " the quick brown fox" * 60
    texts, images = wired([["see ", small, long]])
    reply = pair.running.ask(texts, images=images, n_ctx=100)
    assert isinstance(reply, EmbeddingReply)
    assert (reply.prompt_eval_count, reply.truncated_count > 0) == (100, True)

    texts, images = wired([["see ", small, " or ", wide, long]])
    without, _ = wired([["see ", small, " or "]])
    cut = pair.running.ask(texts, images=images, n_ctx=90)
    alone = pair.running.ask(without, images=images[:1])
    assert isinstance(cut, EmbeddingReply)
    assert isinstance(alone, EmbeddingReply)
    assert cut.prompt_eval_count == alone.prompt_eval_count
    np.testing.assert_allclose(cut.embeddings, alone.embeddings, atol=1e-3)
    with pytest.raises(ContextOverflow):
        pair.running.ask(texts, images=images, n_ctx=90, truncate=False)


def test_an_image_that_is_none_is_named(pair: Pair) -> None:
    good = Image(marker="<1>", data=encoded("PNG", Picture.fromarray(pair.pictures[2])))
    with pytest.raises(BadRequest, match="image 2: "):
        pair.running.ask(["<1>", "<2>"], images=[good, Image(marker="<2>", data=b"GIF89a")])
    assert pair.ours([TEXTS[0]]).shape[0] == 1
    sight = pair.running.engine.loop.model.sight
    assert sight is not None
    assert all(image.n_holders == 0 for image in sight.kept._images.values())


def test_what_has_no_eyes_says_so(tmp_path: Path) -> None:
    text, _ = files("qwen3-vl last", tmp_path)
    running = Running(text, n_ctx=N_CTX)
    with pytest.raises(UnsupportedModel, match="images are not supported: the model has nothing to see with"):
        running.ask(["<1>"], images=[Image(marker="<1>", data=encoded("PNG"))])
    running.engine.close()
