"""File operations that fail: with a chosen error at a chosen place, or at the n-th operation that changes anything."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def failing(operation: str, place: Path, number: int) -> Iterator[None]:
    """``os.<operation>`` on this path fails with this error; ``read`` lets the file be opened, and fails then."""
    with pytest.MonkeyPatch.context() as patch:
        real_open, real = os.open, getattr(os, operation)
        opened: set[int] = set()

        def is_there(path: Any) -> bool:
            return not isinstance(path, int) and Path(os.fsdecode(path)) == place

        def failed(path: Any, *args: Any, **kwargs: Any) -> Any:
            if is_there(path):
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *args, **kwargs)

        def remembering(path: Any, *args: Any, **kwargs: Any) -> int:
            descriptor = int(real_open(path, *args, **kwargs))
            (opened.add if is_there(path) else opened.discard)(descriptor)
            return descriptor

        def fdopen(descriptor: int, *args: Any, **kwargs: Any) -> Any:
            file = io.open(descriptor, *args, **kwargs)  # noqa: SIM115, UP020 - what os.fdopen is
            return _Unreadable(file, number) if descriptor in opened else file

        if operation == "fdopen":
            patch.setattr(os, "open", remembering)
            patch.setattr(os, "fdopen", fdopen)
        else:
            patch.setattr(os, operation, failed)
        yield


class _Unreadable:
    def __init__(self, file: io.BufferedReader, number: int) -> None:
        self._file = file
        self._number = number

    def __enter__(self) -> _Unreadable:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, *_: int) -> bytes:
        raise OSError(self._number, os.strerror(self._number))


CHANGING = ("write", "pwrite", "ftruncate", "fsync", "replace", "mkdir", "link", "unlink", "rmdir")
GROWING = frozenset(("open", "write", "pwrite", "file.write", "fsync", "replace", "mkdir", "link"))


@contextmanager
def watching(below: Path, on_change: Callable[[str, str], None]) -> Iterator[None]:
    """Call *on_change* with name and path before each operation that makes, changes or removes a file below a folder."""
    paths: dict[int, str] = {}

    def ask(name: str, path: str) -> None:
        if Path(path).is_relative_to(below):
            on_change(name, path)

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, *args: Any, **kwargs: Any) -> Any:
            path = paths.get(first, "") if isinstance(first, int) else os.fsdecode(first)
            if name != "open" or (args and args[0] & os.O_CREAT and not os.path.lexists(path)):
                ask("replace.over" if name == "replace" and os.path.lexists(args[0]) else name, path)
            result = real(first, *args, **kwargs)
            if name == "open":
                paths[result] = path
            return result

        return call

    def fdopen(descriptor: int, *args: Any, **kwargs: Any) -> Any:
        file = io.open(descriptor, *args, **kwargs)  # noqa: SIM115, UP020 - what os.fdopen is
        return _Watched(file, lambda: ask("file.write", paths.get(descriptor, ""))) if "wb" in args else file

    with pytest.MonkeyPatch.context() as patch:
        for name in (*CHANGING, "open"):
            patch.setattr(os, name, wrap(name, getattr(os, name)))
        patch.setattr(os, "fdopen", fdopen)
        yield


class _Watched:
    """A file that is written, which says so before each time."""

    def __init__(self, file: Any, on_write: Callable[[], None]) -> None:
        self._file = file
        self._on_write = on_write

    def __enter__(self) -> _Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: Any) -> int:
        self._on_write()
        return int(self._file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def failing_at(index: int, number: int, below: Path) -> Iterator[list[str]]:
    """The *index*-th operation that takes room below a folder fails, and all after it; yields the names of those before."""
    seen: list[str] = []

    def on_change(name: str, _: str) -> None:
        if name in GROWING:
            if len(seen) >= index:
                raise OSError(number, os.strerror(number))
            seen.append(name)

    with watching(below, on_change):
        yield seen
