"""Vectors of images over HTTP: a server, a real runner process, tiny models with eyes and without."""

from __future__ import annotations

import base64
import io
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import openai
import pytest
from PIL import Image

from puna.store.recipe import Recipe
from tests.contract.test_embed_routes import Serving, ok
from tests.hostile_images import HOSTILE, encoded
from tests.mtmd_oracle import MARKER, MtmdOracle
from tests.tiny import write_bert
from tests.vision import qwen
from tests.vision.encoding import difference, picture

WORST = 3e-3  # normalised, with attention that sums in F16
PATHS = ("/api/embed", "/v1/embeddings")
CAT, DOG = (encoded("PNG", Image.fromarray(picture(192, 128, seed=seed))) for seed in (1, 2))


def with_images(text: str, *images: bytes) -> dict[str, Any]:
    return {"prompt_string": text, "multimodal_data": [base64.b64encode(image).decode() for image in images]}


class Seeing(Serving):
    """``eyes``, of two files, and ``one``, the same in one, embed images; ``blind``, without a projector, and ``bert`` do not;
    ``talks`` sees and generates.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.text = qwen.write_text(folder / "text.gguf", "qwen3vl", n_ctx=2048, pooling_type=3)
        encoder = qwen.encoder3()
        self.projector = encoder.save(folder / "mmproj.gguf")
        self._add("one", {"one.gguf": qwen.save3_as_one(encoder, self.text, folder / "one.gguf")})
        talking = qwen.write_text(folder / "talks.gguf", "qwen3vl", n_ctx=2048)
        self._add("eyes", {"text.gguf": self.text, "mmproj.gguf": self.projector})
        self._add("talks", {"text.gguf": talking, "mmproj.gguf": self.projector})
        self._add("blind", {"text.gguf": self.text})
        self._add("bert", {"model.gguf": write_bert(folder / "bert.gguf", n_ctx=64)})

    def _add(self, name: str, files: dict[str, Path]) -> None:
        self.store.create(name, Recipe(files={name: self.store.blobs.import_file(file).digest for name, file in files.items()}))

    def refusal(self, path: str, model: str, *inputs: Any, **fields: Any) -> tuple[int, str]:
        response = self.post(path, {"model": model, "input": [*inputs], **fields})
        error = response.json()["error"]
        return response.status_code, error if isinstance(error, str) else error["message"]

    def vectors(self, path: str, *inputs: Any, model: str = "eyes") -> npt.NDArray[np.float32]:
        body = ok(self.post(path, {"model": model, "input": [*inputs]}))
        return np.array(body["embeddings"] if path == "/api/embed" else [d["embedding"] for d in body["data"]], np.float32)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    server = Seeing(tmp_path_factory.mktemp("server"))
    with server.running():
        yield server


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("model", ["eyes", "one"])
def test_vectors_are_those_of_the_reference(seeing: Seeing, model: str, path: str) -> None:
    prompts = [("is it", []), (MARKER, [CAT]), (f"see {MARKER} and {MARKER} now", [DOG, CAT])]
    inputs = [with_images(text, *images) if images else text for text, images in prompts]
    found = seeing.vectors(path, *inputs, model=model)
    with MtmdOracle(seeing.text, seeing.projector, n_ctx=512, embeddings=True, pools=False) as oracle:
        for vector, (text, images) in zip(found, prompts, strict=True):
            oracle.forget()
            states = oracle.hidden_states(oracle.chunks(text, [np.asarray(Image.open(io.BytesIO(one))) for one in images]))
            assert difference(vector, states[-1] / np.linalg.norm(states[-1])) <= WORST


def test_a_model_says_what_it_embeds(seeing: Seeing) -> None:
    for model, able in {"eyes": ["embedding", "vision"], "one": ["embedding", "vision"], "blind": ["embedding"]}.items():
        assert ok(seeing.post("/api/show", {"model": model}))["capabilities"] == able


def test_one_input_needs_no_list(seeing: Seeing) -> None:
    one = ok(seeing.post("/api/embed", {"model": "eyes", "input": with_images(f"a {MARKER}", CAT), "dimensions": 16}))
    assert np.shape(one["embeddings"]) == (1, 16)
    assert seeing.vectors("/api/embed", {"prompt_string": "a"}) == pytest.approx(seeing.vectors("/api/embed", "a"), abs=1e-5)


def test_the_official_client(seeing: Seeing) -> None:
    with openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="none", max_retries=0) as client:
        given: Any = [with_images(MARKER, DOG), "a text"]
        found = client.embeddings.create(model="eyes", input=given, encoding_format="base64")
    first: Any = found.data[0].embedding
    vector = struct.unpack(f"<{256}f", base64.b64decode(first))
    assert np.allclose(vector, seeing.vectors("/v1/embeddings", with_images(MARKER, DOG))[0], atol=1e-3)
    assert found.usage.prompt_tokens > 24  # an image's rows count


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("model", ["blind", "bert"])
def test_who_does_not_see_says_so(seeing: Seeing, model: str, path: str) -> None:
    assert seeing.refusal(path, model, with_images(MARKER, CAT)) == (400, f'"{model}" does not support images')
    assert seeing.refusal(path, "talks", with_images(MARKER, CAT)) == (501, "this model does not support embeddings")


@pytest.mark.parametrize(
    ("one", "says"),
    [
        (with_images("no place", CAT), "prompt_string has 0 places (<__media__>) for 1 images"),
        (with_images(f"{MARKER} {MARKER}", CAT), "prompt_string has 2 places (<__media__>) for 1 images"),
        ({"prompt_string": "a", "multimodal_data": ["@@"]}, "illegal base64 data"),
        ({"multimodal_data": []}, "prompt_string"),
        (7, "invalid input type"),
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_what_is_no_input_is_refused(seeing: Seeing, path: str, one: Any, says: str) -> None:
    status, error = seeing.refusal(path, "eyes", one)
    assert status == 400
    assert says in error


def test_hostile_images_are_named(seeing: Seeing) -> None:
    before = seeing.vectors("/api/embed", "still there")
    for name, (make, _) in HOSTILE.items():
        status, error = seeing.refusal(
            "/v1/embeddings", "eyes", with_images(MARKER, CAT), "text", with_images(f"a {MARKER}", make())
        )
        assert (status, error.startswith("image 2: ")) == (400, True), (name, error)
    assert np.array_equal(seeing.vectors("/api/embed", "still there"), before)


def test_too_many_and_too_long(seeing: Seeing) -> None:
    many = [with_images(MARKER * 129, *[CAT] * 129)] * 2
    assert seeing.refusal("/api/embed", "eyes", *many)[1] == "258 images are more than the 256 that a request may have"
    text = f"{MARKER} " + "word " * 3000
    assert ok(seeing.post("/api/embed", {"model": "eyes", "input": with_images(text, CAT)}))["truncated_count"] > 0
    status, error = seeing.refusal("/api/embed", "eyes", with_images(text, CAT), truncate=False)
    assert (status, error.startswith("the input length exceeds the context length")) == (400, True)


def test_a_marker_in_a_text_is_text(seeing: Seeing) -> None:
    response: httpx.Response = seeing.post("/api/embed", {"model": "eyes", "input": f"{MARKER} here"})
    assert ok(response)["prompt_eval_count"] > 4
