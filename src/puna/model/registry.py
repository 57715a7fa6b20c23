"""Architectures that the engine runs, by the name that files state in general.architecture."""

from __future__ import annotations

from importlib import import_module

from puna.errors import UnsupportedModel
from puna.gguf.reader import GGUFFile
from puna.ml.backend import Backend
from puna.model.model import Model

ARCHITECTURES: dict[str, str] = {
    "bert": "puna.model.arch.bert:Bert",
    "gemma2": "puna.model.arch.gemma2:Gemma2",
    "gemma3": "puna.model.arch.gemma3:Gemma3",
    "llama": "puna.model.arch.llama:Llama",
    "nomic-bert": "puna.model.arch.nomic_bert:NomicBert",
}


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
