"""Models that see, the whole way: a server process, real runners, the official clients, and images of all kinds."""

from __future__ import annotations

import base64
import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import ollama
import openai
import psutil
import pytest
from PIL import Image, ImageOps

from puna.tokenizer.tokenizer import Tokenizer
from tests.e2e.test_first_light import Server, serving
from tests.hostile_images import HOSTILE, encoded, noise
from tests.mtmd_oracle import MARKER, MtmdOracle
from tests.patience import PATIENCE_S, wait_until
from tests.processes import children, command_of, is_alive
from tests.vision import gemma3
from tests.vision.scenes import photo, screenshot

SIDE = 14 * 12  # of the tiny model's images: these are not resized
CAT, DOG = encoded("PNG", noise(SIDE, SIDE, 1)), encoded("PNG", noise(SIDE, SIDE, 2))
TEMPLATE = "{{- range .Messages }}{{ .Content }}{{ end }}"
N_TOKENS = 12
GREEDY = {"temperature": 0, "ignore_eos": True, "num_predict": N_TOKENS, "num_ctx": 2048}


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


class Seeing:
    """A server with ``eyes``, of two files, ``one``, the same in one file, and ``blind``, which only reads."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server = server
        self.client = server.client
        encoder = gemma3.encoder()
        self.text = gemma3.write_text(folder / "text.gguf", n_ctx=2048)
        self.projector = encoder.save(folder / "mmproj.gguf")
        self.one = gemma3.save_as_one(encoder, self.text, folder / "one.gguf")
        self._create("eyes", {"text.gguf": self.text, "mmproj.gguf": self.projector})
        self._create("one", {"one.gguf": self.one})
        self._create("blind", {"text.gguf": self.text})

    def _create(self, name: str, files: dict[str, Path]) -> None:
        local = ollama.Client(self.server.url)
        digests = {file: local.create_blob(path) for file, path in files.items()}
        local.create(name, files=digests, template=TEMPLATE)
        local._client.close()

    def ask(self, text: str, images: list[bytes], model: str = "eyes", **fields: Any) -> dict[str, Any]:
        message = {"role": "user", "content": text, "images": [text_of(image) for image in images]}
        body = {"model": model, "messages": [message], "stream": False, "options": GREEDY, **fields}
        response = self.client.post("/api/chat", json=body)
        return {"status": response.status_code, **response.json()}

    def said(self, text: str, images: list[bytes], **fields: Any) -> str:
        reply = self.ask(text, images, **fields)
        assert reply["status"] == 200, reply
        content: str = reply["message"]["content"]
        return content


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    folder = tmp_path_factory.mktemp("seeing")
    with serving(folder, OLLAMA_NUM_PARALLEL="4") as server:
        yield Seeing(server, folder)


def expected(seeing: Seeing, prompt: str, images: list[bytes]) -> str:
    """What libmtmd and libllama, driven by hand, say to it: the likeliest tokens but those that end an answer."""
    tokenizer = Tokenizer(seeing.text)
    ends = sorted(tokenizer.end_tokens)
    pixels = [np.asarray(Image.open(io.BytesIO(image)).convert("RGB")) for image in images]
    with MtmdOracle(seeing.text, seeing.projector, n_ctx=2048) as oracle:
        chunks = oracle.chunks(prompt, pixels)
        row, position = oracle.evaluate(chunks)
        found: list[int] = []
        row = row.copy()
        while True:
            row[ends] = -np.inf
            found.append(int(row.argmax()))
            if len(found) == N_TOKENS:
                break
            row = oracle.decode([found[-1]], [position], [0], [0])[0].copy()
            position += 1
    said = tokenizer.decode(found, special=False)
    tokenizer.close()
    return said


@pytest.mark.parametrize(
    ("content", "prompt", "images"),
    [
        ("[img]what is it", f"\n\n{MARKER}\n\nwhat is it", [CAT]),
        ("look [img] there", f"look \n\n{MARKER}\n\n there", [CAT]),
        ("one [img] two [img] three", f"one \n\n{MARKER}\n\n two \n\n{MARKER}\n\n three", [CAT, DOG]),
        ("again [img] and [img]", f"again \n\n{MARKER}\n\n and \n\n{MARKER}\n\n", [DOG, DOG]),
    ],
    ids=["front", "between", "two", "twice"],
)
@pytest.mark.parametrize("model", ["eyes", "one"])
def test_answers_are_those_of_the_reference(seeing: Seeing, model: str, content: str, prompt: str, images: list[bytes]) -> None:
    assert seeing.said(content, images, model=model) == expected(seeing, prompt, images)


def test_what_is_seen_makes_a_difference(seeing: Seeing) -> None:
    assert len({seeing.said("what is it", [image]) for image in (CAT, DOG, encoded("PNG", noise(SIDE, SIDE, 3)))}) == 3


def as_published(image: bytes) -> bytes:
    """Upright, and resized to what the model sees as its publishers have it: so that libmtmd resizes nothing."""
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(image))).convert("RGB")
    return encoded("PNG", upright.resize((SIDE, SIDE), Image.Resampling.BILINEAR))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "image"), [("png", lambda: CAT), ("png", screenshot), ("jpeg", photo)], ids=["small", "screenshot", "photo"]
)
def test_the_official_clients_send_images(seeing: Seeing, kind: str, image: Callable[[], bytes], stream: bool) -> None:
    """A small one, a screenshot of 2560 x 1440, a phone's photo that is to be turned: all give what the reference does."""
    data = image()
    url = f"data:image/{kind};base64,{text_of(data)}"
    wanted = expected(seeing, f"\n\n{MARKER}\n\nhello", [as_published(data)])
    assert seeing.said("hello", [data]) == wanted

    native = ollama.Client(seeing.server.url)
    message = ollama.Message(role="user", content="hello", images=[ollama.Image(value=data)])
    if stream:
        found = "".join(part.message.content or "" for part in native.chat("eyes", [message], stream=True, options=GREEDY))
    else:
        found = native.chat("eyes", [message], options=GREEDY).message.content or ""
    native._client.close()
    assert found == wanted

    with openai.OpenAI(base_url=f"{seeing.server.url}/v1", api_key="none") as client:
        parts: Any = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "hello"}]
        reply: Any = client.chat.completions.create(
            model="eyes",
            messages=[{"role": "user", "content": parts}],
            temperature=0,
            max_tokens=N_TOKENS,
            stream=stream,
            extra_body={"ignore_eos": True},
        )
        chat = (
            "".join(part.choices[0].delta.content or "" for part in reply if part.choices)
            if stream
            else reply.choices[0].message.content
        )
        assert chat == seeing.said("[img]\n\nhello", [data]), "between parts stands a blank line"
        content: Any = [{"type": "input_text", "text": "hello"}, {"type": "input_image", "image_url": url}]
        made: Any = client.responses.create(
            model="eyes", input=[{"role": "user", "content": content}], temperature=0, max_output_tokens=N_TOKENS, stream=stream
        )
        answer = (
            "".join(event.delta for event in made if event.type == "response.output_text.delta") if stream else made.output_text
        )
        assert answer
        assert wanted.startswith(answer)

    with anthropic.Anthropic(base_url=seeing.server.url, api_key="none") as claude:
        block: Any = {"type": "image", "source": {"type": "base64", "media_type": f"image/{kind}", "data": text_of(data)}}
        asked: Any = {
            "model": "eyes",
            "max_tokens": N_TOKENS,
            "extra_body": {"temperature": 0},
            "messages": [{"role": "user", "content": [block, {"type": "text", "text": "hello"}]}],
        }
        if stream:
            with claude.messages.stream(**asked) as events:
                said = "".join(events.text_stream)
        else:
            said = "".join(block.text for block in claude.messages.create(**asked).content if block.type == "text")
        assert said
        assert wanted.startswith(said)


def test_a_screenshot_and_a_photo_of_a_telephone(seeing: Seeing) -> None:
    """They are what they are whichever way they are stored: turned, or in another format without loss."""
    screen = noise(64, 36).resize((2560, 1440), Image.Resampling.NEAREST)
    assert seeing.said("what", [encoded("PNG", screen)]) == seeing.said("what", [encoded("BMP", screen)])
    photo = noise(40, 30, 5).resize((1600, 1200), Image.Resampling.BICUBIC)
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = photo.transpose(Image.Transpose.ROTATE_90)
    assert seeing.said("what", [encoded("TIFF", turned, exif=exif)]) == seeing.said("what", [encoded("PNG", photo)])
    upright, stored = encoded("JPEG", photo, quality=100), encoded("JPEG", turned, quality=100, exif=exif)
    assert len(seeing.said("what", [upright])) > 0
    assert seeing.ask("what", [stored])["status"] == 200


def test_an_image_is_encoded_once_for_all_who_bring_it(seeing: Seeing) -> None:
    image = encoded("PNG", noise(SIDE, SIDE, 11))
    before = seeing.server.counted("images_encoded_total")
    with ThreadPoolExecutor(8) as pool:
        texts = [f"user {n}: what" for n in range(8)]
        together = list(pool.map(lambda text: seeing.said(text, [image]), texts))
    assert seeing.server.counted("images_encoded_total") == before + 1
    assert together == [seeing.said(text, [image]) for text in texts]
    assert seeing.server.counted("images_encoded_total") == before + 1


def test_users_with_other_images_at_once_are_answered_as_if_alone(seeing: Seeing) -> None:
    images = [encoded("PNG", noise(SIDE, SIDE, 20 + n)) for n in range(6)]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda image: seeing.said("see", [image]), images))
    assert together == [seeing.said("see", [image]) for image in images]


def test_a_conversation_goes_on_behind_its_image(seeing: Seeing) -> None:
    image = encoded("PNG", noise(SIDE, SIDE, 12))
    first = {"role": "user", "content": "what is it", "images": [text_of(image)]}
    body = {"model": "eyes", "stream": False, "options": GREEDY}
    reply = seeing.client.post("/api/chat", json={**body, "messages": [first]}).json()
    before = seeing.server.counted("images_encoded_total"), seeing.server.counted("prompt_tokens_cached_total")
    turns = [first, reply["message"], {"role": "user", "content": "and now"}]
    again = seeing.client.post("/api/chat", json={**body, "messages": turns}).json()
    assert again["message"]["content"]
    assert seeing.server.counted("images_encoded_total") == before[0]
    assert seeing.server.counted("prompt_tokens_cached_total") >= before[1] + reply["prompt_eval_count"]


def test_hostile_images_are_each_a_400_and_everybody_else_goes_on(seeing: Seeing) -> None:
    wanted = seeing.said("steady", [CAT])
    runner = next(runner for runner in seeing.server.runners() if _has_eyes(runner))
    resting = runner.memory_info().rss
    with ThreadPoolExecutor(2) as pool:
        steady = [pool.submit(seeing.said, "steady", [CAT]) for _ in range(20)]
        for name, (make, word) in HOSTILE.items():
            reply = seeing.ask("look", [CAT, make()])
            assert reply["status"] == 400, (name, reply)
            assert "image 2: " in reply["error"], name
            assert word in reply["error"], name
        assert [one.result(PATIENCE_S) for one in steady] == [wanted] * 20
    assert runner.is_running()
    wait_until(lambda: runner.memory_info().rss < resting + (64 << 20))


def _has_eyes(process: psutil.Process) -> bool:
    """It has read images."""
    return any("decode" in command_of(child) for child in children(process))


def test_the_processes_that_read_images_end_with_the_runner(seeing: Seeing) -> None:
    seeing.said("hello", [CAT], model="one")
    before = [child for runner in seeing.server.runners() for child in children(runner)]
    assert before
    for runner in seeing.server.runners():
        runner.kill()
    wait_until(lambda: not any(map(is_alive, before)))
    assert seeing.said("hello", [CAT])


def test_several_answers_to_one_prompt_with_an_image(seeing: Seeing) -> None:
    before = seeing.server.counted("images_encoded_total")
    image = encoded("PNG", noise(SIDE, SIDE, 31))
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text_of(image)}"}}
    body = {"model": "eyes", "n": 3, "max_tokens": 5, "temperature": 0, "messages": [{"role": "user", "content": [part]}]}
    reply = seeing.client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert len({choice["message"]["content"] for choice in reply.json()["choices"]}) == 1
    assert seeing.server.counted("images_encoded_total") == before + 1


def test_a_client_that_leaves_takes_its_image_with_it(seeing: Seeing) -> None:
    image = encoded("PNG", noise(SIDE, SIDE, 32))
    message = {"role": "user", "content": "tell", "images": [text_of(image)]}
    options = {**GREEDY, "num_predict": 2000}
    with seeing.client.stream("POST", "/api/chat", json={"model": "eyes", "messages": [message], "options": options}) as reply:
        next(reply.iter_lines())
    wait_until(lambda: seeing.server.counted("runner_requests_active") == 0)
    assert seeing.said("hello", [CAT])


def test_a_conversation_that_is_too_long_leaves_with_its_images(seeing: Seeing) -> None:
    """Each takes some tokens; the context has room for a few of two hundred."""
    image = text_of(encoded("PNG", noise(SIDE, SIDE, 33)))
    turns: list[dict[str, Any]] = []
    for number in range(120):
        turns += [
            {"role": "user", "content": f"see {number} {'x ' * 10}", "images": [image]},
            {"role": "assistant", "content": "."},
        ]
    body = {"model": "eyes", "messages": [*turns, {"role": "user", "content": "now"}], "stream": False, "options": GREEDY}
    shown = seeing.client.post("/api/chat", json={**body, "_debug_render_only": True}).json()["_debug_info"]
    assert 0 < shown["image_count"] < 120
    assert shown["rendered_template"].count("[img-") == shown["image_count"]
    reply = seeing.client.post("/api/chat", json=body).json()
    assert shown["image_count"] * 9 < reply["prompt_eval_count"] <= 2048


def test_a_model_that_reads_refuses(seeing: Seeing) -> None:
    reply = seeing.ask("hello", [CAT], model="blind")
    assert (reply["status"], reply["error"]) == (400, '"blind" does not support images')
    assert seeing.said("hello", [], model="blind") == seeing.said("hello", [])


def test_what_is_shown_of_eyes(seeing: Seeing) -> None:
    shown = seeing.client.post("/api/show", json={"model": "eyes"}).json()
    assert "vision" in shown["capabilities"]
    assert shown["projector_info"]["clip.projector_type"] == "gemma3"
    assert "vision" in seeing.client.post("/api/show", json={"model": "one"}).json()["capabilities"]
    assert "vision" not in seeing.client.post("/api/show", json={"model": "blind"}).json()["capabilities"]
    seeing.said("hello", [CAT])
    sizes = {model["name"]: model["size"] for model in seeing.client.get("/api/ps").json()["models"]}
    assert sizes["eyes:latest"] > seeing.text.stat().st_size + seeing.projector.stat().st_size


def puna(seeing: Seeing, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    import os

    environ = {**os.environ, "OLLAMA_HOST": seeing.server.url.removeprefix("http://")}
    return subprocess.run(
        [sys.executable, "-m", "puna", *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=environ,
        cwd=folder,
        check=False,
    )


def test_the_command_line(seeing: Seeing, tmp_path: Path) -> None:
    (tmp_path / "my cat.png").write_bytes(CAT)
    (tmp_path / "Modelfile").write_text(
        f"FROM {seeing.text}\nFROM {seeing.projector}\nTEMPLATE {TEMPLATE}\n"
        f"PARAMETER temperature 0\nPARAMETER num_predict {N_TOKENS}\n"
    )
    created = puna(seeing, "create", "made", folder=tmp_path)
    assert created.returncode == 0, created.stderr
    answered = puna(seeing, "run", "made", "what is './my cat.png'", folder=tmp_path)
    assert answered.returncode == 0, answered.stderr
    assert "Added image 'my cat.png'" in answered.stderr
    wanted = seeing.said("what is", [CAT])
    assert wanted.startswith(answered.stdout.strip()[:1])
    assert "Projector" in puna(seeing, "show", "made", folder=tmp_path).stdout
    reading = puna(seeing, "run", "blind", "what is './my cat.png'", folder=tmp_path)
    assert (reading.returncode, "Added image" in reading.stderr) == (0, False)
    files = puna(seeing, "run", str(seeing.text), "--mmproj", str(seeing.projector), "what ./my cat.png", folder=tmp_path)
    assert files.returncode == 0, files.stderr
    assert "Added image" in files.stderr
    missing = puna(seeing, "run", str(seeing.text), "--mmproj", "none.gguf", "what", folder=tmp_path)
    assert (missing.returncode, "no such file" in missing.stderr) == (1, True)
