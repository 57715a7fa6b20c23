from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from puna.errors import FileFormatError, NotFound
from puna.gguf import reader
from puna.gguf.reader import GGUFFile
from puna.gguf.types import TensorType, ValueType
from puna.gguf.writer import GGUFWriter
from tests.unit.gguf import raw_file
from tests.unit.gguf.raw_file import ARCHITECTURE, array, assemble, key, string, tensor


def read_model(folder: Path, content: bytes) -> GGUFFile:
    return GGUFFile.open(raw_file.write(folder, content))


def test_facts_of_a_small_file(tmp_path: Path) -> None:
    content = assemble(tensors=[tensor("a", [4, 2]), tensor("b", [32], TensorType.Q8_0, 32)], data=bytes(range(32)) + bytes(34))
    with read_model(tmp_path, content) as file:
        assert (file.version, file.alignment, file.size, file.architecture) == (3, 32, len(content), "llama")
        assert file.path == str(tmp_path / "model.gguf")
        assert list(file.tensors) == ["a", "b"]
        a, b = file.tensors.values()
        assert (a.shape, a.type, a.n_bytes, a.n_elements) == ((4, 2), TensorType.F32, 32, 8)
        assert (b.shape, b.type, b.n_bytes) == ((32,), TensorType.Q8_0, 34)
        assert a.offset == file.data_offset == len(content) - 66
        assert bytes(file.tensor_data("a")) == bytes(range(32))
        with pytest.raises(NotFound, match="no tensor 'c'"):
            file.tensor_data("c")


def test_version_2_is_read_like_version_3(tmp_path: Path) -> None:
    assert read_model(tmp_path, assemble(version=2)).version == 2


def test_a_tensor_without_dimensions_has_one_element(tmp_path: Path) -> None:
    info = read_model(tmp_path, assemble(tensors=[tensor("scalar", [])], data=bytes(4))).tensors["scalar"]
    assert (info.shape, info.n_elements, info.n_bytes) == ((), 1, 4)


def test_alignment_of_the_file_moves_the_data(tmp_path: Path) -> None:
    keys = [ARCHITECTURE, key("general.alignment", ValueType.UINT32, struct.pack("<I", 256))]
    file = read_model(tmp_path, assemble(keys, [tensor("a", [1])], b"wxyz", alignment=256))
    assert (file.alignment, file.data_offset % 256, bytes(file.tensor_data("a"))) == (256, 0, b"wxyz")


def test_tensor_data_outlives_close(tmp_path: Path) -> None:
    file = read_model(tmp_path, assemble(tensors=[tensor("a", [1])], data=b"wxyz"))
    view = file.tensor_data("a")
    file.close()
    file.close()
    assert bytes(view) == b"wxyz"


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"nowhere\.gguf: no such file"):
        GGUFFile.open(tmp_path / "nowhere.gguf")


def test_a_folder_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="not a regular file"):
        GGUFFile.open(tmp_path)


def test_a_named_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileFormatError, match="not a regular file"):
        GGUFFile.open(tmp_path / "pipe")


def test_an_empty_file(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="empty"):
        read_model(tmp_path, b"")


U32 = ValueType.UINT32
HUGE = 1 << 62

MALFORMED: dict[str, tuple[bytes, str]] = {
    "not gguf": (assemble(magic=b"PK\x03\x04"), "not a GGUF file"),
    "older than gguf": (assemble(magic=b"tjgg"), "before GGUF"),
    "version 0": (assemble(version=0), "version 0 is not supported"),
    "version 1": (assemble(version=1), "version 1 is not supported"),
    "version 4": (assemble(version=4), "version 4 is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "ends in the header": (b"GGUF\x03\0\0\0\0\0", "ends inside the number of tensors"),
    "absurd number of keys": (assemble(n_keys=HUGE), f"{HUGE} keys cannot be"),
    "keys that cannot fit": (assemble(n_keys=1000), "1000 keys cannot be"),
    "absurd number of tensors": (assemble(n_tensors=HUGE), f"{HUGE} tensors cannot be"),
    "one key too few": (
        assemble([ARCHITECTURE, key("x", 8, string("y" * 20))], n_keys=3),
        "ends inside the length of the name of key 2",
    ),
    "key without a name": (assemble([key("", U32, bytes(4))]), "key 0 has an empty name"),
    "key that is not utf-8": (assemble([key(b"a\xff", U32, bytes(4))]), r"name of key 0 is not UTF-8.*at byte 33"),
    "overlong key": (assemble([key("k" * 65536, U32, bytes(4))]), "name of key 0 claims a length of 65536 bytes"),
    "duplicate key": (assemble([ARCHITECTURE, ARCHITECTURE]), "key 'general.architecture' appears twice"),
    "unknown value type": (assemble([key("x", 13, bytes(8))]), "key 'x' has the unknown value type 13"),
    "string beyond the file": (assemble([key("x", 8, struct.pack("<Q", 100) + b"abc")]), "ends inside the value of key 'x'"),
    "absurd string": (assemble([key("x", 8, struct.pack("<Q", 2**64 - 1))]), "value of key 'x' claims a length"),
    "string that is not utf-8": (assemble([key("x", 8, string(b"ab\xff"))]), "value of key 'x' is not UTF-8"),
    "number beyond the file": (assemble([key("x", ValueType.UINT64, bytes(7))]), "ends inside the value of key 'x'"),
    "boolean of 2": (assemble([key("x", ValueType.BOOL, b"\2")]), "key 'x' is a boolean with the value 2"),
    "array of booleans with a 7": (assemble([array("x", ValueType.BOOL, 3, b"\0\1\7")]), "item 2 of key 'x' is a boolean"),
    "array of arrays": (assemble([array("x", ValueType.ARRAY, 1, bytes(20))]), "key 'x' is an array of arrays"),
    "array of unknown type": (assemble([array("x", 99, 1, bytes(20))]), "items of key 'x' has the unknown value type 99"),
    "absurd array": (assemble([array("x", U32, HUGE, bytes(20))]), f"key 'x' claims {HUGE} items"),
    "array beyond the file": (assemble([array("x", U32, 6, bytes(20))]), "key 'x' claims 6 items where 20 bytes are left"),
    "array of strings beyond the file": (assemble([array("x", 8, 3, bytes(20))]), "key 'x' claims 3 items"),
    "item beyond the file": (
        assemble([array("x", 8, 2, string("ab") + struct.pack("<Q", 9))]),
        "item 1 of key 'x' reaches beyond",
    ),
    "alignment of 0": (assemble([key("general.alignment", U32, bytes(4))]), "'general.alignment' is 0"),
    "alignment of 48": (assemble([key("general.alignment", U32, struct.pack("<I", 48))]), "'general.alignment' is 48"),
    "absurd alignment": (
        assemble([key("general.alignment", U32, struct.pack("<I", 1 << 31))]),
        "'general.alignment' is 2147483648",
    ),
    "alignment that is text": (
        assemble([key("general.alignment", 8, string("32"))]),
        "'general.alignment' is '32', not a whole number",
    ),
    "overlong tensor name": (assemble(tensors=[tensor("t" * 64, [1])], data=bytes(4)), "name of tensor 0 claims a length of 64"),
    "tensor name that is not utf-8": (assemble(tensors=[tensor(b"\xc3", [1])], data=bytes(4)), "name of tensor 0 is not UTF-8"),
    "duplicate tensor": (
        assemble(tensors=[tensor("t", [1]), tensor("t", [1], offset=32)], data=bytes(64)),
        "tensor 't' appears twice",
    ),
    "five dimensions": (assemble(tensors=[tensor("t", [1] * 5)], data=bytes(4)), "tensor 't' has 5 dimensions"),
    "absurd dimensions": (
        assemble(tensors=[string("t") + struct.pack("<I", 1 << 31) + bytes(32)]),
        "tensor 't' has 2147483648 dimensions",
    ),
    "dimension of 0": (assemble(tensors=[tensor("t", [4, 0])], data=bytes(4)), "every dimension must be positive"),
    "negative dimension": (assemble(tensors=[tensor("t", [4, 2**64 - 4])], data=bytes(4)), "every dimension must be positive"),
    "elements overflow": (assemble(tensors=[tensor("t", [1 << 40, 1 << 40])], data=bytes(4)), "number of elements overflows"),
    "elements overflow to 0": (
        assemble(tensors=[tensor("t", [1 << 32, 1 << 32])], data=bytes(4)),
        "number of elements overflows",
    ),
    "bytes overflow": (assemble(tensors=[tensor("t", [1 << 31, 1 << 31])], data=bytes(4)), "reaches beyond the file"),
    "row of half a block": (
        assemble(tensors=[tensor("t", [48, 2], TensorType.Q4_0)], data=bytes(64)),
        "a row of 48 elements is not whole q4_0",
    ),
    "unknown tensor type": (
        assemble(tensors=[tensor("t", [1], 999)], data=bytes(4)),
        "tensor 't' has the unknown tensor type 999",
    ),
    "removed tensor type": (
        assemble(tensors=[tensor("t", [32], 31)], data=bytes(64)),
        "tensor 't' has the unknown tensor type 31",
    ),
    "misaligned tensor": (assemble(tensors=[tensor("t", [1], offset=4)], data=bytes(64)), "offset 4 is not a multiple of 32"),
    "tensor beyond the file": (
        assemble(tensors=[tensor("t", [1], offset=64)], data=bytes(64)),
        "tensor 't': its data .* reaches beyond",
    ),
    "tensor far beyond the file": (
        assemble(tensors=[tensor("t", [1], offset=2**64 - 32)], data=bytes(64)),
        "reaches beyond the file",
    ),
    "last byte missing": (assemble(tensors=[tensor("t", [16])], data=bytes(63)), "reaches beyond the file"),
    "no data at all": (assemble(tensors=[tensor("t", [16])]), "reaches beyond the file"),
    "tensors that overlap": (
        assemble(tensors=[tensor("s", [16], offset=32), tensor("t", [9])], data=bytes(128)),
        "tensors 't' and 's' overlap",
    ),
    "tensors in the same place": (assemble(tensors=[tensor("s", [1]), tensor("t", [1])], data=bytes(4)), "'s' and 't' overlap"),
    "ends in a tensor": (assemble(tensors=[tensor("t", [1])[:-1]]), "ends inside the offset of tensor 't'"),
}


@pytest.mark.parametrize(("content", "message"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_files(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(FileFormatError, match=message) as caught:
        read_model(tmp_path, content)
    assert str(tmp_path / "model.gguf") in str(caught.value)


def test_every_cut_of_a_good_file_is_refused(tmp_path: Path) -> None:
    writer = GGUFWriter("llama")
    writer.add("tokenizer.ggml.tokens", ["a", "bc", "é"])
    writer.add("llama.rates", [1.0, 2.0])
    writer.add_tensor("t", np.ones((2, 3), np.float32))
    path = tmp_path / "good.gguf"
    writer.write(path)
    content = path.read_bytes()
    with GGUFFile.open(path) as good:
        end = good.tensors["t"].offset + good.tensors["t"].n_bytes
    for n_bytes in range(end):
        with pytest.raises(FileFormatError):
            read_model(tmp_path, content[:n_bytes])
    assert read_model(tmp_path, content[:end]).architecture == "llama"


@pytest.mark.parametrize(
    "lengths",
    [
        [0] * 50,
        [3] * 1000,
        [256] * 40,
        [1, 255, 256, 257, 0, 0, 7] * 30,
        [300_000, 1, 2, 300_000, 5],
        list(range(600)),
    ],
    ids=["empty", "short", "long", "mixed", "beyond a window", "growing"],
)
@pytest.mark.parametrize("filler", [b"x", b"\0"], ids=["text", "nul"])
def test_string_arrays_of_all_lengths(tmp_path: Path, lengths: list[int], filler: bytes) -> None:
    """Strings that look unlike a vocabulary (long, empty, full of NULs) take the slow path, and must come out the same."""
    strings = [filler * length for length in lengths]
    content = assemble([ARCHITECTURE, array("x", ValueType.STRING, len(strings), b"".join(map(string, strings)))])
    found = read_model(tmp_path, content).metadata["x"]
    assert list(found.iter_bytes()) == strings
    assert found.bytes_at(-1) == strings[-1]


def test_text_that_looks_like_lengths(tmp_path: Path) -> None:
    """A string whose own bytes form a valid chain of lengths must not lead the walk astray."""
    decoys = [struct.pack("<Q", 2) + b"ab" + struct.pack("<Q", 1) + b"c", b"\0" * 7, b"\1" + b"\0" * 7, b"\0", b"", b"z"]
    strings = decoys * 200
    content = assemble([ARCHITECTURE, array("x", ValueType.STRING, len(strings), b"".join(map(string, strings)))])
    assert list(read_model(tmp_path, content).metadata["x"].iter_bytes()) == strings


def test_sound_descriptions_are_read_at_once_and_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may have a hundred thousand tensors; what is read step by step is only what something is wrong with."""
    shapes = [([], TensorType.F32), ([3], TensorType.F16), ([64, 2], TensorType.Q4_0), ([32, 1, 2], TensorType.I32)]
    shapes += [([256, 1, 1, 2], TensorType.Q6_K), ([1] * 4, TensorType.F64)]
    tensors = [tensor(f"t.{i}.é", *shapes[i % len(shapes)], offset=i * 512) for i in range(200)]
    content = assemble([ARCHITECTURE], tensors=tensors, data=bytes(200 * 512))
    n_slow = 0
    step_by_step = reader._Parser.tensor

    def counted(self: reader._Parser, name: str, begin: int) -> reader._Description:
        nonlocal n_slow
        n_slow += 1
        return step_by_step(self, name, begin)

    monkeypatch.setattr(reader._Parser, "tensor", counted)
    fast = read_model(tmp_path, content).tensors
    assert n_slow == 0
    monkeypatch.setattr(reader._Parser, "sound_tensor", lambda self, begin: None)
    assert read_model(tmp_path, content).tensors == fast
    assert n_slow == len(fast) == 200
    assert fast["t.2.é"].n_bytes == 64 * 2 // 32 * 18
