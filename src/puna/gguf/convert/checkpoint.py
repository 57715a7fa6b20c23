"""A checkpoint to be converted: small text files and the tensors of one or several safetensors files, by name.

The files may lie anywhere: a folder, or a store where names say nothing. Messages give the names within the checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from puna.errors import FileFormatError
from puna.gguf.convert.safetensors import SafetensorsFile, StoredTensor

T = TypeVar("T")

MAX_TEXT_BYTES = 64 << 20
MAX_CONFIG_BYTES = 8 << 20  # of what becomes any objects: it is read whatever it holds
MAX_TENSORS = 1 << 20  # of all files together

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")

OnBytes = Callable[[int, int], None]
"""Called with bytes written and in all; may raise to stop the conversion."""


def ignore(done: int, total: int) -> None:
    """Report to nobody."""


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class Checkpoint:
    """Files by their paths within the checkpoint, with slashes."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self.files = dict(files)

    @classmethod
    def of_folder(cls, folder: Path) -> Checkpoint:
        found = (path for pattern in ("*", "*/*") for path in sorted(folder.glob(pattern)) if path.is_file())
        return cls({path.relative_to(folder).as_posix(): path for path in found})

    def has(self, name: str) -> bool:
        return name in self.files

    def read(self, name: str, limit: int = MAX_TEXT_BYTES) -> bytes:
        """Errors: FileFormatError when the file is missing or too large for a text."""
        path = self.files.get(name)
        if path is None:
            raise FileFormatError(f"the checkpoint has no {name}")
        try:
            if path.stat().st_size > limit:
                raise FileFormatError(f"{name}: larger than {limit} bytes")
            return path.read_bytes()
        except OSError as error:
            raise FileFormatError(f"{name}: {error.strerror}") from error

    def decoded(self, name: str, kind: type[T]) -> T:
        """A JSON file.

        Errors: FileFormatError naming the file and the field that is wrong.
        """
        try:
            return msgspec.json.decode(self.read(name), type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise FileFormatError(f"{name}: {error}") from error

    def config(self) -> dict[str, Any]:
        """Of config.json all fields; published files have numbers that are infinite, which JSON has no word for.

        Errors: FileFormatError.
        """
        try:
            found = json.loads(self.read("config.json", MAX_CONFIG_BYTES))
        except (ValueError, RecursionError) as error:
            raise FileFormatError(f"config.json: {error}") from error
        if not isinstance(found, dict):
            raise FileFormatError("config.json: not an object")
        return found

    def tensors(self, apart: Sequence[str] = ()) -> Tensors:
        """Those of the files that make the model: what is published beside them in another form is left alone.

        Of the folders *apart* there are those of the file in each, whose names begin with the folder's and a slash.
        Errors: FileFormatError when there are none, one is damaged or appears twice, or a file of several is missing.
        """
        there = {name: path for name, path in self.files.items() if name.endswith(".safetensors") and "/" not in name}
        more = {name: self.files[name] for folder in apart if (name := f"{folder}/{_WHOLE}") in self.files}
        if _INDEX in self.files:
            return self._indexed(there, more)
        names = [_WHOLE] if _WHOLE in there else _shards(there) or list(there)
        return Tensors({**{name: there[name] for name in names}, **more})

    def _indexed(self, there: Mapping[str, Path], more: Mapping[str, Path]) -> Tensors:
        index = self.decoded(_INDEX, _Index).weight_map
        shards = sorted(set(index.values()))
        for shard in shards:
            if shard not in there:
                raise FileFormatError(f"{_INDEX} names the file {shard[:200]}, which the checkpoint does not have")
        tensors = Tensors({**{shard: there[shard] for shard in shards}, **more})
        try:
            for name, shard in index.items():
                if name not in tensors or tensors.home(name).name != shard:
                    raise FileFormatError(f"{shard}: there is no tensor {name[:200]}, which {_INDEX} says is in it")
        except FileFormatError:
            tensors.close()
            raise
        return tensors


def _shards(there: Mapping[str, Path]) -> list[str]:
    """The files that are numbered parts of one model.

    Errors: FileFormatError naming one that is missing.
    """
    found = [name for name in there if _SHARD.fullmatch(name)]
    for name in found:
        stem, _, count = _SHARD.fullmatch(name).groups()  # type: ignore[union-attr]  # it matched above
        missing = [n for n in range(1, int(count) + 1) if f"{stem}-{n:05}-of-{count}.safetensors" not in there]
        if missing:
            raise FileFormatError(f"the checkpoint has {name}, but not {stem}-{missing[0]:05}-of-{count}.safetensors")
    return found


class Tensors:
    """All tensors of a checkpoint, open; a context manager."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._stack = ExitStack()
        self._homes: dict[str, SafetensorsFile] = {}
        try:
            for name, path in files.items():
                folder, slash, _ = name.rpartition("/")
                file = self._stack.enter_context(SafetensorsFile(path, name, folder + slash))
                for tensor in file.tensors:
                    if tensor in self._homes:
                        raise FileFormatError(f"tensor {tensor[:200]} is in {self._homes[tensor].name} and in {name}")
                    self._homes[tensor] = file
                if len(self._homes) > MAX_TENSORS:
                    raise FileFormatError(f"{name}: with this file there are more than {MAX_TENSORS} tensors")
        except BaseException:
            self._stack.close()
            raise
        if not self._homes:
            self._stack.close()
            raise FileFormatError("the checkpoint has no tensors in safetensors files")

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __contains__(self, name: object) -> bool:
        return name in self._homes

    def home(self, name: str) -> SafetensorsFile:
        """The file that holds a tensor.

        Errors: FileFormatError.
        """
        file = self._homes.get(name)
        if file is None:
            raise FileFormatError(f"there is no tensor {name[:200]} in {self._names()}")
        return file

    def stored(self, name: str) -> StoredTensor:
        """Errors: FileFormatError."""
        return self.home(name).tensors[name]

    def _names(self) -> str:
        names = sorted({file.name for file in self._homes.values()})
        return names[0] if len(names) == 1 else f"the {len(names)} files {names[0]} to {names[-1]}"

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
