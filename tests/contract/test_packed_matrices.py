"""Matrices packed for Puna's own products, inside ggml's graphs: what they give, what they take, and when they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from puna.ml.backend import Use
from puna.ml.ggml.backend import GGMLBackend
from puna.ml.ggml.devices import cpu
from puna.ml.tensor import DType, Gate
from puna.native.ggml import DEVICE_TYPE_GPU
from puna.native.kernels.library import PLACE, kernels
from tests import needs
from tests.packed import ALL_TYPES, error
from tests.puna_engine import PunaEngine
from tests.tiny import write_llama

needs.kernels()

Floats = NDArray[np.float32]
SAME = 2e-6  # sums in another order


def inputs(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@contextmanager
def backend_of(path: Path, names: Sequence[tuple[str, Use]], **options: Any) -> Iterator[tuple[GGMLBackend, list[Any]]]:
    backend = GGMLBackend(path, n_threads=2, **options)
    try:
        tensors = [backend.tensor(name, use) for name, use in names]
        backend.allocate()
        backend.load(lambda _share: None)
        yield backend, tensors
    finally:
        backend.close()


def computed(backend: GGMLBackend, build: Callable[[Any, Any], Any], values: Floats) -> Floats:
    """What *build* makes of a context and an input of these values."""
    context = backend.context(64)
    x = context.input(DType.F32, *reversed(values.shape))
    result = build(context, x)
    context.output(result)
    context.set(x, values)
    assert context.compute()
    found = np.empty(tuple(reversed(result.shape)), np.float32)
    context.get(result, found)
    context.close()
    return found


UP = [("blk.0.ffn_up.weight", Use.MATRIX)]
ARRANGEMENTS: dict[str, tuple[tuple[int, ...], Callable[[Any, Any, Any], Any]]] = {
    "one column": ((1, 256), lambda _context, w, x: w.mul_mat(x)),
    "many columns": ((70, 256), lambda _context, w, x: w.mul_mat(x)),
    "columns apart": ((9, 300), lambda _context, w, x: w.mul_mat(x.view((256, 9), (4 * 300,), 4 * 7))),
    "values apart": ((256, 6), lambda _context, w, x: w.mul_mat(x.permute(1, 0, 2, 3))),
    "a batch of batches": ((2, 3, 5, 256), lambda _context, w, x: w.mul_mat(x)),
    "half precision": ((5, 256), lambda _context, w, x: w.mul_mat(x.cast(DType.F16))),
}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("dtype", ["q4_1", "q6_K"])
def test_products_are_ggml_s_however_the_input_lies(tmp_path: Path, dtype: str, arrangement: str) -> None:
    path = write_llama(tmp_path / "m.gguf", dtype=dtype)
    shape, build = ARRANGEMENTS[arrangement]
    results = []
    for own in (None, kernels()):
        with backend_of(path, UP, kernels=own) as (backend, (weight,)):
            if own is None and arrangement in ("values apart", "half precision"):  # ggml wants them otherwise
                plain = {"values apart": lambda c, x: weight.mul_mat(x.permute(1, 0, 2, 3).contiguous())}
                plain["half precision"] = lambda c, x: weight.mul_mat(x.cast(DType.F16).cast(DType.F32))
                results.append(computed(backend, plain[arrangement], inputs(*shape)))
            else:
                results.append(computed(backend, lambda c, x, w=weight: build(c, w, x), inputs(*shape)))  # type: ignore[misc]
    assert error(results[1], results[0]) < SAME


@pytest.mark.parametrize("dtype", sorted(ALL_TYPES))
def test_a_tied_table_is_packed_once_and_keeps_its_rows(tmp_path: Path, dtype: str) -> None:
    path = write_llama(tmp_path / "m.gguf", dtype=dtype, tied=True)
    names = [("token_embd.weight", Use.ROWS), ("token_embd.weight", Use.MATRIX)]
    tokens = np.array([5, 0, 250, 5], np.int32)
    rows = []
    for own in (None, kernels()):
        with backend_of(path, names, kernels=own) as (backend, (table, matrix)):
            if own:
                assert table.address == matrix.address
                assert backend.instructions == own.instructions
            context = backend.context(16)
            indices = context.input(DType.I32, 4)
            found = table.rows(indices)
            context.output(found)
            context.set(indices, tokens)
            assert context.compute()
            rows.append(context.values(found).copy())
            context.close()
    np.testing.assert_allclose(rows[1], rows[0], rtol=1e-6, atol=1e-7)


def test_a_table_that_is_no_matrix_stays_in_the_file(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", dtype="q4_K")
    with backend_of(path, [("token_embd.weight", Use.ROWS)], kernels=kernels(), use_mmap=True) as (backend, _):
        assert not backend.instructions
        assert backend.memory().mapped > 0


def test_what_is_packed_takes_little_more_than_the_file(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", dtype="q4_K", n_embd=1024, n_ff=2048, tied=True)
    with PunaEngine(path, n_ctx=64, use_kernels=True) as engine:
        memory = engine.backend.memory()
        taken = memory.input_weights + sum(memory.devices[-1].weights)
        assert taken <= 1.05 * sum(t.n_bytes for t in engine.backend.file.tensors.values())
        assert memory.mapped == 0


def test_activations_are_rounded_once_for_all_that_multiply_them(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", dtype="q4_K")
    names = [(f"blk.0.{part}.weight", Use.MATRIX) for part in ("attn_q", "attn_v", "ffn_up")]
    values = inputs(3, 256)
    with backend_of(path, names, kernels=kernels()) as (backend, weights):
        context = backend.context(64)
        x = context.input(DType.F32, 256, 3)
        for weight in weights:
            context.output(weight.mul_mat(x))
        assert context.n_nodes == len(weights) + 1
        context.close()
        # One column is rounded by every thread for itself: no node more, and nothing to wait for.
        context = backend.context(64)
        x = context.input(DType.F32, 256, 1)
        for weight in weights:
            context.output(weight.mul_mat(x))
        assert context.n_nodes == len(weights)
        context.close()
        # Another graph at the same place: its input may lie where that of the first did.
        alone = computed(backend, lambda _c, x: weights[1].mul_mat(x), values)
        again = computed(backend, lambda _c, x: weights[1].mul_mat(x), 2 * values)
    assert error(again, 2 * alone) < SAME


@pytest.mark.parametrize("n", [1, 2, 70])
@pytest.mark.parametrize("dtype", ["f16", "f32", "bf16"])
def test_matrices_of_floats_need_not_be_whole_blocks(tmp_path: Path, dtype: str, n: int) -> None:
    """As the feed-forward parts of encoders of images are: gated, and rounded for the next product."""
    path = write_llama(tmp_path / "m.gguf", dtype=dtype, n_ff=3 * 32 + 12)
    names = [(f"blk.0.ffn_{part}.weight", Use.MATRIX) for part in ("gate", "up", "down")]
    results = []
    for own in (None, kernels()):
        with backend_of(path, names, kernels=own) as (backend, (gate, up, down)):
            assert bool(backend.instructions) is bool(own)
            if own:
                assert len({type(weight) for weight in (gate, up, down)}) == 1, "one of them is left to ggml"

            def fed(_context: Any, x: Any, gate: Any = gate, up: Any = up, down: Any = down) -> Any:
                return x.gated_product([gate, up], Gate.SILU).products([down])[0]

            results.append(computed(backend, fed, inputs(n, 256)))
    assert error(results[1], results[0]) < (1e-3 if dtype == "f16" else 1e-2 if dtype == "bf16" else SAME)


def test_packed_matrices_are_multiplied_together(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", dtype="q4_0", n_kv_heads=2, n_embd=160, n_heads=4, n_ff=96)
    names = [f"blk.1.attn_{part}.weight" for part in "qkv"]
    values = inputs(5, 160)
    with backend_of(path, [(name, Use.MATRIX) for name in names], kernels=kernels()) as (backend, weights):
        apart = [computed(backend, lambda _c, x, w=w: w.mul_mat(x), values) for w in weights]  # type: ignore[misc]
        assert backend.joined(names) is None  # wherever they lie

        def together(_context: Any, x: Any) -> Any:
            query, key, value = (product.contiguous() for product in x.products(weights))
            return query.concat(key, 0).concat(value, 0)

        assert np.array_equal(computed(backend, together, values), np.concatenate(apart, axis=-1))


def test_a_graph_may_be_computed_again_and_again_with_any_number_of_threads(tmp_path: Path) -> None:
    """The pieces of a node's work are handed out anew each time."""
    path = write_llama(tmp_path / "m.gguf", dtype="q5_0", n_ff=1024)
    with backend_of(path, UP, kernels=kernels()) as (backend, (weight,)):
        context = backend.context(16)
        x = context.input(DType.F32, 256, 3)
        product = weight.mul_mat(x)
        context.output(product)
        expected = None
        for n_threads in (1, 2, 3, 7, 2, 1, 5) * 8:
            backend.set_threads(n_threads)
            context.set(x, inputs(3, 256))
            assert context.compute()
            found = context.values(product).copy()
            assert expected is None or np.array_equal(found, expected)
            expected = found
        context.close()


def test_what_the_self_test_forbids_is_ggml_s(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", dtype="q4_K")

    def allows(place: str, tensor_type: str) -> bool:
        return (place, tensor_type) != (PLACE, "q4_K")

    with backend_of(path, UP, kernels=kernels(), allows=allows) as (backend, _):
        assert not backend.instructions


def test_other_types_are_ggml_s(tmp_path: Path) -> None:
    with backend_of(write_llama(tmp_path / "m.gguf", dtype="tq2_0"), UP, kernels=kernels()) as (backend, _):
        assert not backend.instructions


def test_a_model_with_layers_elsewhere_is_ggml_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_llama(tmp_path / "m.gguf", dtype="q4_K")
    elsewhere = replace(cpu(), kind=DEVICE_TYPE_GPU)  # the CPU again, which is all that every machine has
    for others, packs in (([cpu()], True), ([elsewhere], False)):
        monkeypatch.setattr(GGMLBackend, "_assign", lambda self, _layers, first=others: [*first, *[cpu()] * self.n_layers])
        backend = GGMLBackend(path, n_threads=1, kernels=kernels())
        backend.tensor("blk.1.ffn_up.weight", Use.MATRIX)
        assert bool(backend.instructions) is packs
        backend.close()


@pytest.mark.parametrize("dtype", sorted(ALL_TYPES))
def test_a_model_computes_what_it_does_with_ggml_s(tmp_path: Path, dtype: str) -> None:
    path = write_llama(tmp_path / "m.gguf", dtype=dtype, n_layers=1, tied=True, seed=4)
    ids = [7, 30, 9, 12, 200, 31, 8, 90, 17]
    logits = []
    for use_kernels in (False, True):
        with PunaEngine(path, n_ctx=64, use_kernels=use_kernels) as engine:
            logits.append(engine.decode(ids, range(9), [0] * 9, range(9)).copy())
    assert error(logits[1], logits[0]) < 2e-2
