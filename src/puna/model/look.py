"""Which engine will run a file, found without the tensor library: the model's class is declared against it, and nothing is
loaded. For those who only want to say so.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import lru_cache
from pathlib import Path
from typing import Any

from puna.engines import Choice, choose
from puna.errors import FileFormatError, MissingTensors, NotFound, UnsupportedModel
from puna.gguf.reader import GGUFFile
from puna.ml.backend import Use
from puna.model.registry import open_model


class _Named:
    """In a tensor's place: known by name and shape."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = (*shape, 1, 1, 1, 1)[:4]


class _Look:
    """In a backend's place, for a model that will compute nothing."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._taken: set[str] = set()

    @property
    def taken(self) -> Set[str]:
        return self._taken

    def tensor(self, name: str, use: Use) -> _Named:
        if name not in self._file.tensors:
            raise MissingTensors([name])
        self._taken.add(name)
        return _Named(self._file.tensors[name].shape)

    def joined(self, names: Sequence[str]) -> None:
        return None

    def low_rank(self, name: str, use: Use) -> tuple[()]:
        return ()


_KEPT = 256  # choices that are remembered


def engine_at(path: Path, new_engine: bool | None = None) -> Choice:
    """As engine_of, of the file at *path*; remembered until the file changes.

    Errors: NotFound, FileFormatError.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise NotFound(f"{path}: {error.strerror}") from error
    return _engine_at(path, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns), new_engine)


@lru_cache(_KEPT)
def _engine_at(path: Path, _state: tuple[int, ...], new_engine: bool | None) -> Choice:
    with GGUFFile.open(path) as file:
        return engine_of(file, new_engine)


def engine_of(file: GGUFFile, new_engine: bool | None = None) -> Choice:
    """As the runner will choose, where it finds the machine fit; *new_engine* as puna.engines.choose has it.

    A file that is malformed is run by neither engine; what is said of it holds for its architecture.
    """
    choice = choose(file.architecture, new_engine)
    if choice.engine != "puna" or choice.is_forced:
        return choice
    look: Any = _Look(file)
    try:
        open_model(file, look, n_ctx=1)
    except (UnsupportedModel, MissingTensors) as error:
        return Choice("compat", str(error).removeprefix(f"{file.path}: "))
    except FileFormatError:
        return choice
    return choice
