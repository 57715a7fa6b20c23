"""Which source a reference means.

``pypi:PACKAGE`` is a GGUF file inside a wheel; a starter's name stands for such a package. There are no others yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from puna.errors import SourceError
from puna.store.disk.claims import Work
from puna.store.disk.config import ModelConfig
from puna.store.folder import ModelFolder, Permit
from puna.store.models.model import StoredModel
from puna.store.names import Name
from puna.store.progress import Report
from puna.store.sources.packages import pypi, starters
from puna.store.sources.source import Source


def is_reference(text: str) -> bool:
    """Whether a text names a source rather than a model."""
    return text.lower().startswith(pypi.PREFIX)


def source_of(text: str) -> Source:
    """Errors: InvalidName."""
    if is_reference(text):
        return pypi.PackageSource(pypi.PackageReference.parse(text))
    name = Name.parse(text)
    starter = next((item for item in starters.STARTERS if Name.parse(item.name).is_same(name)), None)
    if starter is None:
        return _Registry(name)
    return pypi.PackageSource(pypi.PackageReference(starter.package, starter.version))


@dataclass(frozen=True)
class _Registry:
    """What nothing can be pulled from."""

    name: Name

    @property
    def key(self) -> str:
        return "/".join(self.name.key)

    def is_source_of(self, config: ModelConfig) -> bool:
        return False

    def permit(self, name: Name) -> Permit:
        raise self._refusal()

    def known(self, folder: ModelFolder, wanted: Name | None) -> StoredModel | None:
        raise self._refusal()

    def fetch(self, folder: ModelFolder, work: Work, report: Report, wanted: Name | None) -> StoredModel:
        raise self._refusal()

    def _refusal(self) -> SourceError:
        known = ", ".join(starter.name for starter in starters.STARTERS)
        return SourceError(
            f"pull model manifest: file does not exist ({self.name.display} is on a model registry, and Puna cannot pull from "
            f'registries yet; what works now: "{known}", "pypi:PACKAGE" for a Python package that contains a GGUF file, '
            'and "FROM /path/to/model.gguf" in a Modelfile)'
        )
