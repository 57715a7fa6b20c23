"""Multiply small matrices with the tensor library and compare the results with plain arithmetic.

``python -m puna.native.products [--buffer-type NAME] [--tensor-type NAME]`` is a process to be thrown away: a kernel that
was compiled wrongly may kill it. It prints one JSON object per line as soon as it knows it: first ``library``, or ``unfit``
and no more, then every combination of buffer type and tensor type that is not supported, then the others, each announced
before it is tried.
Knows nothing of what is done with the answers (puna.native.selftest).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from puna.errors import NativeLibraryError
from puna.native import structs
from puna.native.fit import device_misfits
from puna.native.ggml import (
    BUFFER_USAGE_WEIGHTS,
    DEVICE_TYPE_CPU,
    STATUS_SUCCESS,
    TYPE_COUNT,
    TYPE_F32,
    TYPE_I32,
    ggml,
    ggml_backend_dev_props,
    ggml_type_traits,
)
from puna.native.kernels.library import ATTENTION, PLACE, is_usable, kernels
from puna.native.library import opened
from puna.native.llama import llama

N_INPUTS, N_OUTPUTS = 512, 64  # whole blocks and whole tiles of every format
COLUMNS = (1, 7, 33)  # kernels for one column, for a tile with a remainder, and for many
N_EXPERTS, N_USED, N_TOKENS = 4, 2, 5
N_THREADS = 2
# Activations are rounded to 8 bits for quantised weights and to the weights' own type otherwise.
TOLERANCE = 2e-2
TOLERANCE_F32 = 1e-4

Floats = NDArray[np.float32]


@contextlib.contextmanager
def described() -> Iterator[int]:
    g = ggml()
    context = structs.new_context(16 * g.ggml_tensor_overhead() + g.ggml_graph_overhead_custom(16, False))
    try:
        yield context
    finally:
        g.ggml_free(context)


@contextlib.contextmanager
def allocated(context: int, buffer_type: int) -> Iterator[int]:
    """Memory for all tensors of a context."""
    g = ggml()
    buffer = g.ggml_backend_alloc_ctx_tensors_from_buft(context, buffer_type)
    if not buffer:
        raise MemoryError(f"no memory for a test tensor in {_buffer_type_name(buffer_type)}")
    try:
        yield buffer
    finally:
        g.ggml_backend_buffer_free(buffer)


def _buffer_type_name(buffer_type: int) -> str:
    return str(ggml().ggml_backend_buft_name(buffer_type).decode())


def _traits(tensor_type: int) -> ggml_type_traits:
    return ggml_type_traits.from_address(ggml().ggml_get_type_traits(tensor_type))


def weight_types() -> dict[str, int]:
    """Every tensor type that weights can have, by ggml's name: those that can be decoded."""
    found = {"f32": TYPE_F32}
    for tensor_type in range(TYPE_COUNT):
        traits = _traits(tensor_type)
        if traits.type_size and traits.to_float:
            found[traits.type_name.decode()] = tensor_type
    return found


def decode(tensor_type: int, data: NDArray[np.uint8], n_elements: int) -> Floats:
    """The numbers that encoded weights stand for, by the library's plain reference code."""
    if tensor_type == TYPE_F32:
        return data.view(np.float32)
    values = np.empty(n_elements, np.float32)
    to_float = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(_traits(tensor_type).to_float)
    to_float(data.ctypes.data, values.ctypes.data, n_elements)
    return values


@cache
def random_weights(tensor_type: int, n_elements: int) -> tuple[NDArray[np.uint8], Floats]:
    """Encoded weights and their values.

    Blocks of random bytes are weights of some scale in every format; kept are those whose largest value lies between
    1 and 4. So nothing here depends on a format, and no slow search for the best encoding is needed.
    """
    rng = np.random.default_rng(tensor_type)
    if tensor_type == TYPE_F32:
        values = rng.standard_normal(n_elements, np.float32)
        return values.view(np.uint8), values
    block_len, block_bytes = int(_traits(tensor_type).blck_size), int(_traits(tensor_type).type_size)
    n_blocks = n_elements // block_len
    n_candidates = max(512, 4 * n_blocks)
    kept: list[NDArray[np.uint8]] = []
    n_kept = 0
    while n_kept < n_blocks:
        candidates = rng.integers(0, 256, (n_candidates, block_bytes), np.uint8)
        values = decode(tensor_type, candidates.reshape(-1), n_candidates * block_len).reshape(n_candidates, block_len)
        with np.errstate(invalid="ignore"):
            largest = np.abs(values).max(axis=1)
        good = candidates[(largest >= 1) & (largest < 4)]
        kept.append(good)
        n_kept += len(good)
    data = np.concatenate(kept)[:n_blocks].reshape(-1)
    return data, decode(tensor_type, data, n_elements)


class Cpu:
    """The CPU device with a backend to compute on."""

    def __init__(self) -> None:
        """Errors: NativeLibraryError where the library is not what the tables say."""
        g = ggml()
        llama()
        self.device: int = g.ggml_backend_dev_by_type(DEVICE_TYPE_CPU)
        for misfit in device_misfits(g, self.device, ggml_backend_dev_props()):
            raise opened().misfit(misfit)
        self.plain: int = g.ggml_backend_dev_buffer_type(self.device)
        self.buffer_types = {_buffer_type_name(t): t for t in (self.plain, *structs.extra_buffer_types(self.device))}
        self.backend: int = g.ggml_backend_dev_init(self.device, None)
        g.ggml_backend_cpu_set_n_threads(self.backend, N_THREADS)

    def supports(self, buffer_type: int, tensor_type: int, *, experts: bool) -> bool:
        """Whether the device multiplies weights of this type that lie in such a buffer."""
        g = ggml()
        empty = g.ggml_backend_buft_alloc_buffer(buffer_type, 0)
        try:
            with described() as context:
                weights, product, _ = _experts(context, tensor_type) if experts else _plain(context, tensor_type, 1)
                structs.set_buffer(weights, empty)
                answer = bool(g.ggml_backend_dev_supports_op(self.device, product))
                structs.set_buffer(weights, None)
                return answer
        finally:
            g.ggml_backend_buffer_free(empty)

    def error(self, buffer_type: int, tensor_type: int, n_columns: int | None) -> float:
        """Normalised error of one product; *n_columns* None means a product with experts."""
        g = ggml()
        n_matrices = N_EXPERTS if n_columns is None else 1
        data, values = random_weights(tensor_type, n_matrices * N_INPUTS * N_OUTPUTS)
        matrices = values.reshape(n_matrices, N_OUTPUTS, N_INPUTS).astype(np.float64)
        with described() as stored, described() as computed:
            if n_columns is None:
                weights, product, inputs = _experts(stored, tensor_type, computed)
                x, ids = random_inputs((N_TOKENS, N_USED, N_INPUTS)), chosen_experts()
                expected = np.einsum("tuoi,tui->tuo", matrices[ids], x)
                contents: list[NDArray[Any]] = [x, ids]
            else:
                weights, product, inputs = _plain(stored, tensor_type, n_columns, computed)
                x = random_inputs((n_columns, N_INPUTS))
                expected = x @ matrices[0].T
                contents = [x]
            with allocated(stored, buffer_type) as buffer, allocated(computed, self.plain):
                g.ggml_backend_buffer_set_usage(buffer, BUFFER_USAGE_WEIGHTS)
                g.ggml_backend_tensor_set(weights, data.ctypes.data, 0, data.nbytes)
                for tensor, content in zip(inputs, contents, strict=True):
                    g.ggml_backend_tensor_set(tensor, content.ctypes.data, 0, content.nbytes)
                graph = g.ggml_new_graph_custom(computed, 16, False)
                g.ggml_build_forward_expand(graph, product)
                if g.ggml_backend_graph_compute(self.backend, graph) != STATUS_SUCCESS:
                    return math.inf
                result = np.empty(expected.shape, np.float32)
                g.ggml_backend_tensor_get(product, result.ctypes.data, 0, result.nbytes)
        difference = result - expected
        return float(np.sqrt((difference**2).sum() / (expected**2).sum()))


def _plain(stored: int, tensor_type: int, n_columns: int, computed: int | None = None) -> tuple[int, int, list[int]]:
    """Weights, product and inputs of a matrix product."""
    g = ggml()
    computed = computed or stored
    weights = g.ggml_new_tensor_2d(stored, tensor_type, N_INPUTS, N_OUTPUTS)
    x = g.ggml_new_tensor_2d(computed, TYPE_F32, N_INPUTS, n_columns)
    return weights, g.ggml_mul_mat(computed, weights, x), [x]


def _experts(stored: int, tensor_type: int, computed: int | None = None) -> tuple[int, int, list[int]]:
    """The same where each column names which of several matrices it is multiplied with."""
    g = ggml()
    computed = computed or stored
    weights = g.ggml_new_tensor_3d(stored, tensor_type, N_INPUTS, N_OUTPUTS, N_EXPERTS)
    x = g.ggml_new_tensor_3d(computed, TYPE_F32, N_INPUTS, N_USED, N_TOKENS)
    ids = g.ggml_new_tensor_2d(computed, TYPE_I32, N_USED, N_TOKENS)
    return weights, g.ggml_mul_mat_id(computed, weights, x, ids), [x, ids]


def random_inputs(shape: tuple[int, ...]) -> Floats:
    return np.random.default_rng(shape[0]).standard_normal(shape, np.float32)


def chosen_experts() -> NDArray[np.int32]:
    token, slot = np.ogrid[:N_TOKENS, :N_USED]
    return np.ascontiguousarray((token + 2 * slot) % N_EXPERTS, np.int32)


def _check(cpu: Multiplier, buffer_type: int, tensor_type: int) -> dict[str, Any]:
    cases: dict[str, int | None] = {f"{n} column{'s' if n > 1 else ''}": n for n in COLUMNS}
    if cpu.supports(buffer_type, tensor_type, experts=True):
        cases["experts"] = None
    worst = 0.0
    for case, n_columns in cases.items():
        error = cpu.error(buffer_type, tensor_type, n_columns)
        if not error <= (TOLERANCE_F32 if tensor_type == TYPE_F32 else TOLERANCE):
            return {"status": "broken", "reason": f"wrong result with {case} (normalised error {error:.3g})"}
        worst = max(worst, error)
    return {"status": "ok", "error": worst}


class Multiplier(Protocol):
    """What multiplies weights that lie in memory of some kind."""

    def supports(self, buffer_type: int, tensor_type: int, *, experts: bool) -> bool: ...
    def error(self, buffer_type: int, tensor_type: int, n_columns: int | None) -> float: ...


def check(
    only_buffer_type: str | None = None,
    only_tensor_type: str | None = None,
    own: Callable[[Cpu], dict[str, Multiplier]] | None = None,
) -> Iterator[dict[str, Any]]:
    """Lines for every combination asked for; *own* are Puna's kernels, by name, as if each were a kind of memory."""
    try:
        cpu = Cpu()
    except NativeLibraryError as error:
        yield {"unfit": str(error)}
        return
    types = weight_types()
    places: dict[str, tuple[Multiplier, int]] = {name: (cpu, address) for name, address in cpu.buffer_types.items()}
    if own:
        places |= {name: (kernel, 0) for name, kernel in own(cpu).items()}
    yield {"library": {"version": opened().version, "buffer_types": list(places), "tensor_types": list(types)}}
    supported: list[tuple[str, str]] = []
    for buffer_type, (multiplier, address) in places.items():
        for tensor_type, number in types.items():
            if only_buffer_type not in (None, buffer_type) or only_tensor_type not in (None, tensor_type):
                continue
            if multiplier.supports(address, number, experts=False):
                supported.append((buffer_type, tensor_type))
            else:
                yield {"buffer_type": buffer_type, "tensor_type": tensor_type, "status": "unsupported"}
    for buffer_type, tensor_type in supported:
        yield {"buffer_type": buffer_type, "tensor_type": tensor_type, "status": "trying"}
        answer = _check(*places[buffer_type], types[tensor_type])
        yield {"buffer_type": buffer_type, "tensor_type": tensor_type, **answer}
    yield {"finished": True}


def own_kernels(cpu: Cpu) -> dict[str, Multiplier]:
    from puna.native.kernels.attention_trial import OwnAttention
    from puna.native.kernels.trial import OwnProducts

    return {PLACE: OwnProducts(cpu, kernels()), ATTENTION: OwnAttention(cpu, kernels())}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m puna.native.products", description=__doc__)
    parser.add_argument("--buffer-type")
    parser.add_argument("--tensor-type")
    arguments = parser.parse_args()
    os.environ["OMP_WAIT_POLICY"] = "passive"  # threads that spin would take seconds where other processes compute
    own = own_kernels if is_usable() else None
    for line in check(arguments.buffer_type, arguments.tensor_type, own):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:  # noqa: BLE001 - the process's edge: the text is its answer
        sys.exit(f"{type(error).__name__}: {error}")
