"""A Modelfile sent as text, as the page does: read here, once for all clients, into the fields that a request may also have.

What it names must be known to the server: files of the client's machine are for ``puna create``, which sends them.
"""

from __future__ import annotations

from typing import Any

from puna.api.models import CreateRequest
from puna.errors import BadRequest, FileFormatError
from puna.store.models import modelfile

_PATHS = ("./", "../", "/", "~")
_FILES = (".gguf", ".safetensors", ".bin")


def with_modelfile(body: CreateRequest) -> CreateRequest:
    """The request with what its Modelfile says; what has a field of its own counts more.

    Errors: BadRequest.
    """
    if not body.modelfile:
        return body
    fields = _fields(body.modelfile)
    return body.model_copy(update={name: value for name, value in fields.items() if value and not getattr(body, name)})


def _fields(text: str) -> dict[str, Any]:
    if len(text) > modelfile.MAX_CHARACTERS:
        raise BadRequest(f"Modelfile: larger than {modelfile.MAX_CHARACTERS} characters")
    try:
        parsed = modelfile.parse(text)
    except FileFormatError as error:
        raise BadRequest(f"Modelfile: {error}") from error
    for keyword in ("adapter", "draft"):
        if value := parsed.last(keyword):
            raise BadRequest(f"{keyword.upper()} {value}: a Modelfile that is sent as text can name no files; use puna create")
    base = parsed.last("from")
    if base.startswith(_PATHS) or base.lower().endswith(_FILES) or len(parsed.values("from")) > 1:
        raise BadRequest(f"FROM {base}: a Modelfile that is sent as text begins with a stored model; use puna create for files")
    return {
        "base": base,
        "template": parsed.last("template"),
        "system": parsed.last("system"),
        "renderer": parsed.last("renderer"),
        "parser": parsed.last("parser"),
        "requires": parsed.requires,
        "license": parsed.values("license"),
        "parameters": parsed.parameters,
        "messages": parsed.messages,
    }
