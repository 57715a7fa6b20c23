"""What a place that models come from must be able to do, and what it gives: blobs in the folder, and a recipe.

Knows not how a model is made of a recipe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from puna.store.disk.claims import Work
from puna.store.disk.config import ModelConfig
from puna.store.folder import ModelFolder, Permit
from puna.store.models.model import StoredModel
from puna.store.names import Name
from puna.store.progress import Report
from puna.store.recipe import Recipe


@dataclass(frozen=True)
class Ingredients:
    """What was fetched: the recipe's blobs are in the folder, claimed by the work that brought them."""

    name: Name  # what the model is to be called
    recipe: Recipe
    permit: Permit


@dataclass(frozen=True)
class Finished:
    """What was fetched is a model as it is: all blobs of its manifest are in the folder, claimed by the work."""

    name: Name
    manifest: bytes  # its exact bytes, so that it is the same model here as there
    permit: Permit


Fetched = Ingredients | Finished | StoredModel
"""A model that was here already is the third case."""


class Source(Protocol):
    """One model at one place outside the folder."""

    @property
    def key(self) -> str:
        """Equal for sources of the same thing."""
        ...

    def is_source_of(self, config: ModelConfig) -> bool:
        """Whether a model with this configuration came from here."""
        ...

    def permit(self, name: Name) -> Permit:
        """Objects to giving that name to the model when another one has it that did not come from here."""
        ...

    def known(self, folder: ModelFolder, wanted: Name | None) -> StoredModel | None:
        """The model when it is here and nobody need be asked; *wanted* is the name it shall have, if not the source's own.

        Errors: BadRequest when another model has that name; SourceError when there can be no such model.
        """
        ...

    def fetch(self, folder: ModelFolder, work: Work, report: Report, wanted: Name | None) -> Fetched:
        """Fetch what the model is made of, or see that it is here already.

        Errors: SourceError; FileFormatError when what came is no sound model; DiskFull; StoreError.
        """
        ...
