"""A checkpoint to be converted: small text files and the tensors of one or several safetensors files, by name.

The files may lie anywhere: a folder, or a store where names say nothing. Messages give the names within the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from puna.errors import FileFormatError
from puna.gguf.convert.safetensors import SafetensorsFile, StoredTensor

T = TypeVar("T")

MAX_TEXT_BYTES = 64 << 20

OnBytes = Callable[[int, int], None]
"""Called with bytes written and in all; may raise to stop the conversion."""


def ignore(done: int, total: int) -> None:
    """Report to nobody."""


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

    def read(self, name: str) -> bytes:
        """Errors: FileFormatError when the file is missing or too large for a text."""
        path = self.files.get(name)
        if path is None:
            raise FileFormatError(f"the checkpoint has no {name}")
        try:
            if path.stat().st_size > MAX_TEXT_BYTES:
                raise FileFormatError(f"{name}: larger than {MAX_TEXT_BYTES} bytes")
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

    def tensors(self) -> Tensors:
        """Errors: FileFormatError when there are none, or one is damaged or appears twice."""
        return Tensors({name: path for name, path in self.files.items() if name.endswith(".safetensors") and "/" not in name})


class Tensors:
    """All tensors of a checkpoint, open; a context manager."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._stack = ExitStack()
        self._homes: dict[str, SafetensorsFile] = {}
        try:
            for name, path in files.items():
                file = self._stack.enter_context(SafetensorsFile(path, name))
                for tensor in file.tensors:
                    if tensor in self._homes:
                        raise FileFormatError(f"tensor {tensor[:200]} is in {self._homes[tensor].name} and in {name}")
                    self._homes[tensor] = file
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
            raise FileFormatError(f"there is no tensor {name} in {self._names()}")
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
