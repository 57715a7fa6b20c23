"""What nodes are told of a model: its files and what it is to be loaded with."""

from __future__ import annotations

from pathlib import Path

from puna.cluster.messages import File, Model
from puna.errors import BadRequest, NotFound
from puna.llm.load import LoadRequirements
from puna.server.placing.loaded import Loadable
from puna.store.disk.blobs import parse_digest


def key_of(path: Path) -> str:
    """The same for the same weights on all heads, as far as they are blobs."""
    return _digest(path) or str(path)


def described(model: Loadable, requirements: LoadRequirements, keep_alive: float | None, *, leaves_pinned: bool = False) -> Model:
    """Errors: NotFound when a file is not there."""
    weights, options = model.model_path, requirements.options
    paths = [weights, *(Path(path) for path in [*options.adapters, options.projector] if path)]
    return Model(
        key=key_of(weights),
        name=str(getattr(model, "name", weights.name)),
        files=[_file(path) for path in dict.fromkeys(paths)],
        requirements=requirements,
        digest=str(getattr(model, "digest", "")),
        keep_alive=keep_alive,
        leaves_pinned=leaves_pinned,
    )


def _file(path: Path) -> File:
    try:
        n_bytes = path.stat().st_size
    except OSError as error:
        raise NotFound(f"{path}: {error.strerror}") from error
    return File(path=str(path), n_bytes=n_bytes, digest=_digest(path))


def _digest(path: Path) -> str:
    try:
        return parse_digest(path.name)
    except BadRequest:
        return ""
