"""Attention as one call, however the backend computes it, against double precision."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from puna.ml.ggml.backend import GGMLBackend
from puna.ml.tensor import DType
from puna.native.kernels.library import kernels
from tests.attended import Case, Data, Rows, prepared
from tests.packed import error
from tests.tiny import write_llama

CASES = {
    "one row": Case((Rows(1, 256),)),
    "a prompt": Case((Rows(70, 512),)),
    "several sequences": Case((Rows(1, 256, 3, begin=256, stride=512),)),
    "a list of ranges": Case((Rows(37, 256), Rows(1, 512, 2, begin=256, stride=512), Rows(2, 256, begin=1280))),
    "a softcap": Case((Rows(9, 256),), softcap=2.0),
    "sinks": Case((Rows(9, 256),), has_sinks=True),
    "distances": Case((Rows(9, 256),), n_heads=6, max_bias=8.0),
    "one head of keys": Case((Rows(3, 256),), head_dim=96, n_heads=5, n_kv_heads=1),
    "narrower values": Case((Rows(3, 256),), head_dim=192, head_dim_v=128, n_kv_heads=4),
    "values in keys": Case((Rows(3, 256),), head_dim=576, head_dim_v=512, n_kv_heads=1, values_in_keys=True),
}
QUANTISED = {
    f"{name}, {dtype.name}": Case((Rows(1, 512), Rows(20, 256, begin=512)), dtype=dtype, head_dim=head_dim)
    for dtype in (DType.Q8_0, DType.Q4_0)
    for name, head_dim in (("heads of 64", 64), ("heads of 128", 128))
}
EXACT = 5e-3  # queries are rounded to half precision
QUANTISED_QUERIES = 2e-2


KERNELS = kernels()


@pytest.fixture(params=["fused", "stepwise", *KERNELS.available()])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def opened(folder: Path, way: str) -> GGMLBackend:
    """By ggml, or by Puna's own kernel with an instruction set."""
    own = KERNELS if way in KERNELS.available() else None
    return GGMLBackend(write_llama(folder / "model.gguf"), n_threads=2, flash_attention=way != "stepwise", kernels=own)


@pytest.fixture
def backend(tmp_path: Path, way: str) -> Iterator[GGMLBackend]:
    before = KERNELS.instructions
    if way in KERNELS.available():
        KERNELS.use(way)
    backend = opened(tmp_path, way)
    yield backend
    backend.close()
    KERNELS.use(before)


@pytest.mark.parametrize("name", CASES)
def test_every_row_s_mixture_is_exact(backend: GGMLBackend, name: str) -> None:
    data = Data(CASES[name])
    with prepared(backend, data) as (run, result):
        run()
        assert error(result(), data.expected()) < EXACT


@pytest.mark.parametrize("way", ["fused", *KERNELS.available()], indirect=True)
@pytest.mark.parametrize("name", QUANTISED)
def test_of_quantised_keys_and_values(backend: GGMLBackend, name: str) -> None:
    data = Data(QUANTISED[name])
    with prepared(backend, data) as (run, result):
        run()
        assert error(result(), data.expected()) < QUANTISED_QUERIES
