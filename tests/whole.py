"""Files with everything in them that libllama would load for an architecture, as libllama itself writes them.

It makes a model from metadata alone, with every tensor that it knows as optional, and saves it with every key that it knows.
"""

from __future__ import annotations

import ctypes
import functools
import math
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from puna.gguf.reader import GGUFFile
from puna.gguf.types import TensorType
from puna.native import structs
from puna.native.library import opened
from puna.native.llama import llama
from tests.models.dialect import Translation
from tests.tiny import ggml_base

# Beside these matrices libllama's loader looks for a factor in every architecture.
HAVE_FACTORS = re.compile(
    r"blk\.\d+\.(attn_(q|k|v|output|qkv|gate)|ffn_(gate|up|down)(_shexp|_exps)?|ssm_(in|out|alpha|beta))\.weight"
)

_Fill = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


class _InitParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))


def kind(name: str) -> str:
    """Of a tensor: its name without the layer."""
    return re.sub(r"^blk\.\d+\.", "", name)


def values_for(name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Numbers that such a tensor may have and that show when they are left out."""
    random, n = np.random.default_rng(zlib.crc32(name.encode())), math.prod(shape)
    if name.endswith("scale"):
        values = random.uniform(0.5, 1.5, n)
    elif name.startswith("rope_f"):
        values = np.linspace(1.0, 8.0, n)
    elif "norm" in name:
        values = 1 + 0.1 * random.standard_normal(n)
    elif name.endswith("bias"):
        values = 0.2 * random.standard_normal(n)
    else:
        values = random.standard_normal(n) / math.sqrt(shape[0])
    return values.astype(np.float32)


def write_whole(source: Path, path: Path) -> Path:
    """What libllama makes of the metadata of *source*; tensors that are there keep their numbers."""
    base, api = _ggml(), _libllama()
    metadata = base.gguf_init_from_file(str(source).encode(), _InitParams(True, None))
    with GGUFFile.open(source) as file:

        def fill(tensor: int, _data: int | None) -> None:
            name, shape = base.ggml_get_name(tensor).decode(), structs.shape(tensor)
            known = file.tensors.get(name)
            values: npt.NDArray[Any] = values_for(name, shape)
            if known is not None and known.n_bytes == values.nbytes:
                values = np.frombuffer(file.tensor_data(name), np.uint8).copy()
            base.ggml_backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)

        callback = _Fill(fill)
        model = api.llama_model_init_from_user(metadata, callback, None, llama().llama_model_default_params())
    assert model, f"libllama makes no model of {source}"
    api.llama_model_save_to_file(model, str(path).encode())
    llama().llama_model_free(model)
    base.gguf_free(metadata)
    return path


@functools.cache
def _libllama() -> ctypes.CDLL:
    # The very file that is open already: a second copy of the library would share its symbols with the first.
    library = ctypes.CDLL(str(opened().paths["llama"]))
    library.llama_model_init_from_user.restype = ctypes.c_void_p
    params = type(llama().llama_model_default_params())
    library.llama_model_init_from_user.argtypes = [ctypes.c_void_p, _Fill, ctypes.c_void_p, params]
    library.llama_model_save_to_file.restype = None
    library.llama_model_save_to_file.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    return library


@functools.cache
def _ggml() -> ctypes.CDLL:
    """A handle of its own: other tests declare the same functions otherwise."""
    base = ctypes.CDLL(ggml_base()._name)
    base.gguf_init_from_file.restype = ctypes.c_void_p
    base.gguf_init_from_file.argtypes = [ctypes.c_char_p, _InitParams]
    base.gguf_free.restype = None
    base.gguf_free.argtypes = [ctypes.c_void_p]
    base.ggml_get_name.restype = ctypes.c_char_p
    base.ggml_get_name.argtypes = [ctypes.c_void_p]
    base.ggml_backend_tensor_set.restype = None
    base.ggml_backend_tensor_set.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    return base


def factors(file: GGUFFile) -> dict[str, npt.NDArray[np.float32]]:
    """A factor for each matrix that may have one, or one for each expert's."""
    found = {}
    for info in file.tensors.values():
        name = info.name.removesuffix(".weight") + ".scale"
        if HAVE_FACTORS.fullmatch(info.name) and name not in file.tensors:
            found[name] = values_for(name, info.shape[2:] or (1,))
    return found


def with_tensors(source: Path, path: Path, added: Mapping[str, npt.NDArray[np.float32]]) -> Path:
    """The file with further tensors in F32."""
    translation = Translation(source)
    for name, values in added.items():
        translation.tensors[name] = tuple(reversed(values.shape)), TensorType.F32, values.tobytes()
    with GGUFFile.open(source) as file:
        return translation.save(path, file.architecture)


def optional_tensors(source: Path, whole: Path | None) -> dict[str, npt.NDArray[np.float32]]:
    """What *source* might have as well: factors, and all that libllama has written to *whole* beside it."""
    with GGUFFile.open(source) as file:
        found = factors(file)
        if whole is not None:
            with GGUFFile.open(whole) as everything:
                for info in everything.tensors.values():
                    if info.name not in file.tensors and info.type is TensorType.F32:
                        found[info.name] = (
                            np.frombuffer(everything.tensor_data(info.name), "<f4").reshape(info.shape[::-1]).copy()
                        )
    return found
