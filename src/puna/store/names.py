"""Model names: ``[scheme://][host/][namespace/]model[:tag]``.

A Name that exists is valid: every part begins with a letter, a digit or an underscore, so no part can be ``..``, be
absolute or hold a separator, and a path made of the parts stays below the folder it is joined to.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from puna.errors import InvalidName

DEFAULT_HOST = "registry.ollama.ai"
DEFAULT_NAMESPACE = "library"
DEFAULT_TAG = "latest"
SCHEMES = ("https", "http")
MAX_LENGTH = 1024  # longer than any valid name; longer texts are not even looked at

_PARTS = {
    "host": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,349}"),
    "namespace": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,79}"),
    "model": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}"),
    "tag": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}"),
}


@dataclass(frozen=True)
class Name:
    """A checked name with all its parts.

    Errors: InvalidName when a part is outside the grammar.
    """

    model: str
    tag: str = DEFAULT_TAG
    namespace: str = DEFAULT_NAMESPACE
    host: str = DEFAULT_HOST
    scheme: str = "https"

    def __post_init__(self) -> None:
        is_valid = all(pattern.fullmatch(getattr(self, part)) for part, pattern in _PARTS.items())
        if not is_valid or self.scheme not in SCHEMES:
            raise InvalidName("invalid model name")

    @classmethod
    def parse(cls, text: str) -> Name:
        """Read a name as typed; parts that are not given get their defaults, parts given but empty are wrong.

        Errors: InvalidName.
        """
        if len(text) > MAX_LENGTH:
            raise InvalidName("invalid model name")
        parts: dict[str, str] = {}
        scheme, found, rest = text.partition("://")
        if found:
            parts["scheme"] = scheme.lower()
            text = rest
        if text.rfind(":") > text.rfind("/"):
            text, _, parts["tag"] = text.rpartition(":")
        for part in ("model", "namespace"):
            text, found, last = text.rpartition("/")
            parts[part] = last
            if not found:
                return cls(**parts)
        return cls(**parts, host=text)

    @property
    def parts(self) -> tuple[str, str, str, str]:
        """Host, namespace, model and tag: also the path of the manifest."""
        return self.host, self.namespace, self.model, self.tag

    @property
    def display(self) -> str:
        """The shortest form that still shows the tag."""
        if self.host.casefold() != DEFAULT_HOST:
            return self.full
        if self.namespace.casefold() != DEFAULT_NAMESPACE:
            return f"{self.namespace}/{self.model}:{self.tag}"
        return f"{self.model}:{self.tag}"

    @property
    def full(self) -> str:
        """All parts but the scheme."""
        return f"{self.host}/{self.namespace}/{self.model}:{self.tag}"

    def is_same(self, other: Name) -> bool:
        """Whether both name the same model: case does not matter."""
        return self.key == other.key

    @property
    def key(self) -> tuple[str, ...]:
        """Equal for names that differ in case only."""
        return tuple(part.casefold() for part in self.parts)
