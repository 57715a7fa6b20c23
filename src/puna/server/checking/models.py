"""The model of a request, opened in the store, and what a caller may ask of it."""

from __future__ import annotations

import asyncio

from puna.errors import BadRequest, Forbidden, NotFound
from puna.server.http.caller import Caller
from puna.settings import FOREVER
from puna.store.models.details import read_details
from puna.store.models.model import StoredModel
from puna.store.store import Store

MAX_IMAGES = 256  # reading one takes a moment, also of those that a context has no room for
_SENSES = frozenset(("vision", "audio"))  # what files in images' places are for


async def open_model(store: Store, caller: Caller, name: str, projector: str = "") -> StoredModel:
    """A model of the store, or for callers on this machine a GGUF file by its path, which *projector* may lie beside.

    Errors: NotFound; InvalidName; FileFormatError; UnsupportedModel; BadRequest for a projector of what is no file.
    """
    return await asyncio.to_thread(_open, store, name, projector, is_local=caller.is_local)


def _open(store: Store, name: str, projector: str, *, is_local: bool) -> StoredModel:
    if not name:
        raise NotFound("model '' not found")
    is_file = name.startswith(("/", "./")) and name.lower().endswith(".gguf")
    if is_file and not is_local:
        raise NotFound(f"model '{name}' not found: files are served to callers on this machine only")
    if projector and not is_file:
        raise BadRequest("projector: only a model that is a file has another file beside it; others are made of both")
    model = store.from_file(name, projector) if is_file else store.get(name)
    path = model.model_path  # raises for what only stands for a model elsewhere
    if model.file is None:
        read_details(path)  # raises what is wrong with the file
    return model


def check_images(model: StoredModel, name: str, n_images: int) -> None:
    """Errors: BadRequest where there are any and the model does not see, or too many; *name* is what the client calls it."""
    if n_images and not sees(model):
        raise BadRequest(f'"{name}" does not support images')
    if n_images > MAX_IMAGES:
        raise BadRequest(f"{n_images} images are more than the {MAX_IMAGES} that a request may have")


def sees(model: StoredModel) -> bool:
    return not _SENSES.isdisjoint(model.capabilities)


def check_keep_alive(caller: Caller, keep_alive: float | None) -> None:
    """Errors: Forbidden for who asks that a model stays and may not."""
    if keep_alive == FOREVER and not caller.may_manage:
        raise Forbidden("forbidden: keep_alive -1 needs an API key that is good for management")
