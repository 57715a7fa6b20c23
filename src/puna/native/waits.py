"""How long the tensor library's threads look for each other before they sleep, changed while they compute.

Waiting threads that look all the time are the first to know, and while nobody else wants their cores that is the fastest. Beside
other processes it is the slowest: who has looked all its time away, and is then one of many that compute without end, gets
its core for a moment and loses it in the middle of an operation for which all others wait. Threads that sleep at once when there
is nothing to do get their cores back as soon as there is.

GCC's OpenMP reads the number of looks (GOMP_SPINCOUNT) once, but takes very few, whatever that says, while a process has more of
its threads than there are cores. So a second team of threads, which computed one small sum and sleeps, makes all
others sleep early; when it ends they look long again. With another OpenMP it changes nothing.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack

from puna.host import usable_cores
from puna.native import structs
from puna.native.ggml import DEVICE_TYPE_CPU, TYPE_F32, ggml


class Waits:
    """Of all threads of this process that compute."""

    def __init__(self) -> None:
        self._end: threading.Event | None = None
        self._lock = threading.Lock()

    @property
    def are_short(self) -> bool:
        return self._end is not None

    def shorten(self, wanted: bool) -> None:
        """From some moment soon on; at once when it is so already."""
        with self._lock:
            if wanted and self._end is None:
                self._end = threading.Event()
                threading.Thread(target=_attend, args=(usable_cores() + 1, self._end), name="waits", daemon=True).start()
            elif not wanted and self._end is not None:
                self._end.set()
                self._end = None


waits = Waits()


def _attend(n_threads: int, end: threading.Event) -> None:
    """A team of so many threads until the end; it lasts as long as the thread that has begun it."""
    g = ggml()
    device = g.ggml_backend_dev_by_type(DEVICE_TYPE_CPU)
    with ExitStack() as stack:
        backend = g.ggml_backend_dev_init(device, None)
        stack.callback(g.ggml_backend_free, backend)
        g.ggml_backend_cpu_set_n_threads(backend, n_threads)
        context = structs.new_context(4 * g.ggml_tensor_overhead() + g.ggml_graph_overhead_custom(4, False))
        stack.callback(g.ggml_free, context)
        x = g.ggml_new_tensor_1d(context, TYPE_F32, n_threads)
        total = g.ggml_add(context, x, x)
        buffer = g.ggml_backend_alloc_ctx_tensors_from_buft(context, g.ggml_backend_dev_buffer_type(device))
        stack.callback(g.ggml_backend_buffer_free, buffer)
        g.ggml_backend_buffer_clear(buffer, 0)
        graph = g.ggml_new_graph_custom(context, 4, False)
        g.ggml_build_forward_expand(graph, total)
        g.ggml_backend_graph_compute(backend, graph)
        end.wait()
