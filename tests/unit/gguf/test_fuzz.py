"""Damaged files either parse or raise FileFormatError, and never cost memory out of proportion to their size."""

from __future__ import annotations

import io
import tracemalloc
from functools import cache
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from puna.errors import FileFormatError
from puna.gguf.metadata import LazyArray
from puna.gguf.reader import GGUFFile
from puna.gguf.types import TensorType, ValueType
from puna.gguf.writer import GGUFWriter

MAX_MEMORY = 8 << 20
INTERESTING = [0, 1, 2, 7, 31, 32, 63, 64, 127, 128, 255]

settings.register_profile("files", suppress_health_check=[HealthCheck.function_scoped_fixture])
files = settings(settings.get_profile("files"), max_examples=300)


@cache
def good_file() -> bytes:
    writer = GGUFWriter("llama", alignment=64)
    for kind in ValueType:
        if kind is ValueType.STRING:
            writer.add("x.string", "some text")
        elif kind is not ValueType.ARRAY:
            writer.add(f"x.{kind.name}", 1, kind)
            writer.add(f"x.array.{kind.name}", [0, 1], element=kind)
    writer.add("tokenizer.ggml.tokens", [f"token {i}" for i in range(20)] + ["y" * 300])
    writer.add_tensor("blk.0.weight", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_raw_tensor("blk.0.quantised", (64, 2), TensorType.Q4_0, bytes(72))
    writer.add_raw_tensor("scalar", (), TensorType.F16, bytes(2))
    file = io.BytesIO()
    writer.write_to(file)
    return file.getvalue()


def open_and_read_all(path: Path) -> None:
    try:
        with GGUFFile.open(path) as file:
            for value in file.metadata.values():
                if isinstance(value, LazyArray):
                    assert len(list(value)) == len(value)
            for name, info in file.tensors.items():
                assert len(file.tensor_data(name)) == info.n_bytes
    except FileFormatError:
        return


def check(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        open_and_read_all(path)
        assert tracemalloc.get_traced_memory()[1] < MAX_MEMORY
    finally:
        tracemalloc.stop()


def test_the_undamaged_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "good.gguf"
    path.write_bytes(good_file())
    with GGUFFile.open(path) as file:
        assert (len(file.tensors), len(file.metadata)) == (3, 26)


@files
@given(
    st.lists(
        st.tuples(st.integers(0, len(good_file()) - 1), st.sampled_from(INTERESTING) | st.integers(0, 255)),
        min_size=1,
        max_size=8,
    )
)
def test_changed_bytes(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    content = bytearray(good_file())
    for position, byte in changes:
        content[position] = byte
    check(tmp_path, bytes(content))


@files
@given(st.integers(0, len(good_file()) - 8), st.integers(0, 2**64 - 1) | st.sampled_from([2**63, 2**62, 2**32, 2**64 - 1, 2**31]))
def test_changed_words(tmp_path: Path, position: int, word: int) -> None:
    content = bytearray(good_file())
    content[position : position + 8] = word.to_bytes(8, "little")
    check(tmp_path, bytes(content))


@files
@given(st.integers(0, len(good_file())), st.integers(0, len(good_file())), st.binary(max_size=40))
def test_spliced_files(tmp_path: Path, begin: int, end: int, inserted: bytes) -> None:
    content = good_file()
    check(tmp_path, content[:begin] + inserted + content[end:])


@files
@given(st.binary(max_size=400))
def test_noise_after_a_good_header(tmp_path: Path, noise: bytes) -> None:
    check(tmp_path, good_file()[:24] + noise)
