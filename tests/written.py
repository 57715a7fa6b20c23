"""Files that tests write again and again: the same arguments, a copy of the same file, which a test may change as it likes."""

from __future__ import annotations

import functools
import pickle
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

W = TypeVar("W", bound=Callable[..., Path])

_MOST_FILES, _MOST_BYTES = 24, 16 << 20  # kept by a process of each function, and the largest of them
_folder = tempfile.TemporaryDirectory(prefix="puna-written-")


def written_once(write: W) -> W:
    """A function that writes a file to a path: random weights, and their tokens, take far longer than a copy."""
    kept: OrderedDict[bytes, Path] = OrderedDict()

    @functools.wraps(write)
    def written(path: str | Path, *args: Any, **options: Any) -> Path:
        key = pickle.dumps((args, sorted(options.items())))
        if key in kept:
            kept.move_to_end(key)
            shutil.copyfile(kept[key], path)
            return Path(path)
        found = write(path, *args, **options)
        if found.stat().st_size <= _MOST_BYTES:
            with tempfile.NamedTemporaryFile(dir=_folder.name, delete=False) as new:
                kept[key] = Path(shutil.copyfile(found, new.name))
        if len(kept) > _MOST_FILES:
            kept.popitem(last=False)[1].unlink()
        return found

    return cast(W, written)
