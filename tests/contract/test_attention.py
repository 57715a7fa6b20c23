"""Attention as one call, however the backend computes it, against double precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from puna.ml.ggml.backend import GGMLBackend
from puna.ml.tensor import DType
from puna.ml.turning import hadamard
from puna.native.kernels.build import PER_INSTRUCTIONS
from puna.native.kernels.library import ATTENTION, Kernels, kernels
from tests import needs
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
    "no mask": Case((Rows(150, 150),), head_dim=72, n_kv_heads=4, is_masked=False),
    "no mask, several": Case((Rows(9, 256), Rows(1, 37, begin=256)), is_masked=False, softcap=2.0),
    "turned keys and values": Case((Rows(9, 256), Rows(1, 512, begin=256)), head_dim=128, key_turn=128, value_turn=64),
    "turned wide keys": Case((Rows(30, 256),), head_dim=192, head_dim_v=128, key_turn=64, value_turn=128, n_kv_heads=1),
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

# By Puna's own kernel, with each instruction set.
INSTRUCTIONS = needs.instruction_sets()
ATTENDING = [name for name in INSTRUCTIONS if name in PER_INSTRUCTIONS["attention_instructions"]] or INSTRUCTIONS


@pytest.fixture(scope="module")
def own() -> Kernels:
    needs.kernels()
    return kernels()


@contextmanager
def using(own: Kernels, instructions: str) -> Iterator[None]:
    before = own.instructions
    own.use(instructions)
    try:
        yield
    finally:
        own.use(before)


@pytest.fixture(params=["fused", "stepwise", *INSTRUCTIONS])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def backend(tmp_path: Path, way: str, request: pytest.FixtureRequest) -> Iterator[GGMLBackend]:
    path = write_llama(tmp_path / "model.gguf")
    if way not in INSTRUCTIONS:
        with closing(GGMLBackend(path, n_threads=2, flash_attention=way == "fused")) as backend:
            yield backend
        return
    own = request.getfixturevalue("own")
    with using(own, way), closing(GGMLBackend(path, n_threads=2, kernels=own)) as backend:
        yield backend


@pytest.mark.parametrize("name", CASES)
def test_every_row_s_mixture_is_exact(backend: GGMLBackend, name: str) -> None:
    data = Data(CASES[name])
    with prepared(backend, data) as (run, result):
        run()
        assert error(result(), data.expected()) < EXACT


@pytest.mark.parametrize("width", [16, 64, 256])
def test_a_turn_is_a_product_with_its_matrix_and_its_own_inverse(backend: GGMLBackend, width: int) -> None:
    backend.allocate()
    context = backend.context(32)
    x = context.input(DType.F32, 512, 3, 5)
    once = context.turn(x.permute(0, 2, 1, 3), width)
    twice = context.turn(once, width)
    for tensor in (once, twice):
        context.output(tensor)
    values = np.random.default_rng(width).standard_normal((5, 3, 512), np.float32)
    context.set(x, values)
    for _ in range(2):
        context.set(x, values)
        assert context.compute()
    found, back = np.empty((3, 5, 512), np.float32), np.empty((3, 5, 512), np.float32)
    context.get(once, found)
    context.get(twice, back)
    context.close()
    expected = values.transpose(1, 0, 2).reshape(-1, width).astype(np.float64) @ hadamard(width)
    assert error(found, expected.reshape(found.shape)) < 1e-6
    assert error(back, values.transpose(1, 0, 2).astype(np.float64)) < 1e-6


@pytest.mark.parametrize("way", ["fused", *INSTRUCTIONS], indirect=True)
@pytest.mark.parametrize("name", QUANTISED)
def test_of_quantised_keys_and_values(backend: GGMLBackend, name: str) -> None:
    data = Data(QUANTISED[name])
    with prepared(backend, data) as (run, result):
        run()
        assert error(result(), data.expected()) < QUANTISED_QUERIES


def test_what_the_self_test_found_broken_is_left_to_ggml(tmp_path: Path, own: Kernels) -> None:
    found = []
    data = Data(CASES["a list of ranges"])
    for used, broken in ((None, ""), (own, "f16"), (own, "q8_0")):

        def allows(place: str, kind: str, broken: str = broken) -> bool:
            return (place, kind) != (ATTENTION, broken)

        backend = GGMLBackend(write_llama(tmp_path / "model.gguf"), n_threads=1, kernels=used, allows=allows)
        with prepared(backend, data) as (run, result):
            run()
            found.append(result())
        backend.close()
    of_ggml, vetoed, own_s = found
    assert np.array_equal(vetoed, of_ggml)
    assert not np.array_equal(own_s, of_ggml)


def test_many_ranges_are_several_nodes(tmp_path: Path, own: Kernels) -> None:
    case = Case(tuple(Rows(1 + i % 2, 256, begin=256 * i) for i in range(9)))
    backend = GGMLBackend(write_llama(tmp_path / "model.gguf"), n_threads=2, kernels=own)
    data = Data(case)
    with prepared(backend, data) as (run, result):
        for _ in range(3):
            run()
            assert error(result(), data.expected()) < EXACT
    backend.close()


# As sequences lie in a cache: each at the beginning of its own stretch, of different lengths, some in the middle of a prompt.
IN_COMPANY = (
    Rows(1, 256, hidden=0),
    Rows(1, 768, 3, begin=256, stride=1024, hidden=0),
    Rows(23, 1024, begin=3328, hidden=0),
    Rows(2, 512, begin=4352),  # with cells that are others', or forgotten
    Rows(7, 1536, begin=5120, hidden=0.9),
)
HEADS = {"a few heads": (6, 2, 64), "one head of keys": (9, 1, 96), "wide heads": (4, 4, 160)}


def mixtures(own: Kernels, folder: Path, data: Data, n_threads: int) -> Any:
    path = write_llama(folder / "model.gguf")
    with closing(GGMLBackend(path, n_threads=n_threads, kernels=own)) as backend, prepared(backend, data) as (run, result):
        run()
        mixed: np.ndarray[Any, Any] = result()
        return mixed


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.Q8_0, DType.Q4_0])
def test_a_row_s_mixture_does_not_depend_on_its_company(
    own: Kernels, tmp_path: Path, instructions: str, dtype: DType, heads: str
) -> None:
    """Nor on the number of threads: bit by bit."""
    n_heads, n_kv_heads, head_dim = HEADS[heads]
    how: dict[str, Any] = {"softcap": 3.0} if heads == "wide heads" else {"max_bias": 8.0} if heads == "one head of keys" else {}
    data = Data(Case(IN_COMPANY, head_dim, n_heads, n_kv_heads, dtype=dtype, has_sinks=heads == "a few heads", **how))
    with using(own, instructions):
        together = mixtures(own, tmp_path, data, 1)
        assert error(together, data.expected()) < 1e-4
        for n_threads in (2, 5):
            assert np.array_equal(mixtures(own, tmp_path, data, n_threads), together), n_threads
        for index, r in enumerate(IN_COMPANY):
            for begin, end in {(0, r.n_rows), (0, 1), (r.n_rows - 1, r.n_rows), (r.n_rows // 3, r.n_rows // 2 + 1)}:
                rows, alone = data.rows_alone(index, r.n_sequences - 1, begin, end)
                n_threads = 1 + begin % 3
                assert np.array_equal(mixtures(own, tmp_path, alone, n_threads), together[rows]), (index, begin, end, n_threads)


# Rows that take turns with those of another sequence over the same cells, a prompt's rows, and both with many cells.
SHARED = Rows(2, 64), Rows(4, 256, begin=64), Rows(40, 320, begin=320), Rows(33, 100, 2, begin=640, stride=128)
SHAPES: dict[str, dict[str, Any]] = {
    "heads of 64": {},
    "a softcap": {"softcap": 3.0, "head_dim": 160},
    "distances": {"max_bias": 8.0, "n_heads": 9, "n_kv_heads": 1},
    "sinks": {"has_sinks": True, "head_dim": 96, "n_heads": 3, "n_kv_heads": 3},
    "values in keys": {"head_dim": 128, "head_dim_v": 64, "values_in_keys": True, "n_kv_heads": 1},
}
SPOILT = (  # what is in the place of keys and of values, and of how many cells one is spoilt
    *((np.nan, 0, 1), (np.inf, 0, 1), (-np.inf, 0, 2)),
    *((0, np.nan, 1), (0, np.inf, 2), (0, -np.inf, 3)),
    *((np.nan, np.inf, 2), (np.inf, np.nan, 3)),
)
N_SPOILT = 32  # of a head's values, at most: a block


def shared_by_two(data: Data) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Every other row and every other cell become one sequence's, the rest another's; which rows and cells are the latter's."""
    is_other: list[NDArray[np.bool_]] = []
    for r, mask in zip(data.case.ranges, data.masks, strict=True):
        rows, cells = np.arange(r.n_rows) % 2, np.arange(r.n_cells) % 2
        mask[:, rows[:, None] != cells] = -np.inf
        mask[:, rows == 1, 1] = 0
        is_other += [rows == 1] * r.n_sequences
    return np.concatenate(is_other), np.arange(1, data.case.n_cells, 2)


@pytest.mark.parametrize("instructions", ATTENDING)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.Q8_0, DType.Q4_0])
def test_what_a_row_does_not_see_cannot_matter(own: Kernels, tmp_path: Path, instructions: str, shape: str, dtype: DType) -> None:
    """Bit by bit, whatever is held there; who sees it loses what is spoilt, and no more."""
    data = Data(Case(SHARED, dtype=dtype, **SHAPES[shape]))
    is_other, cells = shared_by_two(data)
    assert is_other.any()
    assert not is_other.all()
    with using(own, instructions):
        sound = mixtures(own, tmp_path, data, 1)
        assert error(sound, data.expected()) < 1e-4
        for of_keys, of_values, spoilt in SPOILT:
            found = mixtures(own, tmp_path, data.spoilt(cells[::spoilt], of_keys, of_values), spoilt)
            assert np.array_equal(found[~is_other], sound[~is_other]), (of_keys, of_values)
            if np.isnan(of_keys):
                assert np.isnan(found[is_other]).all()
            elif not of_keys and not data.case.values_in_keys:
                assert not np.isfinite(found[is_other][..., 0]).any()
                assert np.array_equal(found[..., N_SPOILT:], sound[..., N_SPOILT:])


@pytest.mark.parametrize("instructions", ATTENDING)
def test_a_row_that_sees_the_infinite_does_not_matter_to_others(own: Kernels, tmp_path: Path, instructions: str) -> None:
    """Neither where one that sees it lies in the same register as one whose largest score comes later."""
    data = Data(Case((Rows(64, 256, hidden=0),), n_heads=1, n_kv_heads=1))
    data.query[:, :, 0] = 1
    data.key[:] *= np.linspace(0.01, 1, 256)[:, None, None]  # the largest scores come last
    data.stored = data.key.astype(np.float16).view(np.uint8).reshape(-1), data.stored[1]
    data.masks[0][:] = 0
    data.masks[0][:, ::2, 7] = -np.inf
    with using(own, instructions):
        sound, found = (mixtures(own, tmp_path, d, 1) for d in (data, data.spoilt(np.array([7]), np.inf, 0)))
    assert np.array_equal(found[::2], sound[::2])
    assert np.isnan(found[1::2]).all()


@settings(max_examples=40, deadline=None)
@given(
    ranges=st.lists(
        st.builds(
            Rows,
            n_rows=st.integers(1, 70),
            n_cells=st.integers(1, 4).map(lambda n: 256 * n),
            n_sequences=st.integers(1, 4),
            begin=st.integers(0, 3).map(lambda n: 256 * n),
            stride=st.integers(1, 3).map(lambda n: 256 * n),
            hidden=st.sampled_from([0.0, 0.3, 0.99]),
        ),
        min_size=1,
        max_size=4,
    ),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 2), (9, 3), (12, 1), (8, 2)]),
    head_dim=st.sampled_from([32, 64, 80, 96, 128, 256, 40]),
    dtype=st.sampled_from([DType.F16, DType.Q8_0, DType.Q4_0]),
    softcap=st.sampled_from([0.0, 5.0]),
    max_bias=st.sampled_from([0.0, 8.0]),
    has_sinks=st.booleans(),
    instructions=st.sampled_from(INSTRUCTIONS),
    n_threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_every_shape_is_exact(
    own: Kernels,
    tmp_path_factory: pytest.TempPathFactory,
    ranges: list[Rows],
    heads: tuple[int, int],
    head_dim: int,
    dtype: DType,
    softcap: float,
    max_bias: float,
    has_sinks: bool,
    instructions: str,
    n_threads: int,
    seed: int,
) -> None:
    if dtype is not DType.F16:
        head_dim = max(32, head_dim // 32 * 32)
    case = Case(tuple(ranges), head_dim, *heads, dtype=dtype, softcap=softcap, max_bias=max_bias, has_sinks=has_sinks, seed=seed)
    data = Data(case)
    with using(own, instructions):
        assert error(mixtures(own, tmp_path_factory.mktemp("m"), data, n_threads), data.expected()) < 1e-4
