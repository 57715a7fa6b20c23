from __future__ import annotations

import io
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from puna.gguf.metadata import LazyArray
from puna.gguf.reader import GGUFFile
from puna.gguf.types import TensorType, ValueType
from puna.gguf.writer import GGUFWriter

RANGES: dict[ValueType, tuple[int, int]] = {
    ValueType.UINT8: (0, 2**8 - 1),
    ValueType.INT8: (-(2**7), 2**7 - 1),
    ValueType.UINT16: (0, 2**16 - 1),
    ValueType.INT16: (-(2**15), 2**15 - 1),
    ValueType.UINT32: (0, 2**32 - 1),
    ValueType.INT32: (-(2**31), 2**31 - 1),
    ValueType.UINT64: (0, 2**64 - 1),
    ValueType.INT64: (-(2**63), 2**63 - 1),
}
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)


def values_of(kind: ValueType) -> st.SearchStrategy[Any]:
    if kind in RANGES:
        return st.integers(*RANGES[kind])
    if kind is ValueType.BOOL:
        return st.booleans()
    if kind is ValueType.STRING:
        return TEXT
    return st.floats(width=32 if kind is ValueType.FLOAT32 else 64, allow_nan=False)


@st.composite
def entries(draw: st.DrawFn) -> tuple[ValueType, ValueType | None, Any]:
    kind = draw(st.sampled_from(list(ValueType)))
    if kind is not ValueType.ARRAY:
        return kind, None, draw(values_of(kind))
    element = draw(st.sampled_from([k for k in ValueType if k is not ValueType.ARRAY]))
    return kind, element, draw(st.lists(values_of(element), max_size=30))


@st.composite
def tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], TensorType, bytes]:
    kind = draw(st.sampled_from(list(TensorType)))
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    if shape or kind.is_quantized:
        shape = [(shape[0] if shape else 1) * kind.block_size, *shape[1:]]
    n_bytes = kind.n_bytes(math.prod(shape))
    return tuple(shape), kind, draw(st.binary(min_size=1, max_size=8)) * n_bytes


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    keys=st.dictionaries(TEXT.filter(bool).map(lambda name: f"k.{name}"), entries(), max_size=8),
    contents=st.dictionaries(st.text(st.sampled_from("abcé.0"), min_size=1, max_size=20), tensors(), max_size=4),
    alignment=st.sampled_from([1, 8, 32, 64, 4096]),
)
def test_what_is_written_is_read(
    tmp_path: Path,
    keys: dict[str, tuple[ValueType, ValueType | None, Any]],
    contents: dict[str, tuple[tuple[int, ...], TensorType, bytes]],
    alignment: int,
) -> None:
    writer = GGUFWriter("x", alignment=alignment)
    for key, (kind, element, value) in keys.items():
        writer.add(key, value, kind, element)
    for name, (shape, tensor_type, data) in contents.items():
        writer.add_raw_tensor(name, shape, tensor_type, data[: tensor_type.n_bytes(math.prod(shape))])
    path = tmp_path / "model.gguf"
    writer.write(path)
    with GGUFFile.open(path) as file:
        assert file.alignment == alignment
        assert [key for key in file.metadata if key.startswith("k.")] == list(keys)
        for key, (_, element, value) in keys.items():
            found = file.metadata[key]
            assert found == value
            if isinstance(found, LazyArray):
                assert found.element is element
        assert list(file.tensors) == list(contents)
        for name, (shape, tensor_type, data) in contents.items():
            info = file.tensors[name]
            assert (info.shape, info.type, info.offset % alignment) == (shape, tensor_type, 0)
            assert file.tensor_data(name) == data[: info.n_bytes]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("text", ValueType.STRING),
        (b"\xff", ValueType.STRING),
        (True, ValueType.BOOL),
        (np.bool_(False), ValueType.BOOL),
        (0, ValueType.UINT32),
        (2**32 - 1, ValueType.UINT32),
        (-1, ValueType.INT32),
        (2**32, ValueType.UINT64),
        (-(2**31) - 1, ValueType.INT64),
        (np.int16(7), ValueType.UINT32),
        (1.5, ValueType.FLOAT32),
        (np.float64(1.5), ValueType.FLOAT32),
        ([1, -1], ValueType.ARRAY),
        (np.arange(3), ValueType.ARRAY),
    ],
)
def test_types_follow_from_values(value: Any, kind: ValueType) -> None:
    writer = GGUFWriter()
    writer.add("k", value)
    file = io.BytesIO()
    writer.write_to(file)
    assert struct.unpack_from("<I", file.getvalue(), 24 + 8 + 1) == (kind,)


@pytest.mark.parametrize(
    ("array", "kind"),
    [
        (np.zeros((2, 3), np.float32), TensorType.F32),
        (np.zeros((2, 3), np.float16).T, TensorType.F16),
        (np.zeros((2, 3), np.dtype(">f4")), TensorType.F32),
        (np.zeros(5, np.int8), TensorType.I8),
        (np.float32(3).reshape(()), TensorType.F32),
    ],
)
def test_tensors_from_arrays(tmp_path: Path, array: np.ndarray[Any, Any], kind: TensorType) -> None:
    values = array + np.arange(array.size).reshape(array.shape).astype(array.dtype)
    writer = GGUFWriter("x")
    writer.add_tensor("t", values)
    writer.write(tmp_path / "model.gguf")
    with GGUFFile.open(tmp_path / "model.gguf") as file:
        info = file.tensors["t"]
        assert (info.type, info.shape) == (kind, tuple(reversed(array.shape)))
        found = np.frombuffer(file.tensor_data("t"), values.dtype.newbyteorder("<")).reshape(array.shape).copy()
    np.testing.assert_array_equal(found, values)


def test_data_that_is_made_while_writing(tmp_path: Path) -> None:
    writer = GGUFWriter("x")
    writer.add_raw_tensor("t", (4,), TensorType.I8, lambda: b"late")
    writer.write(tmp_path / "model.gguf")
    with GGUFFile.open(tmp_path / "model.gguf") as file:
        assert bytes(file.tensor_data("t")) == b"late"


def test_late_data_of_the_wrong_length(tmp_path: Path) -> None:
    writer = GGUFWriter("x")
    writer.add_raw_tensor("t", (4,), TensorType.I8, lambda: b"far too late")
    with pytest.raises(ValueError, match="'t' needs 4 bytes, not 12"):
        writer.write(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w: w.add("general.architecture", "y"), "added before"),
        (lambda w: w.add("general.alignment", 64), "given to the writer when it is made"),
        (lambda w: w.add("k", 300, ValueType.UINT8), "300 does not fit UINT8"),
        (lambda w: w.add("k", 2, ValueType.BOOL), "2 does not fit BOOL"),
        (lambda w: w.add("k", "x", ValueType.UINT8), "does not fit UINT8"),
        (lambda w: w.add("k", 2**64), "no GGUF integer type"),
        (lambda w: w.add("k", None), "no GGUF type holds a NoneType"),
        (lambda w: w.add("k", []), "empty array needs its element type"),
        (lambda w: w.add("k", [1, "x"]), "same type"),
        (lambda w: w.add("k", [[1]]), "arrays of arrays"),
        (lambda w: w.add_raw_tensor("n" * 64, (1,), TensorType.I8, b"x"), "longer than 63 bytes"),
        (lambda w: w.add_raw_tensor("t", (1, 1, 1, 1, 1), TensorType.I8, b"x"), "one to four"),
        (lambda w: w.add_raw_tensor("t", (0,), TensorType.I8, b""), "one to four"),
        (lambda w: w.add_raw_tensor("t", (33,), TensorType.Q4_0, b""), "not a whole number of q4_0 blocks"),
        (lambda w: w.add_raw_tensor("t", (2,), TensorType.I8, b"x"), "needs 2 bytes, not 1"),
        (lambda w: w.add_tensor("t", np.zeros(2, np.complex64)), "no tensor type for dtype complex64"),
    ],
)
def test_what_the_writer_refuses(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(GGUFWriter("x"))


def test_a_tensor_is_added_once() -> None:
    writer = GGUFWriter()
    writer.add_raw_tensor("t", (1,), TensorType.I8, b"x")
    with pytest.raises(ValueError, match="'t' was added before"):
        writer.add_raw_tensor("t", (1,), TensorType.I8, b"x")


def test_alignment_must_be_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="alignment 24"):
        GGUFWriter(alignment=24)
