"""A GGUF file where it lies: a model without an import."""

from __future__ import annotations

import os
import re
from pathlib import Path

from puna.errors import BadRequest, FileFormatError, NotFound, StoreError, UnsupportedModel
from puna.store.disk.config import ModelConfig
from puna.store.disk.files import is_absent, open_regular
from puna.store.models.details import FileDetails, read_details
from puna.store.models.model import StoredModel

_HEAD_BYTES = 9
_PROJECTOR = re.compile(r".*mmproj.*\.gguf", re.IGNORECASE)
_TYPES = {"F16": 0, "BF16": 1, "F32": 2}  # of a projector, the best first
_MOST_BESIDE = 32
MAX_SAFETENSORS_HEAD = 100 << 20


def is_path(text: str) -> bool:
    """Whether a text where a model's name is expected is a path: no name begins like one.

    Only GGUF files count, so that nobody can have other files looked into by asking for them as models.
    """
    return (text.startswith("./") or Path(text).is_absolute()) and text.lower().endswith(".gguf")


def check_takeable(text: str) -> None:
    """See that a path leads to what may be a file of a model, so that nobody can have other files looked into.

    Errors: BadRequest; NotFound; StoreError when it cannot be read.
    """
    path = Path(text)
    if not path.is_absolute():
        raise BadRequest("the path of a file must be absolute")
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        if is_absent(path, error):
            raise NotFound(f"no such file: {path}") from error
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error
    except FileFormatError as error:
        raise BadRequest(str(error)) from error
    n_header = int.from_bytes(head[:8], "little")
    is_safetensors = path.suffix == ".safetensors" and head[8:9] == b"{" and n_header < MAX_SAFETENSORS_HEAD
    if not head.startswith(b"GGUF") and not is_safetensors:
        raise BadRequest(f"{path.name} is neither a GGUF file nor one of safetensors")


def _projector_beside(path: Path, model: FileDetails) -> Path | None:
    """A projector for the model in its folder, as programs that download both leave it: an ``mmproj`` of the model's width, of
    several the one in F16.
    """
    if model.has_vision or model.has_pooling:
        return None
    try:
        named = sorted(found for found in path.parent.iterdir() if _PROJECTOR.fullmatch(found.name))
    except OSError:
        return None
    fitting = [found for found in named[:_MOST_BESIDE] if _fits(found, model)]
    return min(fitting, key=lambda found: _TYPES.get(read_details(found).file_type, len(_TYPES)), default=None)


def _fits(path: Path, model: FileDetails) -> bool:
    try:
        found = read_details(path)
    except (FileFormatError, NotFound, StoreError):
        return False  # nobody asked for it
    return found.kind == "projector" and found.projection_length in (0, model.embedding_length)


def open_model(path: str | Path, projector: str | Path = "") -> StoredModel:
    """A model named by its path. *projector* is a file that it sees with; where none is named, one that lies beside it.

    Errors: NotFound; FileFormatError when it is no sound GGUF file, or holds no language model, or the other no projector;
    UnsupportedModel for a part of a model.
    """
    absolute = Path(path).expanduser().absolute()
    details = read_details(absolute)
    if details.kind != "model":
        raise FileFormatError(f"{path} holds no model but a{'n' if details.kind == 'adapter' else ''} {details.kind}")
    if details.n_splits > 1:
        raise UnsupportedModel(f"{path} is one of {details.n_splits} files of a model: `puna create` with FROM makes one of them")
    eyes = Path(projector).expanduser().absolute() if projector else _projector_beside(absolute, details)
    if projector and eyes is not None and read_details(eyes).kind != "projector":
        raise FileFormatError(f"{projector} holds no projector but a {read_details(eyes).kind}")
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
        projector_paths=(eyes,) if eyes else (),
        config=ModelConfig(model_format="gguf"),
    )
