"""Files by their address, and the hub: what is asked for, with whose token, and what becomes of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from puna.errors import BadRequest, InvalidName, SourceError
from puna.store.names import Name
from puna.store.recipe import Recipe
from puna.store.sources.elsewhere import Elsewhere
from puna.store.sources.web import download, retry
from puna.store.store import Store
from tests.registries import Handler, Host, Registry
from tests.splitting import split
from tests.unit.store.test_registry import write_large


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "BASE_S", 0.001)
    monkeypatch.setattr(download, "MIN_PART_BYTES", 100_000)


class Web:
    """One file, which the first address redirects to."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.version = '"v1"'
        self.sha256 = ""
        self.n_bytes_sent = 0
        self.n_until_break = 1 << 40
        self.first = Host(self._redirect)
        self.files = Host(self._send)

    @property
    def url(self) -> str:
        return f"http://{self.first.netloc}/some/where/Tiny-Q4_K_M.gguf?download=true"

    def _redirect(self, request: Handler) -> None:
        linked: dict[str, Any] = {"x_linked_etag": f'"{self.sha256}"'} if self.sha256 else {}
        request.reply(302, location=f"http://{self.files.netloc}/{hashlib.sha256(request.path.encode()).hexdigest()}", **linked)

    def _send(self, request: Handler) -> None:
        begin, _, end = request.headers["Range"].removeprefix("bytes=").partition("-")
        part = self.content[int(begin) : int(end) + 1]
        request.send_response(206)
        request.send_header("content-length", str(len(part)))
        request.send_header("content-range", f"bytes {begin}-{int(begin) + len(part) - 1}/{len(self.content)}")
        request.send_header("etag", self.version)
        request.end_headers()
        part = part[: max(0, self.n_until_break - self.n_bytes_sent)]
        self.n_bytes_sent += len(part)
        request.wfile.write(part)
        if self.n_bytes_sent >= self.n_until_break:
            request.drop()


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Web]:
    web = Web(write_large(tmp_path / "tiny.gguf", 3).read_bytes())
    with web.first.running(), web.files.running():
        yield web


@pytest.fixture
def store(tmp_path: Path, web: Web) -> Store:
    hub = Elsewhere(hub=f"http://{web.first.netloc}", hub_token="hf_secret", key_path=tmp_path / "key")
    return Store(tmp_path / "models", elsewhere=hub)


def test_a_file_becomes_a_model(web: Web, store: Store) -> None:
    model = store.pull(web.url, insecure=True)
    assert (model.name, model.model_path.read_bytes()) == ("tiny-q4_k_m:latest", web.content)
    assert store.get(web.url).name == model.name
    n_before = web.n_bytes_sent
    store.pull(web.url, insecure=True)
    assert web.n_bytes_sent - n_before < 10, "it is the same file still"
    web.version, web.content = '"v2"', web.content[:-4] + b"\0\0\0\0"
    assert store.pull(web.url, insecure=True).model_path.read_bytes() == web.content
    assert len(list(store.blobs)) == 2  # weights and configuration
    assert store.pull(web.url, insecure=True, name="mine").name == "mine:latest"


def test_the_hubs_token_stays_with_the_hub(web: Web, store: Store) -> None:
    store.pull(web.url, insecure=True)
    assert set(web.first.credentials) == {"Bearer hf_secret"}
    assert web.files.credentials == []
    with Registry(needs_token=False).running() as other:
        with pytest.raises(SourceError):
            store.pull(f"http://{other.netloc}/x/y.gguf", insecure=True)
        assert (other.host.credentials, len(other.host.seen)) == ([], 1)


def test_what_the_hub_says_of_a_file_is_held_against_it(web: Web, store: Store) -> None:
    web.sha256 = "1" * 64
    with pytest.raises(SourceError, match="digest mismatch, file must be downloaded again: want sha256:1111"):
        store.pull(web.url, insecure=True)
    assert not list(store.blobs)
    web.sha256 = hashlib.sha256(web.content).hexdigest()
    assert store.pull(web.url, insecure=True).model_path.read_bytes() == web.content


def test_a_file_that_breaks_off_is_taken_up(web: Web, store: Store) -> None:
    web.n_until_break = 300_000
    with pytest.raises(SourceError, match="max retries exceeded"):
        store.pull(web.url, insecure=True)
    web.n_until_break = 1 << 40
    assert store.pull(web.url, insecure=True).model_path.read_bytes() == web.content
    assert web.n_bytes_sent < 2 * len(web.content) - 100_000


def test_another_file_under_the_same_address_begins_anew(web: Web, store: Store) -> None:
    """No bytes of the one end up in the other."""
    web.n_until_break = 300_000
    with pytest.raises(SourceError):
        store.pull(web.url, insecure=True)
    web.n_until_break, web.version = 1 << 40, '"v2"'
    web.content = web.content[:200_000] + bytes(len(web.content) - 200_000)
    assert store.pull(web.url, insecure=True).model_path.read_bytes() == web.content


def test_addresses_that_are_refused(web: Web, store: Store) -> None:
    with pytest.raises(BadRequest, match="insecure protocol http"):
        store.pull(web.url)
    for text in ("https://user:secret@host.example/x.gguf", "https:///x.gguf", "https://host.example/a b.gguf"):
        with pytest.raises(InvalidName):
            store.pull(text)
    assert not web.first.seen
    store.create("tiny-q4_k_m", Recipe(files={"m.gguf": store.blobs.add(web.content).digest}, system="mine"))
    with pytest.raises(BadRequest, match="there is a model tiny-q4_k_m:latest already"):
        store.pull(web.url, insecure=True)
    assert store.get("tiny-q4_k_m").system == "mine"


def test_the_hubs_registry_is_asked_with_the_hubs_token(store: Store, tmp_path: Path) -> None:
    """``hf.co/user/repo:quantisation``, and the object store that has the blobs gets no token."""
    there = Store(tmp_path / "there")
    blob = there.blobs.import_file(write_large(tmp_path / "m.gguf"))
    there.create("m", Recipe(files={"m.gguf": blob.digest}))
    with Registry().running() as hub:
        manifest = hub.add(there, "m", "ann/Tiny-GGUF:Q4_K_M")
        hub.tokens.add("hf_secret")
        here = Store(tmp_path / "here", elsewhere=Elsewhere(hub=f"http://{hub.netloc}", hub_token="hf_secret"))
        model = here.pull("hf.co/ann/Tiny-GGUF:Q4_K_M")
        assert here.manifests.content(Name.parse(model.full_name)) == manifest
        assert model.name == "hf.co/ann/Tiny-GGUF:Q4_K_M"
        assert set(hub.host.credentials) == {"Bearer hf_secret"}
        assert hub.storage.credentials == []


def test_all_files_that_a_model_was_cut_into_are_fetched_and_joined(tmp_path: Path, store: Store) -> None:
    whole = write_large(tmp_path / "big.gguf", 5)
    served = {path.name: path.read_bytes() for path in split(whole, 2, tmp_path / "parts")}

    def answer(request: Handler) -> None:
        content = served.get(request.path.rpartition("/")[2])
        if content is None:
            request.reply(404)
            return
        begin, _, end = request.headers["Range"].removeprefix("bytes=").partition("-")
        part = content[int(begin) : int(end) + 1]
        span = f"bytes {begin}-{int(begin) + len(part) - 1}/{len(content)}"
        request.reply(206, part, content_range=span, etag='"1"')

    host = Host(answer)
    with host.running():
        url = f"http://{host.netloc}/ann/big-00001-of-00002.gguf"
        model = store.pull(url, insecure=True)
        assert model.name == "big:latest"
        assert model.model_path.read_bytes() == whole.read_bytes()
        n_before = len(host.seen)
        store.pull(url, insecure=True)
        assert len(host.seen) - n_before == 2, "each part is looked at, and is the same still"
        del served["big-00002-of-00002.gguf"]
        with pytest.raises(SourceError, match=r"big-00002-of-00002\.gguf: file does not exist"):
            Store(tmp_path / "fresh").pull(url, insecure=True)
