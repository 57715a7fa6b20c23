"""Paths of images in what a person enters."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from tests.hostile_images import encoded
from tests.unit.api.fake_server import FakeServer
from tests.unit.cli.conftest import Cli
from tests.unit.cli.pty_driver import terminal

from puna.cli import image_paths
from puna.cli.image_paths import has_path, taken_out
from puna.errors import BadRequest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("cat.png", "my dog (1).jpeg", "a.b.webp", "it's.PNG"):
        (tmp_path / name).write_bytes(encoded("PNG"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_what_is_entered(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = {
        "what is ./cat.png": ("what is", 1),
        f"{folder}/cat.png what is it?": ("what is it?", 1),
        "~/cat.png": ("", 1),
        f"compare '{folder}/cat.png' and \"{folder}/my dog (1).jpeg\" now": ("compare  and  now", 2),
        f"see {folder}/my\\ dog\\ \\(1\\).jpeg there": ("see  there", 1),
        f"see {folder}/my dog (1).jpeg there": ("see  there", 1),
        "./a.b.webp": ("", 1),
        "./it\\'s.PNG": ("", 1),
        "./cat.png ./cat.png": ("", 2),
        "cat.png": ("cat.png", 0),
        "./none.png and /etc/hostname": ("./none.png and /etc/hostname", 0),
        "http://host/cat.png": ("http://host/cat.png", 0),
        "1/2 of ./cat.pngx": ("1/2 of ./cat.pngx", 0),
        "either/or ./cat.png!": ("either/or !", 1),
        "": ("", 0),
    }
    for text, (left, n) in cases.items():
        found = taken_out(text)
        assert (found.text, len(found.images)) == (left, n), text
        assert n == 0 or has_path(text)
        assert capsys.readouterr().err.count("Added image '") == n
    assert base64.b64decode(taken_out("./cat.png").images[0]) == encoded("PNG")


def test_a_file_that_only_claims_to_be_an_image(folder: Path) -> None:
    (folder / "text.png").write_text("no picture")
    with pytest.raises(BadRequest, match=r"text\.png' is none"):
        taken_out("./text.png")


def test_a_file_that_is_too_large(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_paths, "MAX_BYTES", 10)
    with pytest.raises(BadRequest, match="larger than"):
        taken_out("./cat.png")


def test_a_text_of_nothing_but_slashes_takes_no_time() -> None:
    text = "./a.png " * 100_000
    assert taken_out(text).text == text


def test_a_model_that_sees_gets_the_images_of_a_prompt(puna: Cli, fake: FakeServer, folder: Path) -> None:
    done = puna("run", "eyes", "what is ./cat.png")
    assert (done.returncode, "Added image" in done.stderr) == (0, True)
    request = fake.bodies("/api/generate")[-1]
    assert request["prompt"] == "what is"
    assert base64.b64decode(request["images"][0]) == encoded("PNG")
    puna("run", "eyes", "./cat.png")
    assert fake.bodies("/api/generate")[-1]["prompt"] == "[img]"
    puna("run", "echo", "what is ./cat.png")
    request = fake.bodies("/api/generate")[-1]
    assert (request["prompt"], request.get("images")) == ("what is ./cat.png", None)


def test_what_is_not_asked_about_images_asks_nothing_more(puna: Cli, fake: FakeServer) -> None:
    puna("run", "eyes", "what is 1/2 of it")
    assert [path for path, _ in fake.requests] == ["/api/generate"]


def test_a_file_beside_the_model_s(puna: Cli, fake: FakeServer, folder: Path) -> None:
    (folder / "eyes.gguf").write_bytes(b"GGUF")
    assert puna("run", "echo", "--mmproj", "./eyes.gguf", "what ./cat.png").returncode == 0
    request = fake.bodies("/api/generate")[-1]
    assert (request["projector"], len(request["images"])) == (str(folder / "eyes.gguf"), 1)
    missing = puna("run", "echo", "--mmproj", "./none.gguf", "what")
    assert (missing.returncode, "no such file: ./none.gguf" in missing.stderr) == (1, True)


def test_an_image_in_the_session(fake: FakeServer, environment: dict[str, str], folder: Path) -> None:
    env = {**environment, "OLLAMA_HOST": fake.address.url}
    with terminal("run", "eyes", env=env, cwd=folder) as screen:
        screen.wait_for(">>> ")
        screen.send("what is './cat.png'\r")
        screen.wait_for("You said: what is")
    message = fake.bodies("/api/chat")[-1]["messages"][-1]
    assert message["content"] == "what is"
    assert base64.b64decode(message["images"][0]) == encoded("PNG")
