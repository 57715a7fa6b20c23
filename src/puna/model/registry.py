"""Opening a model file with the class that runs its architecture."""

from __future__ import annotations

from importlib import import_module

from puna.engines import ARCHITECTURES as ARCHITECTURES  # the table, where the server can read it as well
from puna.errors import UnsupportedModel
from puna.gguf.reader import GGUFFile
from puna.ml.backend import Backend
from puna.model.model import Model


def open_model(file: GGUFFile, backend: Backend, n_ctx: int) -> Model:
    """Errors: UnsupportedModel naming the architecture and those there are; MissingTensors; FileFormatError."""
    name = file.architecture
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path}: architecture {name!r} is not supported; supported: {', '.join(sorted(ARCHITECTURES))}"
        )
    module, _, cls = ARCHITECTURES[name].partition(":")
    model: Model = getattr(import_module(module), cls)(file, backend, n_ctx)
    return model
