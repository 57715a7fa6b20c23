"""ggml's own tables and its own reader agree with ours. Speaks to libggml-base directly, not through puna.native."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from puna.gguf.metadata import LazyArray
from puna.gguf.reader import GGUFFile
from puna.gguf.types import TensorType, ValueType
from tests.tiny import ggml_base, write_llama

TEXT_RESULTS = ["ggml_type_name", "gguf_get_key", "gguf_get_tensor_name", "gguf_get_val_str", "gguf_get_arr_str"]
SIZE_RESULTS = ["ggml_type_size", "gguf_get_tensor_offset", "gguf_get_tensor_size", "gguf_get_data_offset", "gguf_get_arr_n"]
LONG_RESULTS = ["ggml_blck_size", "gguf_get_n_kv", "gguf_get_n_tensors"]


class InitParams(ctypes.Structure):
    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


@pytest.fixture(scope="module")
def ggml() -> ctypes.CDLL:
    library = ggml_base()
    for names, kind in ((TEXT_RESULTS, ctypes.c_char_p), (SIZE_RESULTS, ctypes.c_size_t), (LONG_RESULTS, ctypes.c_int64)):
        for name in names:
            getattr(library, name).restype = kind
    library.gguf_init_from_file.restype = ctypes.c_void_p
    library.gguf_init_from_file.argtypes = [ctypes.c_char_p, InitParams]
    library.gguf_get_tensor_ne.restype = ctypes.POINTER(ctypes.c_int64 * 4)
    library.gguf_get_val_f32.restype = ctypes.c_float
    library.gguf_get_val_u32.restype = ctypes.c_uint32
    library.gguf_get_val_bool.restype = ctypes.c_bool
    return library


@contextmanager
def opened(ggml: ctypes.CDLL, path: Path) -> Iterator[ctypes.c_void_p]:
    handle = ctypes.c_void_p(ggml.gguf_init_from_file(str(path).encode(), InitParams(True, None)))
    assert handle.value, "ggml refuses the file"
    try:
        yield handle
    finally:
        ggml.gguf_free(handle)


def ggml_value(ggml: ctypes.CDLL, handle: ctypes.c_void_p, index: int) -> Any:
    i = ctypes.c_int64(index)
    readers = {
        ValueType.STRING: lambda: ggml.gguf_get_val_str(handle, i).decode(),
        ValueType.UINT32: lambda: ggml.gguf_get_val_u32(handle, i),
        ValueType.FLOAT32: lambda: ggml.gguf_get_val_f32(handle, i),
        ValueType.BOOL: lambda: ggml.gguf_get_val_bool(handle, i),
    }
    return readers[ValueType(ggml.gguf_get_kv_type(handle, i))]()


def test_every_tensor_type_has_ggmls_sizes(ggml: ctypes.CDLL) -> None:
    known = {}
    for number in range(43):
        if ggml.ggml_blck_size(number) > 0:
            known[number] = (ggml.ggml_type_name(number).decode(), ggml.ggml_blck_size(number), ggml.ggml_type_size(number))
    assert {int(kind): (kind.ggml_name, kind.block_size, kind.block_bytes) for kind in TensorType} == known


@pytest.mark.parametrize("dtype", ["f32", "q4_K"])
@pytest.mark.parametrize("vocab", ["bpe", "spm"])
def test_ggml_reads_what_we_write(ggml: ctypes.CDLL, tmp_path: Path, dtype: str, vocab: Any) -> None:
    path = write_llama(tmp_path / "model.gguf", dtype=dtype, vocab=vocab)
    with GGUFFile.open(path) as file, opened(ggml, path) as handle:
        keys = [ggml.gguf_get_key(handle, ctypes.c_int64(i)).decode() for i in range(ggml.gguf_get_n_kv(handle))]
        assert keys == list(file.metadata)
        for i, value in enumerate(file.metadata.values()):
            if not isinstance(value, LazyArray):
                assert ggml_value(ggml, handle, i) == value
                continue
            assert ggml.gguf_get_arr_type(handle, ctypes.c_int64(i)) == value.element
            n = ggml.gguf_get_arr_n(handle, ctypes.c_int64(i))
            assert n == len(value)
            if value.element is ValueType.STRING:
                texts = [ggml.gguf_get_arr_str(handle, ctypes.c_int64(i), ctypes.c_size_t(j)) for j in range(n)]
                assert texts == list(value.iter_bytes())
        assert ggml.gguf_get_data_offset(handle) == file.data_offset
        found = {}
        for i in range(ggml.gguf_get_n_tensors(handle)):
            index = ctypes.c_int64(i)
            found[ggml.gguf_get_tensor_name(handle, index).decode()] = (
                tuple(ggml.gguf_get_tensor_ne(handle, index).contents),
                ggml.gguf_get_tensor_type(handle, index),
                ggml.gguf_get_tensor_offset(handle, index) + file.data_offset,
                ggml.gguf_get_tensor_size(handle, index),
            )
        ours = {
            name: ((*info.shape, *[1] * (4 - len(info.shape))), info.type, info.offset, info.n_bytes)
            for name, info in file.tensors.items()
        }
        assert ours == found
