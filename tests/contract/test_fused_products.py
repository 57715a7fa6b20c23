"""What is computed together with products of packed matrices: several of them, the norm before, gates and sums after."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
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
from tests.lora import write_lora
from tests.packed import ALL_TYPES, error
from tests.puna_engine import PunaEngine
from tests.tiny import write_llama

needs.kernels()

Floats = NDArray[np.float32]
# A value that differs in its last bit may round to another of 255 steps; all else is the same.
SAME = 1e-3
EPS = 1e-5
N_IN = 512
COUNTS = (1, 2, 7, 70)

Matrices = Sequence[tuple[str, int]]  # types and rows


def write(path: Path, matrices: Matrices) -> Path:
    """Matrices of these types and numbers of rows, and a norm's weight."""
    writer = GGUFWriter("llama")
    writer.add("llama.block_count", 1)
    for i, (name, n_rows) in enumerate(matrices):
        kind = products.weight_types()[name]
        data, _ = products.random_weights(kind, N_IN * n_rows)
        writer.add_raw_tensor(f"blk.0.{i}.weight", (N_IN, n_rows), TensorType(kind), data)
    writer.add_tensor("blk.0.norm.weight", np.random.default_rng(9).uniform(0.5, 2, N_IN).astype(np.float32))
    writer.write(path)
    return path


class Opened:
    def __init__(self, backend: GGMLBackend, n_matrices: int) -> None:
        self.backend = backend
        self.weights: list[Any] = [backend.tensor(f"blk.0.{i}.weight", Use.MATRIX) for i in range(n_matrices)]
        self.norm: Any = backend.tensor("blk.0.norm.weight", Use.VECTOR)
        backend.allocate()
        backend.load(lambda _share: None)
        self.n_nodes = 0  # of the last graph

    def computed(self, build: Callable[..., Sequence[Any]], *inputs: Floats) -> list[Floats]:
        """What *build* makes of inputs of these values."""
        context = self.backend.context(64)
        tensors = [context.input(DType.F32, *reversed(values.shape)) for values in inputs]
        results = [context.use(result).contiguous() for result in build(*tensors)]
        for result in results:
            context.output(result)
        for tensor in tensors:
            context.forward(tensor)  # gets memory even where nothing depends on it
        self.n_nodes = context.n_nodes - len(results)
        for tensor, values in zip(tensors, inputs, strict=True):
            context.set(tensor, values)
        assert context.compute()
        found = [context.values(result).copy() for result in results]
        context.close()
        return found


@contextmanager
def opened(path: Path, n_matrices: int, own: Kernels | None = None, n_threads: int = 2) -> Iterator[Opened]:
    backend = GGMLBackend(path, n_threads=n_threads, use_mmap=False, kernels=own)
    try:
        yield Opened(backend, n_matrices)
    finally:
        backend.close()


def inputs(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


MIXTURES = [
    (("q4_K", 48), ("q4_K", 33), ("q6_K", 17)),
    (("q4_1", 16), ("q4_1", 16)),
    (("q5_0", 31), ("q8_0", 1), ("q5_1", 64), ("q4_1", 5)),  # rounded in two ways
    (("q4_0", 40), ("q6_K", 8)),
]


@pytest.mark.parametrize("matrices", MIXTURES, ids=lambda m: "-".join(name for name, _ in m))
def test_several_matrices_are_one_node_and_give_what_they_give_apart(tmp_path: Path, matrices: Matrices) -> None:
    n_kinds = len({kernels().puna_rounding(ALL_TYPES[name]) for name, _ in matrices})
    with opened(write(tmp_path / "m.gguf", matrices), len(matrices), kernels()) as model:
        for n in COUNTS:
            x = inputs(n, N_IN, seed=n)
            apart = model.computed(lambda x: [weight.mul_mat(x) for weight in model.weights], x)
            together = model.computed(lambda x: x.products(model.weights), x)
            views = len(matrices)
            assert model.n_nodes == views + 1 + (n_kinds if n > 1 else 0)
            for a, b in zip(apart, together, strict=True):
                assert np.array_equal(a, b)


@pytest.mark.parametrize("n", COUNTS)
def test_a_norm_is_part_of_what_multiplies(tmp_path: Path, n: int) -> None:
    path = write(tmp_path / "m.gguf", [("q4_K", 48), ("q6_K", 33)])
    results = []
    for own in (None, kernels()):
        with opened(path, 2, own) as model:
            x = 3 * inputs(n, N_IN)
            results.append(model.computed(lambda x, m=model: x.rms_norm(EPS, m.norm).products(m.weights), x))
            if own:
                assert model.n_nodes == 2 + (1 if n == 1 else 2)  # two views, one product, and what is rounded for both
    for found, expected in zip(results[1], results[0], strict=True):
        assert error(found, expected) < SAME


def test_a_norm_that_others_ask_for_is_computed(tmp_path: Path) -> None:
    with opened(write(tmp_path / "m.gguf", [("q4_0", 16)]), 1, kernels()) as model:
        x = inputs(3, N_IN)

        def both(x: Any) -> list[Any]:
            y = x.rms_norm(EPS, model.norm)
            return [y, model.weights[0].mul_mat(y)]

        normalised, product = model.computed(both, x)
        (expected,) = model.computed(lambda x: [model.weights[0].mul_mat(x)], normalised)
    assert error(product, expected) < SAME


@pytest.mark.parametrize("name", sorted(ALL_TYPES))
@pytest.mark.parametrize("gate", list(Gate))
def test_gate_and_up_are_one_node(tmp_path: Path, gate: Gate, name: str) -> None:
    path = write(tmp_path / "m.gguf", [(name, 72), (name, 72)])
    for n in COUNTS:
        results = []
        for own in (None, kernels()):
            with opened(path, 2, own) as model:
                results += model.computed(lambda x, m=model: [x.gated_product(m.weights, gate)], 0.1 * inputs(n, N_IN))
        assert model.n_nodes == (1 if n == 1 else 2)
        assert error(results[1], results[0]) < SAME


@pytest.mark.parametrize("next_name", ["q4_1", "q8_0", "q6_K", "f16"])
def test_what_is_gated_is_rounded_for_the_product_that_comes_next(tmp_path: Path, next_name: str) -> None:
    """In the same node, bit for bit as by itself."""
    path = write(tmp_path / "m.gguf", [("q4_K", N_IN), ("q5_0", N_IN), (next_name, 33)])
    for n in (*COUNTS, 200):
        for n_threads in (1, 2, 5):
            with opened(path, 3, kernels(), n_threads) as model:
                *both, down = model.weights
                x = 0.1 * inputs(n, N_IN, seed=n)
                (gated,) = model.computed(lambda x, b=both: [x.gated_product(b, Gate.SILU)], x)
                (expected,) = model.computed(lambda x, d=down: [d.mul_mat(x)], gated)
                (found,) = model.computed(lambda x, b=both, d=down: [d.mul_mat(x.gated_product(b, Gate.SILU))], x)
                assert model.n_nodes == (2 if n == 1 else 4)  # two inputs rounded in two ways, and two products
                assert np.array_equal(found, expected)


@pytest.mark.parametrize(("n_rows", "n_nodes"), [(96, 2), (72, 3)])
def test_gate_and_up_may_be_one_matrix(tmp_path: Path, n_rows: int, n_nodes: int) -> None:
    """In one node where up begins with a whole stripe."""
    path = write(tmp_path / "m.gguf", [("q5_K", n_rows)])
    results = []
    for own in (None, kernels()):
        with opened(path, 1, own) as model:
            results += model.computed(lambda x, m=model: [x.gated_product(m.weights, Gate.SILU)], 0.1 * inputs(5, N_IN))
    assert model.n_nodes == n_nodes
    assert results[1].shape == (5, n_rows // 2)
    assert error(results[1], results[0]) < SAME


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(sorted(ALL_TYPES)),
    n_rows=st.integers(1, 90),
    n=st.integers(1, 140),
    gate=st.sampled_from(Gate),
    n_threads=st.integers(1, 5),
)
def test_gates_of_every_size_are_those_of_the_products(
    tmp_path: Path, name: str, n_rows: int, n: int, gate: Gate, n_threads: int
) -> None:
    path = write(tmp_path / "m.gguf", [(name, n_rows), (name, n_rows)])
    with opened(path, 2, kernels(), n_threads) as model:
        x = 0.1 * inputs(n, N_IN, seed=n)
        g, up = (rows.astype(np.float64) for rows in model.computed(lambda x: x.products(model.weights), x))
        (found,) = model.computed(lambda x: [x.gated_product(model.weights, gate)], x)
    slope = g if gate is Gate.SILU else 2 * np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)
    np.testing.assert_allclose(found, g / (1 + np.exp(-slope)) * up, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", COUNTS)
def test_what_is_added_is_part_of_the_product(tmp_path: Path, n: int) -> None:
    with opened(write(tmp_path / "m.gguf", [("q4_1", 50)]), 1, kernels()) as model:
        (weight,) = model.weights
        values = inputs(n, N_IN), inputs(n, 50, seed=1), inputs(50, seed=2), inputs(n, 50, seed=3)
        (product,) = model.computed(lambda x: [weight.mul_mat(x)], values[0])
        alone = model.n_nodes
        orders: dict[str, Callable[..., Any]] = {
            "residual": lambda x, a, b, c: weight.mul_mat(x) + a,
            "the other way": lambda x, a, b, c: a + weight.mul_mat(x),
            "bias and residual": lambda x, a, b, c: weight.mul_mat(x) + b + a,
        }
        expected = {
            "residual": product + values[1],
            "the other way": product + values[1],
            "bias and residual": product + values[2] + values[1],
        }
        for order, build in orders.items():
            (found,) = model.computed(lambda *t, b=build: [b(*t)], *values)
            assert np.array_equal(found, expected[order])
            assert model.n_nodes == alone
        (found,) = model.computed(lambda x, a, b, c: [weight.mul_mat(x) + b + a + c], *values)
        assert np.array_equal(found, expected["bias and residual"] + values[3])
        assert model.n_nodes == alone + 1  # a third is ggml's to add
        # The product itself may be asked for as well.
        (found, summed) = model.computed(lambda x, a, b, c: (lambda y: [y, y + a])(weight.mul_mat(x)), *values)
        assert np.array_equal(found, product)
        assert np.array_equal(summed, expected["residual"])


def test_columns_that_lie_apart_are_added(tmp_path: Path) -> None:
    with opened(write(tmp_path / "m.gguf", [("q4_1", 50)]), 1, kernels()) as model:
        x, wide = inputs(6, N_IN), inputs(6, 70, seed=1)
        view: Callable[[Any], Any] = lambda wide: wide.view((50, 6), (4 * 70,), 4 * 20)  # noqa: E731
        (found,) = model.computed(lambda x, wide: [model.weights[0].mul_mat(x) + view(wide)], x, wide)
        (product,) = model.computed(lambda x: [model.weights[0].mul_mat(x)], x)
    assert np.array_equal(found, product + wide[:, 20:])


@pytest.mark.parametrize("matrices", [[("q4_0", 32), ("f32", 32)], [("f32", 32), ("q4_0", 32)]])
def test_where_one_is_not_packed_nothing_is_fused(tmp_path: Path, matrices: Matrices) -> None:
    results = []
    for own in (None, kernels()):
        with opened(write(tmp_path / "m.gguf", matrices), 2, own) as model:
            x = inputs(3, N_IN)
            results += model.computed(lambda x, m=model: [*x.products(m.weights), x.gated_product(m.weights, Gate.SILU)], x)
    for expected, found in zip(results[:3], results[3:], strict=True):
        assert error(found, expected) < SAME


def test_a_model_s_steps_have_fewer_nodes_and_switching_off_brings_all_back(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", dtype="q4_K", n_layers=2)
    counts, logits = [], []
    for use_kernels in (False, True):
        with PunaEngine(path, n_ctx=64, use_kernels=use_kernels) as engine:
            engine.decode([5, 6, 7], range(3), [0] * 3, [2])
            logits.append(engine.decode([8], [3], [0], [0]).copy())
            built = engine.forward._built
            assert built is not None
            counts.append(built.ctx.n_nodes)  # type: ignore[attr-defined]
    # Per layer two norms of two nodes each, the gate, two sums; and of the last norm two.
    assert counts[0] - counts[1] >= 2 * (2 * 2 + 1 + 2) + 2
    assert error(logits[1], logits[0]) < 5e-2


@pytest.mark.parametrize("changed", ["ffn_down", "ffn_gate", "attn_v"])
def test_adapters_change_what_they_change_without_these_products(tmp_path: Path, changed: str) -> None:
    """Low-rank matrices multiply the same inputs, which must be there for them."""
    path = write_llama(tmp_path / "m.gguf", dtype="q4_0", n_layers=2)
    adapter = write_lora(tmp_path / "a.gguf", path, [f"blk.{i}.{changed}.weight" for i in range(2)], alpha=64.0)
    ids = [7, 30, 9, 12, 200]
    logits, instructions = {}, []
    for use_kernels in (False, True):
        for adapters in ((), (adapter,)):
            with PunaEngine(path, n_ctx=64, use_kernels=use_kernels, adapters=adapters) as engine:
                logits[use_kernels, bool(adapters)] = engine.decode(ids, range(5), [0] * 5, range(5)).copy()
                instructions.append(engine.backend.instructions)
    assert [bool(name) for name in instructions] == [False, False, True, True]
    assert error(logits[True, True], logits[False, True]) < 5e-2
    assert error(logits[True, True], logits[True, False]) > 1e-1
