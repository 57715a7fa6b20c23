"""Which source a reference means.

``pypi:PACKAGE`` is a GGUF file inside a wheel, and a starter's name stands for such a package; the address of a GGUF file is
that file. Every other name is a model of the registry that it names.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from puna.store.names import Name
from puna.store.sources.elsewhere import Elsewhere
from puna.store.sources.packages import pypi, starters
from puna.store.sources.source import Source


def is_file_address(text: str) -> bool:
    """Whether a text is the address of a GGUF file; a model's name with its scheme in front is none."""
    return text.lower().startswith(("https://", "http://")) and urlsplit(text).path.lower().endswith(".gguf")


def is_reference(text: str) -> bool:
    """Whether a text names a source rather than a model."""
    return text.lower().startswith(pypi.PREFIX) or is_file_address(text)


def source_of(text: str, elsewhere: Elsewhere, *, insecure: bool = False) -> Source:
    """Errors: InvalidName."""
    if text.lower().startswith(pypi.PREFIX):
        return pypi.PackageSource(pypi.PackageReference.parse(text))
    if is_file_address(text):
        from puna.store.sources.url import FileSource  # with the client of HTTP: servers start without it

        return FileSource.parse(text, elsewhere, insecure=insecure)
    name = Name.parse(text)
    starter = next((item for item in starters.STARTERS if Name.parse(item.name).is_same(name)), None)
    if starter is None:
        from puna.store.sources.registry.pull import RegistrySource

        return RegistrySource(name, elsewhere, insecure)
    return pypi.PackageSource(pypi.PackageReference(starter.package, starter.version))
