"""Experts' matrices packed for Puna's own products, inside ggml's graphs, beside ggml's products of the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from puna.gguf.types import TensorType
from puna.gguf.writer import GGUFWriter
from puna.ml.backend import Use
from puna.ml.ggml.backend import GGMLBackend
from puna.ml.tensor import DType, Gate
from puna.native import products
from puna.native.kernels.library import Kernels, kernels
from tests import needs
from tests.packed import ALL_TYPES, TYPES_OF_256, WITH_GGML, error, rounded_for

needs.kernels()

Floats = NDArray[np.float32]
NAMES = ("blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight")


def write(path: Path, name: str, n_in: int, n_rows: int, n_experts: int) -> Path:
    tensor_type = ALL_TYPES[name]
    data, _ = products.random_weights(tensor_type, len(NAMES) * n_in * n_rows * n_experts)
    writer = GGUFWriter("llama")
    writer.add("llama.block_count", 1)
    for tensor, half in zip(NAMES, np.split(data, len(NAMES)), strict=True):
        writer.add_raw_tensor(tensor, (n_in, n_rows, n_experts), TensorType(tensor_type), half)
    writer.write(path)
    return path


class Products:
    """The two stacks of matrices of such a file, times what a step brings."""

    def __init__(self, path: Path, own: Kernels | None, n_threads: int = 2) -> None:
        self.backend = GGMLBackend(path, n_threads=n_threads, use_mmap=False, kernels=own)
        self.weights = [self.backend.tensor(name, Use.EXPERTS) for name in NAMES]
        self.backend.allocate()
        self.backend.load(lambda _share: None)
        assert bool(self.backend.instructions) == (own is not None)

    def of(self, x: Floats, experts: NDArray[np.int32], n_matrices: int = 1, *, is_view: bool = False) -> Floats:
        """X [n, n_used or 1, n_in], experts [n, n_used]; as a view they are the first of more."""
        context = self.backend.context(64)
        values = context.input(DType.F32, *reversed(x.shape))
        n, n_used = experts.shape
        stored = np.concatenate([experts, experts[:, :2] * 0 - 1], axis=1) if is_view else experts
        ids = context.input(DType.I32, *reversed(stored.shape))
        chosen = ids.view((n_used, n), (4 * stored.shape[1],), 0) if is_view else ids
        results = [weight.mul_mat_id(values, chosen) for weight in self.weights[:n_matrices]]
        for result in results:
            context.output(result)
        self.n_nodes = context.n_nodes
        context.set(values, x)
        context.set(ids, np.ascontiguousarray(stored))
        assert context.compute()
        found = np.empty((n_matrices, n, n_used, results[0].shape[0]), np.float32)
        for i, result in enumerate(results):
            context.get(result, found[i])
        context.close()
        return found

    def gated(self, x: Floats, experts: NDArray[np.int32], gate: Gate, *, are_one: bool) -> Floats:
        """The same through gate and up; *are_one*: as if the first stack held both. Takes note of the nodes."""
        context = self.backend.context(64)
        values = context.input(DType.F32, *reversed(x.shape))
        ids = context.input(DType.I32, *reversed(experts.shape))
        for tensor in (values, ids):
            context.forward(tensor)
        before = context.n_nodes
        result = values.gated_expert_product(self.weights[: 1 if are_one else 2], ids, gate)
        context.output(result)
        self.n_nodes = context.n_nodes - before
        context.set(values, x)
        context.set(ids, experts)
        assert context.compute()
        found = np.empty(result.shape[2::-1], np.float32)
        context.get(result, found)
        context.close()
        return found

    def close(self) -> None:
        self.backend.close()


@contextmanager
def both(path: Path) -> Iterator[tuple[Products, Products]]:
    opened = Products(path, kernels()), Products(path, None)
    try:
        yield opened
    finally:
        for one in opened:
            one.close()


def choices(rng: Any, n: int, n_used: int, n_experts: int) -> NDArray[np.int32]:
    """Different ones for each token; the first are chosen by most, the last by few."""
    likely = 1 / (1 + np.arange(n_experts))
    return np.stack([rng.choice(n_experts, n_used, replace=False, p=likely / likely.sum()) for _ in range(n)]).astype(np.int32)


@pytest.mark.parametrize("instructions", kernels().available())
@pytest.mark.parametrize("name", sorted(ALL_TYPES))
def test_products_with_experts_are_ggml_s(tmp_path: Path, name: str, instructions: str) -> None:
    n_in = 512 if name in TYPES_OF_256 else 96
    own, rng = kernels(), np.random.default_rng(3)
    before = own.instructions
    own.use(instructions)
    try:
        with both(write(tmp_path / "m.gguf", name, n_in, 40, 6)) as (puna, other):
            for n in (1, 2, 3, 9, 70):
                experts = choices(rng, n, 3, 6)
                for n_inputs in (1, 3):
                    x = rounded_for(name, rng.standard_normal((n, n_inputs, n_in), np.float32))
                    assert error(puna.of(x, experts), other.of(x, experts)) < WITH_GGML, (n, n_inputs)
    finally:
        own.use(before)


@pytest.mark.parametrize("instructions", kernels().available())
@pytest.mark.parametrize("name", ["q4_1", "q4_K", "q6_K", "f16"])
@pytest.mark.parametrize("gate", list(Gate))
def test_gate_and_up_are_one_node(tmp_path: Path, name: str, gate: Gate, instructions: str) -> None:
    """With the products' own bits, and as ggml gates them."""
    n_in = 512 if name in TYPES_OF_256 else 96
    own, rng = kernels(), np.random.default_rng(3)
    before = own.instructions
    own.use(instructions)
    try:
        with both(write(tmp_path / "m.gguf", name, n_in, 96, 6)) as (puna, other):
            for n in (1, 2, 9, 150):
                experts = choices(rng, n, 3, 6)
                for n_inputs in (1, 3):
                    x = rounded_for(name, rng.standard_normal((n, n_inputs, n_in), np.float32))
                    for are_one in (False, True):
                        found = puna.gated(x, experts, gate, are_one=are_one)
                        assert puna.n_nodes == (1 if n == 1 else 2)  # with what is rounded and brought in order
                        expected = other.gated(x, experts, gate, are_one=are_one)
                        assert error(found, expected) < (1e-3 if gate is Gate.GELU else WITH_GGML), (n, n_inputs, are_one)
    finally:
        own.use(before)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["q8_0", "q4_K"]),
    n_rows=st.integers(1, 70),
    n_experts=st.integers(1, 20),
    n_used=st.integers(1, 8),
    n=st.integers(1, 90),
    n_threads=st.integers(1, 5),
    is_view=st.booleans(),
)
def test_products_with_experts_of_any_shape(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    n_rows: int,
    n_experts: int,
    n_used: int,
    n: int,
    n_threads: int,
    is_view: bool,
) -> None:
    n_used = min(n_used, n_experts)
    path = write(tmp_path_factory.mktemp("experts") / "m.gguf", name, 256, n_rows, n_experts)
    rng = np.random.default_rng(n_rows)
    experts = choices(rng, n, n_used, n_experts)
    x = rng.standard_normal((n, n_used, 256), np.float32)
    with both(path) as (puna, other):
        puna.backend.set_threads(n_threads)
        assert error(puna.of(x, experts, is_view=is_view), other.of(x, experts)) < WITH_GGML


def test_a_token_s_result_does_not_depend_on_its_company(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    with both(write(tmp_path / "m.gguf", "q5_0", 160, 33, 8)) as (puna, _):
        experts, x = choices(rng, 40, 4, 8), rng.standard_normal((40, 1, 160), np.float32)
        together = puna.of(x, experts)
        for i in range(40):
            assert np.array_equal(puna.of(x[i : i + 1], experts[i : i + 1])[:, 0], together[:, i])


def test_gate_and_up_share_what_is_rounded(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    with both(write(tmp_path / "m.gguf", "q4_K", 256, 48, 8)) as (puna, other):
        for n, n_nodes in ((5, 3), (1, 2)):
            experts, x = choices(rng, n, 4, 8), rng.standard_normal((n, 1, 256), np.float32)
            assert error(puna.of(x, experts, 2), other.of(x, experts, 2)) < WITH_GGML
            assert puna.n_nodes == n_nodes


def test_a_graph_with_experts_may_be_computed_with_any_number_of_threads(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    with both(write(tmp_path / "m.gguf", "q4_0", 64, 200, 5)) as (puna, _):
        for n in (1, 7):
            experts, x = choices(rng, n, 2, 5), rng.standard_normal((n, 2, 64), np.float32)
            expected = puna.of(x, experts)
            for n_threads in (1, 3, 2, 8, 1, 4):
                puna.backend.set_threads(n_threads)
                assert np.array_equal(puna.of(x, experts), expected)
