"""Looking for models on a hub and in registries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from puna.errors import BadRequest, SourceError
from puna.store.sources.elsewhere import Elsewhere
from puna.store.sources.search import search
from puna.store.sources.web import retry
from tests.registries import Registry


@pytest.fixture
def registry() -> Iterator[Registry]:
    with Registry().running() as running:
        for name in ("ann/Tiny-GGUF", "bob/Large-GGUF", "ann/tiny-chat-GGUF", "bob/other"):
            running.manifests[name, "latest"] = b"{}"
        yield running


@pytest.fixture
def elsewhere(registry: Registry, tmp_path: Path) -> Elsewhere:
    return Elsewhere(hub=f"http://{registry.netloc}", hub_token="hf_secret", key_path=tmp_path / "id_ed25519")


def test_the_hub_is_asked_for_files_that_run_here(registry: Registry, elsewhere: Elsewhere) -> None:
    found = search("tiny", elsewhere, limit=5)
    assert [model.name for model in found] == ["hf.co/ann/Tiny-GGUF", "hf.co/ann/tiny-chat-GGUF"]
    assert (found[0].downloads, found[0].likes, found[0].updated_at) == (1234567, 3, "2026-08-22T12:00:00.000Z")
    assert registry.searches == [
        {"search": "tiny", "filter": "gguf", "sort": "downloads", "direction": "-1", "limit": "5"},
    ]
    assert registry.host.credentials == ["Bearer hf_secret"]


def test_a_registry_that_lists_what_it_has_is_searched_page_by_page(registry: Registry, elsewhere: Elsewhere) -> None:
    def names(words: str, limit: int = 20) -> list[str]:
        return [model.name for model in search(words, elsewhere, host=registry.netloc, limit=limit, insecure=True)]

    here = registry.netloc
    assert names("gguf") == [f"{here}/ann/Tiny-GGUF", f"{here}/ann/tiny-chat-GGUF", f"{here}/bob/Large-GGUF"]
    assert names("gguf tiny") == [f"{here}/ann/Tiny-GGUF", f"{here}/ann/tiny-chat-GGUF"]
    assert names("gguf", 1) == [f"{here}/ann/Tiny-GGUF"]
    assert names("nothing-like-it") == []
    assert "Bearer hf_secret" not in registry.host.credentials


def test_places_without_a_search_say_so(registry: Registry, elsewhere: Elsewhere) -> None:
    with pytest.raises(
        BadRequest, match=r"registry\.ollama\.ai offers no search to programs: look at https://ollama\.com/search"
    ):
        search("x", elsewhere, host="registry.ollama.ai")
    registry.lists = False
    with pytest.raises(BadRequest, match="offers no search: it does not list what it has"):
        search("x", elsewhere, host=registry.netloc, insecure=True)
    with pytest.raises(BadRequest, match="no host of a registry"):
        search("x", elsewhere, host="no/host")


def test_what_is_no_answer_is_an_error(elsewhere: Elsewhere, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "BASE_S", 0.001)
    monkeypatch.setattr(registry, "_hub_search", lambda request: request.reply(200, b"<html>"))
    with pytest.raises(SourceError, match="something else than models"):
        search("x", elsewhere)
    monkeypatch.setattr(registry, "_hub_search", lambda request: request.reply(503, b"later"))
    with pytest.raises(SourceError, match=r"max retries exceeded: .* answered 503: later"):
        search("x", elsewhere)


def test_names_that_could_not_be_pulled_are_left_out(registry: Registry, elsewhere: Elsewhere) -> None:
    for name in ("gpt2-gguf", "a/b/c-gguf", "ann/../x-gguf"):
        registry.manifests[name, "latest"] = b"{}"
    for host in ("hf.co", registry.netloc):
        names = [model.name for model in search("gguf", elsewhere, host=host, insecure=True)]
        assert len(names) == 3
        assert all(name.count("/") == 2 for name in names)
