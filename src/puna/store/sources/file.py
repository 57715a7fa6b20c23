"""A GGUF file where it lies: a model without an import."""

from __future__ import annotations

from pathlib import Path

from puna.errors import FileFormatError, NotFound
from puna.store.disk.config import ModelConfig
from puna.store.models.details import read_details
from puna.store.models.model import StoredModel


def is_path(text: str) -> bool:
    """Whether a text where a model's name is expected is a path: no name begins like one.

    Only GGUF files count, so that nobody can have other files looked into by asking for them as models.
    """
    return (text.startswith("./") or Path(text).is_absolute()) and text.lower().endswith(".gguf")


def open_model(path: str | Path) -> StoredModel:
    """A model named by its path.

    Errors: NotFound; FileFormatError when it is no sound GGUF file, or holds no language model.
    """
    absolute = Path(path).expanduser().absolute()
    details = read_details(absolute)
    if details.kind != "model":
        raise FileFormatError(f"{path} holds no model but a{'n' if details.kind == 'adapter' else ''} {details.kind}")
    try:
        found = absolute.stat()
    except OSError as error:
        raise NotFound(f"{path}: {error.strerror}") from error
    return StoredModel(
        name=str(path),
        full_name=str(absolute),
        digest="",
        n_bytes=found.st_size,
        modified_at=found.st_mtime,
        weights_path=absolute,
        config=ModelConfig(model_format="gguf"),
    )
