"""What libmtmd encodes and what cross attention looks at, the whole way: a server process with real runners.

Projectors that Puna has no encoder for, sound, and Llama 3.2 Vision.
"""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ollama
import openai
import pytest
from PIL import Image

from tests.e2e.test_first_light import Server, serving
from tests.hostile_images import encoded, noise
from tests.mmproj import write_listener, write_projector
from tests.models.mllama import write_eyes, write_mllama
from tests.tiny import write_llama

TEMPLATE = "{{- range .Messages }}{{ .Content }}{{ end }}"
GREEDY = {"temperature": 0, "ignore_eos": True, "num_predict": 8, "num_ctx": 1024}
CAT, DOG = encoded("PNG", noise(84, 84, 1)), encoded("PNG", noise(200, 90, 2))

OTHERS = [encoded("PNG", Image.fromarray(np.full((84, 84, 3), colour, np.uint8))) for colour in ((255, 0, 0), (0, 0, 90), 255)]


def sound(seconds: float, seed: int) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        time = np.arange(round(seconds * 16_000)) / 16_000
        file.writeframes((9000 * np.sin(2 * np.pi * 300 * seed * time)).astype("<i2").tobytes())
    return out.getvalue()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("senses")
    text = write_llama(folder / "text.gguf")
    files: dict[str, list[Path]] = {
        "janus": [text, write_projector(folder / "janus.gguf", "janus_pro", n_text=256, image_size=84)],
        "ears": [text, write_listener(folder / "ears.gguf", n_text=256)],
        "one": [write_mllama(folder / "one.gguf", n_silent=1)],
        "two": [write_mllama(folder / "two.gguf", n_silent=1, eyes=False), write_eyes(folder / "eyes.gguf")],
    }
    with serving(folder, OLLAMA_NUM_PARALLEL="2") as running:
        local = ollama.Client(running.url)
        for name, paths in files.items():
            digests = {path.name: local.create_blob(path) for path in paths}
            local.create(name, files=digests, template=TEMPLATE)
        local._client.close()
        yield running


def ask(server: Server, model: str, text: str, media: list[bytes]) -> dict[str, Any]:
    message = {"role": "user", "content": text, "images": [base64.b64encode(data).decode() for data in media]}
    response = server.client.post("/api/chat", json={"model": model, "messages": [message], "stream": False, "options": GREEDY})
    return {"status": response.status_code, **response.json()}


@pytest.mark.parametrize(("model", "can"), [("janus", {"vision"}), ("ears", {"audio"}), ("one", {"vision"}), ("two", {"vision"})])
def test_what_a_model_is_for_is_shown(server: Server, model: str, can: set[str]) -> None:
    shown = server.client.post("/api/show", json={"model": model}).json()
    assert set(shown["capabilities"]) & {"vision", "audio"} == can


@pytest.mark.parametrize("model", ["janus", "one", "two"])
def test_images_change_what_is_said_and_are_counted(server: Server, model: str) -> None:
    replies = [ask(server, model, "what is it", media) for media in ([], [CAT], [DOG], *([image] for image in OTHERS))]
    assert {reply["status"] for reply in replies} == {200}, replies
    said = [reply["message"]["content"] for reply in replies]
    assert said[0] not in said[1:]
    assert len(set(said)) > 2
    assert replies[1]["prompt_eval_count"] > replies[0]["prompt_eval_count"]
    assert ask(server, model, "what is it", [CAT])["message"]["content"] == said[1]


def test_both_forms_of_llama_vision_say_the_same(server: Server) -> None:
    for media in ([CAT], [CAT, DOG]):
        said = [ask(server, model, "what is it", media)["message"]["content"] for model in ("one", "two")]
        assert said[0] == said[1]


def test_sound_is_heard_in_either_api(server: Server) -> None:
    data = sound(0.6, 1)
    native = ask(server, "ears", "who is it", [data])
    assert native["status"] == 200, native
    assert native["prompt_eval_count"] > 300
    others = [ask(server, "ears", "who is it", [sound(0.6, seed)])["message"]["content"] for seed in range(2, 8)]
    assert set(others) != {native["message"]["content"]}
    part: Any = {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        reply = client.chat.completions.create(
            model="ears",
            messages=[{"role": "user", "content": [part, {"type": "text", "text": "who is it"}]}],
            temperature=0,
            max_tokens=8,
        )
    assert (reply.choices[0].message.content or "") in native["message"]["content"]


def test_what_a_model_cannot_take_is_refused_by_its_number(server: Server) -> None:
    for model, media, says in (
        ("janus", [CAT, sound(0.1, 1)], "image 2: it is sound, and the model does not hear"),
        ("one", [sound(0.1, 1)], "image 1: it is sound, and the model does not hear"),
        ("ears", [CAT], "image 1: the model hears, and does not see"),
        ("ears", [b"ID3" + bytes(50)], "image 1: sound in MP3 is not read"),
        ("ears", [sound(0.1, 1)[:30]], "image 1: "),
        ("one", [b"nothing"], "image 1: "),
    ):
        reply = ask(server, model, "what", media)
        assert (reply["status"], says in reply["error"]) == (400, True), reply
    assert ask(server, "one", "what is it", [CAT])["status"] == 200
