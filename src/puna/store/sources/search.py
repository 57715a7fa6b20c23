"""Look for models by words, where a place has a search that programs may use: the hub, and registries that list what they have.

What is found has a name that can be pulled. Knows nothing of terminals.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlencode, urljoin, urlsplit

import msgspec

from puna.errors import BadRequest, InvalidName, SourceError
from puna.store.names import DEFAULT_HOST, Name
from puna.store.sources.elsewhere import Elsewhere
from puna.store.sources.registry.client import Missing, Registry, Unauthorized
from puna.store.sources.registry.identity import Identity
from puna.store.sources.registry.place import HUBS, place_of
from puna.store.sources.web.http import Http
from puna.store.sources.web.retry import persistently

HUB = "hf.co"
MAX_ANSWER_BYTES = 8 << 20
MAX_PAGES = 50  # of a registry's list
PAGE = 500

T = TypeVar("T")


@dataclass(frozen=True)
class Found:
    """A model elsewhere; what the place does not say is None or empty."""

    name: str
    downloads: int | None = None
    likes: int | None = None
    updated_at: str = ""


class _HubModel(msgspec.Struct, rename="camel"):
    id: str
    downloads: int | None = None
    likes: int | None = None
    last_modified: str | None = None


class _Catalog(msgspec.Struct):
    repositories: list[str] | None = None


def search(words: str, elsewhere: Elsewhere, *, host: str = HUB, limit: int = 20, insecure: bool = False) -> list[Found]:
    """Models that *words* fit, what is downloaded most first where that is known.

    Errors: BadRequest when the host offers no search to programs, or is no host; SourceError.
    """
    if host.lower() in HUBS:
        return _on_hub(words, elsewhere, limit)
    if host.lower() == DEFAULT_HOST:
        raise BadRequest(
            f"{DEFAULT_HOST} offers no search to programs: look at https://ollama.com/search, and `puna pull` what you find"
        )
    return _in_registry(words, elsewhere, host, limit, insecure=insecure)


def _on_hub(words: str, elsewhere: Elsewhere, limit: int) -> list[Found]:
    asked = {"search": words, "filter": "gguf", "sort": "downloads", "direction": "-1", "limit": str(limit)}
    url = f"{elsewhere.hub.rstrip('/')}/api/models?{urlencode(asked)}"
    token = {"Authorization": f"Bearer {elsewhere.hub_token}"} if elsewhere.hub_token else {}

    def ask() -> list[_HubModel]:
        with Http(urlsplit(url).hostname or "") as http, http.ask("GET", url, token) as answer:
            if answer.status != 200:
                raise answer.failure()
            return _decoded(answer.read(MAX_ANSWER_BYTES), list[_HubModel], url)

    models = persistently(ask, time.sleep)
    named = [(_named(HUB, model.id), model) for model in models[:limit]]
    return [Found(name, model.downloads, model.likes, model.last_modified or "") for name, model in named if name]


def _in_registry(words: str, elsewhere: Elsewhere, host: str, limit: int, *, insecure: bool) -> list[Found]:
    """Of what a registry lists, that which has all the words in it."""
    try:
        place = place_of(Name(host=host, namespace="x", model="x"), elsewhere, insecure=insecure)
    except InvalidName as error:
        raise BadRequest(f"{host[:100]!r} is no host of a registry") from error
    wanted = words.lower().split()
    with Http(place.host) as http:
        registry = Registry(http, place, Identity(elsewhere.key_path))
        try:
            names = [name for name in _listed(registry) if all(word in name.lower() for word in wanted)]
        except (Missing, Unauthorized) as error:
            raise BadRequest(f"{host} offers no search: it does not list what it has ({error})") from error
    return [Found(name) for repository in sorted(names) if (name := _named(host, repository))][:limit]


def _listed(registry: Registry) -> Iterator[str]:
    """All repositories, page by page as the registry gives them."""
    url = f"{registry.place.base}/v2/_catalog?n={PAGE}"
    for _ in range(MAX_PAGES):
        page, following = persistently(_page(registry, url), time.sleep)
        yield from page
        if not following:
            return
        url = urljoin(url, following)


def _page(registry: Registry, url: str) -> Callable[[], tuple[list[str], str]]:
    def ask() -> tuple[list[str], str]:
        with registry.ask("GET", url) as answer:
            if answer.status == 405:
                raise Missing("405")
            if answer.status != 200:
                raise registry.failure(answer)
            found = _decoded(answer.read(MAX_ANSWER_BYTES), _Catalog, url)
            link = answer.headers.get("link", "")
            is_more = 'rel="next"' in link and link.startswith("<") and ">" in link
            return found.repositories or [], link[1 : link.index(">")] if is_more else ""

    return ask


def _decoded(content: bytes, kind: type[T], url: str) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SourceError(f"{urlsplit(url).netloc} answered a search with something else than models: {error}") from error


def _named(host: str, repository: str) -> str:
    """What to pull; nothing for what no name can be made of."""
    try:
        name = Name.parse(f"{host}/{repository}")
    except InvalidName:
        return ""
    return f"{name.host}/{name.namespace}/{name.model}" if repository.count("/") == 1 else ""
