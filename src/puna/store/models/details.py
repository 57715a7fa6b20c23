"""What a model file says about itself, in the few facts that lists, names and capabilities need.

Read once per file and remembered by path, size and time of change; the file itself is closed again.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from puna.api.parameter_count import human_number
from puna.errors import NotFound, StoreError
from puna.gguf.metadata import ARCHITECTURE
from puna.gguf.reader import GGUFFile
from puna.store.disk.files import is_absent

# general.file_type, as llama.cpp numbers them
FILE_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4",
}
GUESSED = 1024  # a flag on the number

_RANK_POOLING = 4  # <arch>.pooling_type, as llama.cpp numbers them
_UNSPECIFIED = 0xFFFFFFFF  # the same key, of programs that write every key


@dataclass(frozen=True)
class FileDetails:
    """Facts from a GGUF file's metadata."""

    architecture: str
    kind: str  # model, adapter or projector
    n_parameters: int
    file_type: str  # "unknown" when the file does not say
    context_length: int
    embedding_length: int
    projection_length: int  # of a projector: of the model that it is for; 0 where it does not say
    has_pooling: bool
    ranks: bool
    has_vision: bool
    has_audio: bool
    chat_template: str
    size_label: str
    n_splits: int  # files the model is cut into; 1 for nearly all

    @property
    def parameter_size(self) -> str:
        return human_number(self.n_parameters)


def read_details(path: Path) -> FileDetails:
    """The facts of one file.

    Errors: NotFound; StoreError when it cannot be read; FileFormatError when it is no sound GGUF file.
    """
    try:
        found = path.stat()
    except OSError as error:
        if is_absent(path, error):
            raise NotFound(f"{path}: {error.strerror}") from error
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error
    return _read(path, found.st_size, found.st_mtime_ns)


@functools.lru_cache(maxsize=1024)
def _read(path: Path, _size: int, _mtime_ns: int) -> FileDetails:
    with GGUFFile.open(path) as file:
        meta = file.metadata
        n_splits = max(1, meta.integer("split.count", 1))
        if n_splits > 1 and not meta.has(ARCHITECTURE):
            return _of_part(file, n_splits)
        return FileDetails(
            architecture=file.architecture,
            kind=_kind(file),
            n_parameters=sum(tensor.n_elements for tensor in file.tensors.values()),
            file_type=_file_type(meta.integer("general.file_type", None)),
            context_length=meta.integer("context_length", 0),
            embedding_length=meta.integer("embedding_length", 0),
            projection_length=meta.integer("clip.vision.projection_dim", 0),
            has_pooling=meta.get(meta.full_key("pooling_type"), _UNSPECIFIED) not in (_UNSPECIFIED, -1),
            ranks=meta.get(meta.full_key("pooling_type")) == _RANK_POOLING,
            has_vision=meta.has("vision.block_count")
            or meta.has("clip.vision.block_count")
            or any(name.startswith("v.") for name in file.tensors),
            has_audio=meta.has("audio.block_count") or _says_yes(file, "clip.has_audio_encoder"),
            chat_template=meta.string("tokenizer.chat_template", ""),
            size_label=meta.string("general.size_label", ""),
            n_splits=n_splits,
        )


def _of_part(file: GGUFFile, n_splits: int) -> FileDetails:
    """Of a part but the first, which has tensors and no metadata."""
    return FileDetails(
        architecture="",
        kind="model",
        n_parameters=sum(tensor.n_elements for tensor in file.tensors.values()),
        file_type="unknown",
        context_length=0,
        embedding_length=0,
        projection_length=0,
        has_pooling=False,
        ranks=False,
        has_vision=False,
        has_audio=False,
        chat_template="",
        size_label="",
        n_splits=n_splits,
    )


def _says_yes(file: GGUFFile, key: str) -> bool:
    return file.metadata.get(key) is True


def _file_type(number: int | None) -> str:
    return "unknown" if number is None else FILE_TYPES.get(number & ~GUESSED, "unknown")


def _kind(file: GGUFFile) -> str:
    kind = file.metadata.string("general.type", "model")
    if kind in ("adapter", "projector"):
        return kind
    if kind == "mmproj" or file.architecture == "clip":
        return "projector"
    has_text = file.metadata.has("block_count")
    return "projector" if file.metadata.has("vision.block_count") and not has_text else "model"
