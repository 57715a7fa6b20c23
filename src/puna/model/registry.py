"""Opening a model file with the class that runs its architecture."""

from __future__ import annotations

from importlib import import_module

from puna.engines import ARCHITECTURES as ARCHITECTURES  # the table, where the server can read it as well
from puna.errors import UnsupportedModel
from puna.gguf.reader import GGUFFile
from puna.gguf.watched import WatchedFile
from puna.ml.backend import Backend
from puna.model.leftovers import reason_against
from puna.model.model import Model
from puna.model.pooling import Pooling, can_pool, pooling_of


def open_model(file: GGUFFile, backend: Backend, n_ctx: int) -> Model:
    """All that the file holds and that changes what is computed is used, or the file is refused.

    Errors: UnsupportedModel naming the architecture and those there are, or what of the file would be passed over;
    MissingTensors; FileFormatError.
    """
    name = file.architecture
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path}: architecture {name!r} is not supported; supported: {', '.join(sorted(ARCHITECTURES))}"
        )
    module, _, cls = ARCHITECTURES[name].partition(":")
    watched = WatchedFile(file)
    model: Model = getattr(import_module(module), cls)(watched, backend, n_ctx)
    reason = reason_against(file, watched.metadata.read, backend.taken)
    if reason:
        raise UnsupportedModel(f"{file.path}: {reason}")
    pooling = pooling_of(file)
    if pooling is not Pooling.NONE and not can_pool(model, pooling):
        what = "scores" if pooling is Pooling.RANK else "embeddings"
        raise UnsupportedModel(f"{file.path}: {what} of a {name} model are not supported yet")
    return model
