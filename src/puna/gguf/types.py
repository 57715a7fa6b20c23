"""Value types and tensor types of GGUF files, numbered as ggml 0.25.3 numbers them.

Knows sizes, not encodings: how a block's bytes become numbers is ggml's business.
"""

from __future__ import annotations

import struct
from enum import IntEnum


class ValueType(IntEnum):
    """What a metadata value is stored as."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


SCALARS: dict[ValueType, struct.Struct] = {
    ValueType.UINT8: struct.Struct("<B"),
    ValueType.INT8: struct.Struct("<b"),
    ValueType.UINT16: struct.Struct("<H"),
    ValueType.INT16: struct.Struct("<h"),
    ValueType.UINT32: struct.Struct("<I"),
    ValueType.INT32: struct.Struct("<i"),
    ValueType.FLOAT32: struct.Struct("<f"),
    ValueType.BOOL: struct.Struct("<B"),
    ValueType.UINT64: struct.Struct("<Q"),
    ValueType.INT64: struct.Struct("<q"),
    ValueType.FLOAT64: struct.Struct("<d"),
}
"""Value types of fixed size; strings and arrays are not among them."""

NUMPY_NAMES: dict[ValueType, str] = {
    ValueType.UINT8: "u1",
    ValueType.INT8: "i1",
    ValueType.UINT16: "<u2",
    ValueType.INT16: "<i2",
    ValueType.UINT32: "<u4",
    ValueType.INT32: "<i4",
    ValueType.FLOAT32: "<f4",
    ValueType.BOOL: "u1",
    ValueType.UINT64: "<u8",
    ValueType.INT64: "<i8",
    ValueType.FLOAT64: "<f8",
}


class TensorType(IntEnum):
    """How a tensor's rows are encoded: blocks of ``block_size`` elements in ``block_bytes`` bytes each."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41
    Q2_0 = 42

    @property
    def block_size(self) -> int:
        return _BLOCKS[self][0]

    @property
    def block_bytes(self) -> int:
        return _BLOCKS[self][1]

    @property
    def is_quantized(self) -> bool:
        return self.block_size > 1

    @property
    def is_multiplied(self) -> bool:
        """Whether ggml has a product of such a matrix; it ends the process over others."""
        return self not in _NEVER_MULTIPLIED

    @property
    def ggml_name(self) -> str:
        """The name ggml prints: ``q4_K``, ``iq2_xxs``, ``f16``."""
        return _ggml_spelling(self.name)

    @classmethod
    def from_name(cls, name: str) -> TensorType:
        """Find a type by its name in any case: ``q4_k``, ``Q4_K``, ``f16``.

        Errors: KeyError for an unknown name.
        """
        return cls[name.upper()]

    def n_bytes(self, n_elements: int) -> int:
        """Bytes of *n_elements*, which must be a whole number of blocks."""
        n_blocks, rest = divmod(n_elements, self.block_size)
        if rest:
            raise ValueError(f"{n_elements} elements are not a whole number of {self.ggml_name} blocks of {self.block_size}")
        return n_blocks * self.block_bytes


def _ggml_spelling(name: str) -> str:
    lowered = name.lower()
    return lowered[:-1] + "K" if lowered.endswith("_k") else lowered


# Numbers, and what activations are rounded to before a product.
_NEVER_MULTIPLIED = frozenset(
    {
        TensorType.Q8_1,
        TensorType.Q8_K,
        TensorType.I8,
        TensorType.I16,
        TensorType.I32,
        TensorType.I64,
        TensorType.F64,
    }
)

_BLOCKS: dict[TensorType, tuple[int, int]] = {
    TensorType.F32: (1, 4),
    TensorType.F16: (1, 2),
    TensorType.Q4_0: (32, 18),
    TensorType.Q4_1: (32, 20),
    TensorType.Q5_0: (32, 22),
    TensorType.Q5_1: (32, 24),
    TensorType.Q8_0: (32, 34),
    TensorType.Q8_1: (32, 36),
    TensorType.Q2_K: (256, 84),
    TensorType.Q3_K: (256, 110),
    TensorType.Q4_K: (256, 144),
    TensorType.Q5_K: (256, 176),
    TensorType.Q6_K: (256, 210),
    TensorType.Q8_K: (256, 292),
    TensorType.IQ2_XXS: (256, 66),
    TensorType.IQ2_XS: (256, 74),
    TensorType.IQ3_XXS: (256, 98),
    TensorType.IQ1_S: (256, 50),
    TensorType.IQ4_NL: (32, 18),
    TensorType.IQ3_S: (256, 110),
    TensorType.IQ2_S: (256, 82),
    TensorType.IQ4_XS: (256, 136),
    TensorType.I8: (1, 1),
    TensorType.I16: (1, 2),
    TensorType.I32: (1, 4),
    TensorType.I64: (1, 8),
    TensorType.F64: (1, 8),
    TensorType.IQ1_M: (256, 56),
    TensorType.BF16: (1, 2),
    TensorType.TQ1_0: (256, 54),
    TensorType.TQ2_0: (256, 66),
    TensorType.MXFP4: (32, 17),
    TensorType.NVFP4: (64, 36),
    TensorType.Q1_0: (128, 18),
    TensorType.Q2_0: (64, 18),
}
