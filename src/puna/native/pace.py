"""How fast the tensor library computes here: ``python -m puna.native.pace`` prints seconds as JSON.

One product of a quantised matrix and one attention, as ggml computes them, small enough that the answer takes half a second: of
one thread, and of the time that it had a core. Several would wait for each other, and who asks has a machine that does other
things as well. ``compared`` has two libraries take turns at it: only what one machine does within one minute can be compared.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import numpy as np

from puna.native import products
from puna.native.ggml import BUFFER_USAGE_WEIGHTS, STATUS_SUCCESS, TYPE_F16, TYPE_F32, ggml
from puna.native.log import route_to_logging

COMMAND = (sys.executable, "-m", "puna.native.pace")
_TYPE = "q4_K"
_WIDTH, _COLUMNS = 2048, 64
_HEAD, _HEADS, _CELLS = 64, 16, 1024
_SAMPLE_S = 0.15
_ROUNDS = 3
_TIMEOUT_S = 30.0

Pace = dict[str, float]

# Of this thread's core alone, where that is told finely enough.
_is_fine = time.get_clock_info("thread_time").resolution <= 1e-5
_clock: Callable[[], float] = time.thread_time if _is_fine else time.perf_counter


def seconds() -> Pace:
    """The best time of each."""
    device = products.Cpu()
    ggml().ggml_backend_cpu_set_n_threads(device.backend, 1)
    return {"product": _product(device), "attention": _attention(device)}


def _product(device: products.Cpu) -> float:
    """Where ggml likes such weights best: packed, if it packs them."""
    g, kind = ggml(), products.weight_types()[_TYPE]
    places = [address for address in device.buffer_types.values() if address != device.plain]
    place = next((address for address in places if device.supports(address, kind, experts=False)), device.plain)
    data, _ = products.random_weights(kind, _WIDTH * products.N_OUTPUTS)
    with ExitStack() as stack:
        stored, computed = stack.enter_context(products.described()), stack.enter_context(products.described())
        weights = g.ggml_new_tensor_2d(stored, kind, _WIDTH, _WIDTH)
        inputs = g.ggml_new_tensor_2d(computed, TYPE_F32, _WIDTH, _COLUMNS)
        product = g.ggml_mul_mat(computed, weights, inputs)
        buffer = stack.enter_context(products.allocated(stored, place))
        stack.enter_context(products.allocated(computed, device.plain))
        g.ggml_backend_buffer_set_usage(buffer, BUFFER_USAGE_WEIGHTS)
        rows = np.tile(data, _WIDTH // products.N_OUTPUTS)
        g.ggml_backend_tensor_set(weights, rows.ctypes.data, 0, rows.nbytes)
        x = products.random_inputs((_COLUMNS, _WIDTH))
        g.ggml_backend_tensor_set(inputs, x.ctypes.data, 0, x.nbytes)
        return _best(device, computed, product)


def _attention(device: products.Cpu) -> float:
    g = ggml()
    with products.described() as computed:
        q = g.ggml_new_tensor_4d(computed, TYPE_F32, _HEAD, _COLUMNS, _HEADS, 1)
        k = g.ggml_new_tensor_4d(computed, TYPE_F16, _HEAD, _CELLS, _HEADS, 1)
        v = g.ggml_new_tensor_4d(computed, TYPE_F16, _HEAD, _CELLS, _HEADS, 1)
        result = g.ggml_flash_attn_ext(computed, q, k, v, None, 1 / math.sqrt(_HEAD), 0.0, 0.0)
        with products.allocated(computed, device.plain):
            for tensor, kind in ((q, np.float32), (k, np.float16), (v, np.float16)):
                values = products.random_inputs((g.ggml_nelements(tensor),)).astype(kind)
                g.ggml_backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)
            return _best(device, computed, result)


def _best(device: products.Cpu, context: int, result: int) -> float:
    g = ggml()
    graph = g.ggml_new_graph_custom(context, 16, False)
    g.ggml_build_forward_expand(graph, result)
    return best(lambda: bool(g.ggml_backend_graph_compute(device.backend, graph) == STATUS_SUCCESS))


def best(compute: Callable[[], bool]) -> float:
    """The least time of several; infinite where it fails."""
    end, least = time.perf_counter() + _SAMPLE_S, math.inf
    while time.perf_counter() < end or least == math.inf:
        begin = _clock()
        if not compute():
            return math.inf
        least = min(least, _clock() - begin)
    return least


def compared(one: str, other: str, command: Sequence[str] = COMMAND) -> Pace | None:
    """How many times as fast as the other the first is, by names of PUNA_LIBRARY; None where one of them does not run."""
    paces: dict[str, Pace] = {}
    for name in (one, other) * _ROUNDS:
        found = _asked(command, name)
        if found is None:
            return None
        paces[name] = {what: min(value, paces.get(name, {}).get(what, math.inf)) for what, value in found.items()}
    return {what: round(paces[other][what] / paces[one][what], 2) for what in paces[one]}


def _asked(command: Sequence[str], name: str) -> Pace | None:
    environ: Mapping[str, str] = {**os.environ, "PUNA_LIBRARY": name}
    try:
        done = subprocess.run(command, env=environ, capture_output=True, check=True, timeout=_TIMEOUT_S)
        return {str(what): float(value) for what, value in json.loads(done.stdout).items()}
    except (OSError, subprocess.SubprocessError, ValueError, AttributeError, TypeError):
        return None


def main() -> None:
    route_to_logging()
    print(json.dumps(seconds()))


if __name__ == "__main__":
    main()
