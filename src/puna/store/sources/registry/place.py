"""From a model's name to the place that has it: which host, under which path, with whose credentials."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from puna.errors import BadRequest
from puna.store.names import DEFAULT_HOST, Name
from puna.store.sources.elsewhere import Elsewhere

HUBS = frozenset(("hf.co", "huggingface.co"))
_ALIASES = {"docker.io": "registry-1.docker.io", "index.docker.io": "registry-1.docker.io"}


@dataclass(frozen=True)
class Place:
    """One repository of a registry."""

    base: str  # scheme, host and port
    repository: str
    tag: str
    token: str = field(default="", repr=False)  # for this place alone
    is_default: bool = False  # Ollama's own

    @property
    def host(self) -> str:
        return urlsplit(self.base).hostname or ""

    def url(self, path: str) -> str:
        return f"{self.base}/v2/{self.repository}/{path}"


def place_of(name: Name, elsewhere: Elsewhere, *, insecure: bool) -> Place:
    """Where a model is.

    Errors: BadRequest for a name that says http where that is not allowed.
    """
    if name.scheme == "http" and not insecure:
        raise BadRequest("insecure protocol http")
    repository = f"{name.namespace}/{name.model}"
    host = name.host.lower()
    if host in HUBS:
        return Place(elsewhere.hub.rstrip("/"), repository, name.tag, elsewhere.hub_token)
    scheme = "http" if insecure else "https"
    return Place(f"{scheme}://{_ALIASES.get(host, name.host)}", repository, name.tag, is_default=host == DEFAULT_HOST)
