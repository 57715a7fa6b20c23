from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest

from puna.native.library import opened
from puna.native.waits import Waits

# Prints how often threads that wait for one that sleeps for a moment gave their cores away: as they are, with short waits, and
# with long ones again. OpenMP is told to look all but for ever.
PROGRAM = """
import ctypes, json, os, time
from pathlib import Path
from puna.native import products, structs
from puna.native.ggml import TYPE_F32, ggml
from puna.native.waits import waits

TASKS = Path("/proc/self/task")
STEPS = 5

@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
def work(node, thread, n_threads, data):
    if thread == 0:
        time.sleep(0.02)

def sleeps(task):
    lines = (TASKS / task / "status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))

cpu, g = products.Cpu(), ggml()
g.ggml_backend_cpu_set_n_threads(cpu.backend, 2)
found = []
with products.described() as context:
    x = g.ggml_new_tensor_1d(context, TYPE_F32, 64)
    address = ctypes.cast(work, ctypes.c_void_p).value
    y = g.ggml_custom_4d(context, TYPE_F32, 64, 1, 1, 1, structs.pointers([x]), 1, address, -1, None)
    z = g.ggml_add(context, y, y)
    with products.allocated(context, cpu.plain):
        graph = g.ggml_new_graph_custom(context, 16, False)
        g.ggml_build_forward_expand(graph, z)
        before = set(os.listdir(TASKS))
        g.ggml_backend_graph_compute(cpu.backend, graph)
        team = set(os.listdir(TASKS)) - before
        for short in (False, True, False):
            waits.shorten(short)
            time.sleep(0.5)
            counts = {task: sleeps(task) for task in team}
            for _ in range(STEPS):
                g.ggml_backend_graph_compute(cpu.backend, graph)
            found.append(max(sleeps(task) - counts[task] for task in team))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def uses_gomp() -> bool:
    opened()
    with open("/proc/self/maps") as maps:
        return "libgomp" in maps.read()


def test_threads_that_wait_sleep_while_they_are_told_to(uses_gomp: bool) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    told = {**environ, "GOMP_SPINCOUNT": "1000000000000"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=told, capture_output=True, text=True, check=True, timeout=120)
    as_they_are, short, long = json.loads(done.stdout)
    # A thread may give its core away for other reasons, but not at each of five steps.
    assert max(as_they_are, long) < 5
    assert (short >= 5) == uses_gomp


def test_what_is_so_already_takes_no_thread() -> None:
    waits = Waits()
    before = threading.active_count()
    try:
        for _ in range(5):
            waits.shorten(True)
        assert waits.are_short
        assert threading.active_count() <= before + 1
    finally:
        waits.shorten(False)
    assert not waits.are_short
