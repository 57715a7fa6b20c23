"""Quantise a model file in a process of its own: ``python -m puna.runner.process.quantise SOURCE TARGET KIND``.

Prints one JSON object per line on standard output: ``{"done": bytes, "total": bytes}`` after each tensor, of the source's
bytes, and ``{"error": text}`` before it ends with status 1. It ends with the process that started it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from puna.errors import PunaError
from puna.gguf.mixture import mixture
from puna.gguf.quantise import KINDS
from puna.gguf.reader import GGUFFile, TensorInfo
from puna.gguf.types import TensorType
from puna.gguf.writer import ALIGNMENT_KEY, GGUFWriter
from puna.guard import exit_with_parent
from puna.host import usable_cores
from puna.native import cpu
from puna.native.quantiser import encode, is_sound

FILE_TYPE, VERSION = "general.file_type", "general.quantization_version"
_VERSION = 2  # of the encodings (GGML_QNT_VERSION)

OnTensor = Callable[[int], None]
Data = memoryview | npt.NDArray[np.uint8]


def quantise(source: GGUFFile, target: Path, kind: str, pool: Executor, on_tensor: OnTensor) -> None:
    """Write *source* in another kind; *on_tensor* is told of the bytes of each tensor that was read.

    Errors: PunaError when the model is quantised already, or a weight is no number; OSError from the file system.
    """
    types = mixture(source, kind)
    writer = GGUFWriter(alignment=source.alignment)
    for key in source.metadata:
        if key not in (FILE_TYPE, VERSION, ALIGNMENT_KEY) and not key.startswith("split."):
            writer.add_encoded(key, source.encoded_value(key))
    writer.add(VERSION, _VERSION)
    writer.add(FILE_TYPE, KINDS[kind])

    def data_of(tensor: TensorInfo) -> Data:
        data = _encoded(source, tensor, types[tensor.name], pool)
        on_tensor(tensor.n_bytes)
        return data

    for tensor in source.tensors.values():
        writer.add_raw_tensor(tensor.name, tensor.shape, types[tensor.name], partial(data_of, tensor))
    writer.write(target)


def _encoded(source: GGUFFile, tensor: TensorInfo, kind: TensorType, pool: Executor) -> Data:
    data = source.tensor_data(tensor.name)
    if tensor.type != kind and tensor.type.is_quantized:
        raise PunaError(f"requantizing from type {tensor.type.ggml_name} is disabled")
    if not is_sound(data, tensor.type):
        raise PunaError(f"tensor {tensor.name!r} has invalid data: not all of it is numbers")
    if tensor.type == kind:
        return data
    try:
        return encode(data, tensor.type, kind, tensor.shape[0], pool)
    except ValueError as error:
        raise PunaError(f"tensor {tensor.name!r} in {kind.ggml_name}: {error}") from error


def _print(**fields: int | str) -> None:
    print(json.dumps(fields), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m puna.runner.process.quantise", description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("kind", choices=KINDS)
    arguments = parser.parse_args()
    exit_with_parent()
    if hasattr(os, "nice"):
        os.nice(5)  # a server that answers goes first
    n_threads = cpu.threads(cpu.physical_cores(), usable_cores(), cpu.cgroup_limits().cpus)
    done = 0
    try:
        with GGUFFile.open(arguments.source) as file, ThreadPoolExecutor(n_threads) as pool:
            total = sum(tensor.n_bytes for tensor in file.tensors.values())

            def on_tensor(n_bytes: int) -> None:
                nonlocal done
                done += n_bytes
                _print(done=done, total=total)

            quantise(file, arguments.target, arguments.kind, pool, on_tensor)
    except (PunaError, OSError) as error:
        _print(error=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
