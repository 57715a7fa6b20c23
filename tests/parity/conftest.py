"""What is compared with libllama here is compared with ggml's products, which are libllama's.

Puna's own sum in another order, which turns a rounding of an activation now and then; how close to exact arithmetic they
are is the matter of test_own_products.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def _products_of_ggml() -> Iterator[None]:
    before = os.environ.get("PUNA_KERNELS")
    os.environ["PUNA_KERNELS"] = "0"
    yield
    if before is None:
        del os.environ["PUNA_KERNELS"]
    else:
        os.environ["PUNA_KERNELS"] = before
