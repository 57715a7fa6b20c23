"""Why libllama refused a file, from what it said: its functions only return nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence

from puna.engines import WHERE_LISTED
from puna.errors import BadRequest, FileFormatError, LoadError, MissingTensors, OutOfMemory, PunaError, UnsupportedModel
from puna.native.log import Line

_UNKNOWN = re.compile(r"unknown model architecture: '([^'\n]*)'")
_MISSING = re.compile(r"missing tensor '(?P<a>[^'\n]*)'|tensor '(?P<b>[^'\n]*)' not found")
_MEMORY = re.compile(r"failed to allocate|unable to allocate|out of memory|failed to reserve|bad_alloc", re.IGNORECASE)
_MALFORMED = re.compile(r"tensor '[^'\n]*' has wrong shape.*|key not found in model: .*|wrong number of tensors.*")
_CACHE_TYPE = re.compile(r"([KV] cache type .{1,100} does not divide .*|quantized V cache requires flash_attn.*)")
_PREFIX = re.compile(r"^\w+: (error loading model: )?")

# Of projectors.
_NO_TENSOR = re.compile(r"unable to find tensor (\S+)")
_OTHER_WIDTH = re.compile(r"mismatch between text model \(n_embd = (\d+)\) and mmproj \(n_embd = (\d+)\)")
_NO_PROJECTOR = re.compile(r"unknown projector type: (\S+)")

# Lines that follow a failure and only say that there was one.
_ECHOES = ("failed to load model", "failed to initialize the context", "llama_model_load_from_file_impl")


def why(path: str, lines: Sequence[Line]) -> PunaError:
    """The error that these lines of the log stand for."""
    complaints = [line.text for line in lines if line.is_complaint]
    text = "\n".join(complaints)
    if found := _UNKNOWN.search(text):
        return UnsupportedModel(f"{path}: no engine runs the architecture {found[1]!r}, libllama neither; {WHERE_LISTED}")
    if found := _MISSING.search(text):
        return MissingTensors([found["a"] or found["b"]])
    if found := _MALFORMED.search(text):
        return FileFormatError(f"{path}: {re.sub(' +', ' ', found[0])}")
    if found := _CACHE_TYPE.search(text):
        return BadRequest(f"{path}: {found[1]}")
    if _MEMORY.search(text):
        return OutOfMemory(f"{path}: {_last(complaints)}")
    return LoadError(f"libllama cannot load {path}: {_last(complaints)}")


def why_no_eyes(path: str, lines: Sequence[Line]) -> PunaError:
    """As why, of a projector that libmtmd refuses."""
    complaints = [line.text for line in lines if line.is_complaint]
    text = "\n".join(complaints)
    if found := _NO_TENSOR.search(text):
        return MissingTensors([found[1]])
    if found := _OTHER_WIDTH.search(text):
        return UnsupportedModel(f"{path} belongs to another model: its rows have {found[2]} values, this model takes {found[1]}")
    if found := _NO_PROJECTOR.search(text):
        return UnsupportedModel(f"{path}: libmtmd does not know the projector {found[1]}")
    if _MEMORY.search(text):
        return OutOfMemory(f"{path}: {_last(complaints)}")
    first = _PREFIX.sub("", complaints[0]) if complaints else "it did not say why"
    return LoadError(f"libmtmd cannot load {path}: {first}")


def _last(complaints: Sequence[str]) -> str:
    """The last complaint that gives a reason."""
    reasons = [_PREFIX.sub("", line) for line in complaints if not any(echo in line for echo in _ECHOES)]
    return (reasons or [_PREFIX.sub("", line) for line in complaints] or ["it did not say why"])[-1]
