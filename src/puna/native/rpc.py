"""The functions of ggml's RPC library (ggml-rpc.h), and a process that computes for one client: ``python -m puna.native.rpc``.

It lies beside the other libraries where it was compiled, and is opened only by who uses it. Both functions end the process where
the other side is not what they expect: puna.rpc looks first, and stands in front of the process that serves.
"""

from __future__ import annotations

import ctypes
import json
import sys
from functools import cache

from puna import guard
from puna.errors import LoadError, NativeLibraryError
from puna.host import usable_cores
from puna.native import cpu, log
from puna.native.ggml import DEVICE_TYPE_CPU, DEVICE_TYPE_GPU, DEVICE_TYPE_IGPU, ggml
from puna.native.library import Functions, opened
from puna.native.providers import BUILD

LONG = {
    "ggml_backend_rpc_add_server": "p s",
    "ggml_backend_rpc_start_server": "v sszzp",
}


@cache
def rpc() -> Functions:
    """Errors: NativeLibraryError where the library was built without it."""
    provider = opened().provider
    try:
        if not provider.path("ggml-rpc").exists():
            raise NativeLibraryError("there is no such file")
        return opened().bind("ggml-rpc", {}, LONG, {})
    except NativeLibraryError as error:
        raise NativeLibraryError(
            f"the tensor library ({provider.package}) was built without RPC devices: `{BUILD}` compiles one that has them"
        ) from error


def connected(endpoint: str) -> list[int]:
    """The addresses of a worker's devices. The connection stays open as long as the process.

    Errors: LoadError where it has none, or one that does not start; NativeLibraryError.
    """
    g = ggml()
    registry = rpc().ggml_backend_rpc_add_server(endpoint.encode())
    count = g.ggml_backend_reg_dev_count(registry) if registry else 0
    addresses = [g.ggml_backend_reg_dev_get(registry, index) for index in range(count)]
    # The library closes a connection that nothing uses any more, and would open another for each question.
    if not addresses or not g.ggml_backend_dev_init(addresses[0], None):
        raise LoadError(f"the RPC worker {endpoint} offers no device")
    return addresses


def offered() -> list[int]:
    """The devices of this machine that a worker offers: its GPUs, or else the CPU."""
    g = ggml()
    found = [g.ggml_backend_dev_get(index) for index in range(g.ggml_backend_dev_count())]
    gpus = [device for device in found if g.ggml_backend_dev_type(device) in (DEVICE_TYPE_GPU, DEVICE_TYPE_IGPU)]
    return gpus or [device for device in found if g.ggml_backend_dev_type(device) == DEVICE_TYPE_CPU]


def main() -> None:
    """Serve one client after the other on a port of this machine until the parent ends. Arguments: port; threads, 0: all cores.

    The first line of standard output says which devices there are.
    """
    port = int(sys.argv[1])
    n_threads = int(sys.argv[2]) or cpu.threads(cpu.physical_cores(), usable_cores(), cpu.cgroup_limits().cpus)
    guard.exit_with_parent()
    try:
        functions, devices = rpc(), offered()
    except NativeLibraryError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        raise SystemExit(1) from None
    log.hear(ggml().ggml_log_set)
    g = ggml()
    described = [
        {
            "description": g.ggml_backend_dev_description(device).decode(errors="replace"),
            "is_cpu": g.ggml_backend_dev_type(device) == DEVICE_TYPE_CPU,
        }
        for device in devices
    ]
    print(json.dumps({"devices": described}), flush=True)
    addresses = (ctypes.c_void_p * len(devices))(*devices)
    functions.ggml_backend_rpc_start_server(
        f"127.0.0.1:{port}".encode(), None, n_threads, len(devices), ctypes.addressof(addresses)
    )


if __name__ == "__main__":
    main()
