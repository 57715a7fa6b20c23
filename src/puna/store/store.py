"""The store: the folder of models, with what makes models in it and what fetches them.

Every method may be called from any thread. Knows nothing of HTTP.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from puna.errors import BadRequest, StoreError
from puna.store.disk.blobs import parse_digest, short
from puna.store.disk.claims import Work
from puna.store.disk.manifests import decode
from puna.store.disk.space import storing
from puna.store.folder import ModelFolder
from puna.store.models.model import StoredModel
from puna.store.names import Name
from puna.store.progress import Progress, Report, silent
from puna.store.recipe import Recipe
from puna.store.sources import file
from puna.store.sources.elsewhere import Elsewhere
from puna.store.sources.reference import is_reference, source_of
from puna.store.sources.source import Finished, Ingredients, Source
from puna.store.transfers import Transfers

if TYPE_CHECKING:
    from puna.store.sources.registry.account import Account
    from puna.store.sources.search import Found


class Store(ModelFolder):
    """Models below one folder, usually ``~/.ollama/models``; the folder appears when something is written."""

    def __init__(self, root: Path, *, keep_unused: bool = False, elsewhere: Elsewhere | None = None) -> None:
        super().__init__(root, keep_unused=keep_unused)
        self._elsewhere = elsewhere or Elsewhere()
        self.transfers = Transfers()  # pulls and creations that clients follow

    def find(self, text: str) -> Name | None:
        """As the folder's; a source's reference (``pypi:PACKAGE``) finds the model that was pulled from there."""
        return self._pulled_from(self.source_of(text)) if is_reference(text) else super().find(text)

    def from_file(self, path: str | Path, projector: str | Path = "") -> StoredModel:
        """A GGUF file outside the store as a model named by its path; nothing is copied. *projector*: what it sees with.

        Errors: NotFound; FileFormatError when it is no sound GGUF file or no language model, or the other no projector.
        """
        return file.open_model(path, projector)

    def take(self, text: str, report: Report = silent) -> str:
        """Make a blob of a file on this machine, of which a client is about to make a model; returns its digest.

        No room is used where the file system lets two files share it. A file of this store is not even read.
        Errors: as Blobs.import_file.
        """
        path = Path(text)
        digest = self._own_blob(path)
        if not digest:
            status = f"hashing {path.name}"
            uploads = self.uploads
            digest = uploads.import_file(path, link=True, on_bytes=lambda n, total: report(Progress(status, "", total, n))).digest
        report(Progress("success", digest))
        return digest

    def _own_blob(self, path: Path) -> str:
        """The digest of a file that is one of this store's blobs; empty for others."""
        try:
            digest = parse_digest(path.name)
            is_own = self.blobs.path(digest).samefile(path) and self.expects(digest)
        except (BadRequest, OSError):
            return ""
        return digest if is_own else ""

    def create(self, text: str, recipe: Recipe, report: Report = silent) -> StoredModel:
        """Make a model from another one or from uploaded files; one of that name is replaced.

        Errors: InvalidName; BadRequest, FileFormatError, UnsupportedModel as in puna.store.creating; DiskFull; StoreError.
        """
        from puna.store.creating.create import create  # with all that converts: most servers never create a model

        name = Name.parse(text)
        with storing(self.root), self.work() as work:
            model = create(self, work, name, recipe, report, fetch=lambda base: self.pull(base, report))
        self.take_back([*(recipe.files or {}).values(), *recipe.adapters.values(), *recipe.drafts.values()])
        return model

    def pull(self, reference: str, report: Report = silent, *, name: str = "", insecure: bool = False) -> StoredModel:
        """Fetch a model from its source, and store it under *name* if that is given; *insecure* allows plain HTTP.

        Errors: InvalidName; SourceError; BadRequest when the name belongs to a model from elsewhere; DiskFull; StoreError.
        """
        wanted = Name.parse(name) if name else None
        source = self.source_of(reference, insecure=insecure)
        report(Progress("pulling manifest"))
        with storing(self.root):
            known = source.known(self, wanted)
            if known is not None:
                return self._at_hand(source, known, wanted, report)
            with self.work() as work:
                fetched = source.fetch(self, work, report, wanted)
                if isinstance(fetched, StoredModel):
                    return self._at_hand(source, fetched, wanted, report)
                model = self._made(work, fetched, report)
        report(Progress("success"))
        return model

    def source_of(self, reference: str, *, insecure: bool = False) -> Source:
        """Where a model comes from.

        Errors: InvalidName.
        """
        return source_of(reference, self._elsewhere, insecure=insecure)

    @property
    def account(self) -> Account:
        """Whose models this machine may push."""
        from puna.store.sources.registry.account import Account

        return Account(self._elsewhere)

    def search(self, words: str, host: str, limit: int, *, insecure: bool = False) -> list[Found]:
        """Models elsewhere. Errors: those of puna.store.sources.search."""
        from puna.store.sources.search import search  # with what speaks to registries: few servers are ever asked

        return search(words, self._elsewhere, host=host, limit=limit, insecure=insecure)

    def push(self, text: str, report: Report = silent, *, insecure: bool = False) -> None:
        """Send a model to the registry of its name.

        Errors: NotFound; InvalidName; BadRequest; SourceError; FileFormatError; StoreError.
        """
        from puna.store.sources.registry.push import push

        push(self, text, self._elsewhere, report, insecure=insecure)

    def close(self) -> None:
        """Cancel what is being pulled or created, and keep uploads no longer than others do."""
        self.transfers.close()
        super().close()

    def _made(self, work: Work, fetched: Ingredients | Finished, report: Report) -> StoredModel:
        """The model of what was fetched."""
        report(Progress("writing manifest"))
        if isinstance(fetched, Ingredients):
            from puna.store.creating.create import create

            return create(self, work, fetched.name, fetched.recipe, silent, fetched.permit)
        before = self.digests_of(self.manifests.find(fetched.name))
        manifest = decode(fetched.manifest)
        model = self.opened(self.write_manifest(fetched.name, manifest, work, fetched.permit, content=fetched.manifest))
        if any(not self.blobs.has(digest) for digest in before):
            report(Progress("removing unused layers"))
        return model

    def _at_hand(self, source: Source, model: StoredModel, wanted: Name | None, report: Report) -> StoredModel:
        """A model that is here already, under the name that was wanted."""
        if wanted is not None and not wanted.is_same(Name.parse(model.full_name)):
            self.copy(model.full_name, wanted.full, source.permit(wanted))
            model = self.get(wanted.full)
        for layer in model.manifest.layers if model.manifest else ():
            report(Progress(f"pulling {short(layer.digest)}", layer.digest, layer.size, layer.size))
        report(Progress("success"))
        return model

    def _pulled_from(self, source: Source) -> Name | None:
        found, problems = self.manifests.all()
        name = next((item.name for item in found if source.is_source_of(self.config_of(item.manifest))), None)
        if name is None:
            for problem in problems:
                if isinstance(problem, StoreError):  # it may be that one
                    raise problem
        return name
