from __future__ import annotations

import pytest

from puna.gguf.types import TensorType


@pytest.mark.parametrize(
    ("name", "kind"), [("q4_k", TensorType.Q4_K), ("Q8_0", TensorType.Q8_0), ("iq2_XXS", TensorType.IQ2_XXS)]
)
def test_names_in_any_case(name: str, kind: TensorType) -> None:
    assert TensorType.from_name(name) is kind


def test_bytes_of_elements() -> None:
    assert TensorType.Q4_K.n_bytes(512) == 288
    assert TensorType.F16.n_bytes(3) == 6
    with pytest.raises(ValueError, match="100 elements are not a whole number of q4_K blocks of 256"):
        TensorType.Q4_K.n_bytes(100)


def test_quantised_types_have_blocks() -> None:
    assert TensorType.MXFP4.is_quantized
    assert not TensorType.BF16.is_quantized
