"""From a Modelfile to a request that creates a model.

The files that the Modelfile names are hashed, sent to the server unless it has them, and referred to by digest.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from puna.api.client import Client
from puna.cli.progress import Display
from puna.errors import BadRequest, NotFound, PunaError
from puna.store.disk.blobs import short
from puna.store.models import modelfile as modelfiles
from puna.store.models.modelfile import Modelfile

DEFAULT_FILE = "Modelfile"
_CHUNK_BYTES = 1 << 20
_WEIGHTS = (
    "model*.safetensors",
    "adapter_model*.safetensors",
    "consolidated*.safetensors",
    "pytorch_model*.bin",
    "consolidated*.pth",
    "*.gguf",
    "*.bin",
)
_COMPANIONS = ("*.json", "*/*.json", "[0-9]_*/model.safetensors", "tokenizer.model", "vocab.txt", "chat_template.jinja")

_PART = re.compile(r"(.+)-[0-9]{5}-of-[0-9]{5}\.gguf", re.IGNORECASE)

Files = dict[str, Path]  # by the name the server shall know


def read(file: str) -> tuple[Modelfile, Path]:
    """The Modelfile, and the folder that its paths are relative to."""
    if file == "-":
        return modelfiles.parse(modelfiles.decode(sys.stdin.buffer.read())), Path.cwd()
    path = Path(file).expanduser()
    if path.is_dir():
        raise BadRequest(f"{file} is a folder: a Modelfile with FROM {file} makes a model of it")
    if path.exists():
        with path.open("rb") as opened:  # a pipe, too: what a shell makes of <(...)
            content = opened.read(modelfiles.MAX_CHARACTERS + 1)
        return modelfiles.parse(modelfiles.decode(content)), path.resolve().parent if path.is_file() else Path.cwd()
    if file != DEFAULT_FILE:
        raise NotFound(f"no such file: {file}")
    return modelfiles.parse("FROM ."), Path.cwd()


def build(model: str, parsed: Modelfile, folder: Path) -> tuple[dict[str, Any], Files, Files, Files]:
    """The request without its files, the files of the model, those of its adapters, and those of its draft."""
    paths, names = [], []
    for value in parsed.values("from"):
        if path := _existing(value, folder):
            paths.append(path)
        else:
            names.append(value)
    files = files_of(paths)
    if files and names:
        raise BadRequest(f"FROM {names[0]}: no such file, and a model cannot be combined with files")
    adapters: Files = {}
    for value in parsed.values("adapter"):
        adapters |= _beside(_files_of("ADAPTER", value, folder), adapters)
    draft = parsed.last("draft")
    drafts = _files_of("DRAFT", draft, folder) if draft else {}
    fields: dict[str, Any] = {
        "from": names[-1] if names else "",
        "template": parsed.last("template"),
        "system": parsed.last("system"),
        "renderer": parsed.last("renderer"),
        "parser": parsed.last("parser"),
        "requires": parsed.requires,
        "license": parsed.values("license"),
        "parameters": parsed.parameters,
        "messages": parsed.messages,
    }
    request = {"model": model, **{key: value for key, value in fields.items() if value}}
    return request, files, adapters, drafts


def files_of(paths: Iterable[Path]) -> Files:
    """All files of what makes up one model: files of weights, and folders."""
    files: Files = {}
    for path in paths:
        found = _files_at(path)
        files |= _beside(found, files) if files.keys() & found.keys() else found
    return files


def _files_of(keyword: str, value: str, folder: Path) -> Files:
    """What an instruction names that takes no model's name."""
    path = _existing(value, folder)
    if path is None:
        raise NotFound(f"{keyword} {value}: no such file")
    return _files_at(path)


def _beside(files: Files, others: Files) -> Files:
    """Files that come together, in a folder of their own where others have come already."""
    return {f"{len(others)}/{name}": path for name, path in files.items()} if others else files


def upload(client: Client, paths: Files, shown: Display) -> dict[str, str]:
    """Make sure that the server has the files, and return their digests."""
    return {name: _upload(client, path, shown) for name, path in paths.items()}


def _existing(value: str, folder: Path) -> Path | None:
    """The file or folder that *value* names, or None when it can be a model's name.

    Errors: NotFound when it can only be a path.
    """
    path = folder / Path(value).expanduser()
    if path.exists():
        return path.resolve()
    if value.startswith(("./", "../", "/", "~")) or value.lower().endswith((".gguf", ".safetensors", ".bin")):
        raise NotFound(f"no such file: {path}")
    return None


def _files_at(path: Path) -> Files:
    """One file under its own name, or those files of a folder that make up a model.

    Errors: NotFound when a folder holds none; BadRequest when a link in it leads out of it.
    """
    if path.is_file():
        return {part.name: part for part in _parts_of(path)}
    for pattern in _WEIGHTS:
        weights = sorted(path.glob(pattern))
        if weights:
            break
    else:
        raise NotFound(f"no Modelfile or safetensors files found in {path}")
    companions = [] if weights[0].suffix == ".gguf" else [found for name in _COMPANIONS for found in sorted(path.glob(name))]
    chosen = {found.relative_to(path).as_posix(): found.resolve() for found in [*weights, *companions]}
    for name, found in chosen.items():
        if not found.is_relative_to(path):
            raise BadRequest(f"insecure path: {name} leads out of {path}")
    return chosen


def _parts_of(path: Path) -> list[Path]:
    """A file, with the others that a large model was cut into if it is one of them."""
    part = _PART.fullmatch(path.name)
    if part is None:
        return [path]
    return sorted(found for found in path.parent.iterdir() if (other := _PART.fullmatch(found.name)) and other[1] == part[1])


def _upload(client: Client, path: Path, shown: Display) -> str:
    total = path.stat().st_size
    if client.is_here and (taken := _taken(client, path, shown)):
        return taken
    digest = _digest(path, total, shown)
    if not client.has_blob(digest):
        status = f"copying file {short(digest)}"
        shown.update(status, 0, total)
        client.upload_blob(digest, path, lambda n_sent: shown.update(status, n_sent, total))
    return digest


def _taken(client: Client, path: Path, shown: Display) -> str:
    """The digest of a file that the server took where it lies; empty where it does not, and has to be sent it."""
    digest = ""
    try:
        for event in client.take_file(path):
            digest = str(event.get("digest", ""))
            if total := int(event.get("total") or 0):
                shown.update(str(event.get("status", "")), int(event.get("completed") or 0), total)
    except PunaError:  # it may run elsewhere in truth, or may not read what is ours, or is another program
        return ""
    return digest


def _digest(path: Path, total: int, shown: Display) -> str:
    """Hash a file, with progress: big models take a while."""
    sha256, n_done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            sha256.update(chunk)
            n_done += len(chunk)
            shown.update(f"hashing {path.name}", n_done, total)
    return f"sha256:{sha256.hexdigest()}"
