"""One GGUF file of the parts that a large one was cut into: ``NAME-00001-of-0000N.gguf``.

Each part says which it is (``split.no``), of how many (``split.count``), and how many tensors all have together
(``split.tensors.count``). The metadata is the first one's; the others need have none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile
from puna.gguf.writer import ALIGNMENT_KEY, GGUFWriter

NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"

OnBytes = Callable[[int, int], None]
"""Told of bytes done and in all; may raise to stop the work."""


def in_order(parts: Sequence[GGUFFile]) -> list[GGUFFile]:
    """The parts from the first to the last.

    Errors: FileFormatError naming what is missing, or does not belong to the others.
    """
    count = parts[0].metadata.integer(COUNT, 1)
    numbered: dict[int, GGUFFile] = {}
    for part in parts:
        number = part.metadata.integer(NUMBER, 0)
        if part.metadata.integer(COUNT, 1) != count or not 0 <= number < count or number in numbered:
            raise FileFormatError(f"{part.path} is not a part of the same model as {parts[0].path}")
        numbered[number] = part
    missing = [str(number + 1) for number in range(count) if number not in numbered]
    if missing:
        raise FileFormatError(f"the model is cut into {count} files, and not all are there: {', '.join(missing[:20])} missing")
    return [numbered[number] for number in range(count)]


def join(parts: Sequence[GGUFFile], target: Path, on_bytes: OnBytes) -> None:
    """Write the whole model of its parts, in any order.

    Errors: FileFormatError as in_order, or when tensors are missing or twice there; OSError; what *on_bytes* raises.
    """
    parts = in_order(parts)
    first = parts[0]
    names = [name for part in parts for name in part.tensors]
    stated = first.metadata.integer(TENSORS, len(names))
    if len(set(names)) != len(names) or len(names) != stated:
        raise FileFormatError(
            f"{first.path}: the parts have {len(names)} tensors, {len(set(names))} by name, instead of {stated}"
        )
    writer = GGUFWriter(alignment=first.alignment)
    for key in first.metadata:
        if key != ALIGNMENT_KEY and key not in (NUMBER, COUNT, TENSORS):
            writer.add_encoded(key, first.encoded_value(key))
    n_total = sum(tensor.n_bytes for part in parts for tensor in part.tensors.values())
    n_done = 0

    def data_of(part: GGUFFile, name: str) -> memoryview:
        nonlocal n_done
        on_bytes(n_done, n_total)
        n_done += part.tensors[name].n_bytes
        return part.tensor_data(name)

    for part in parts:
        for tensor in part.tensors.values():
            writer.add_raw_tensor(tensor.name, tensor.shape, tensor.type, partial(data_of, part, tensor.name))
    writer.write(target)
    on_bytes(n_total, n_total)
