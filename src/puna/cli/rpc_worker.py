"""``puna rpc-worker``: lend this machine's memory and cores to models on another one."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from types import FrameType
from typing import Annotated

import typer

from puna.cli.format import human_bytes
from puna.settings import Address, parse_bytes

DEFAULT_PORT = 50052


def rpc_worker(
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; others than this machine's own are open to all.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on.")] = DEFAULT_PORT,
    memory: Annotated[str, typer.Option("--memory", help="The most to lend of each device, like 16G (unset: all).")] = "",
    threads: Annotated[int, typer.Option("--threads", min=0, help="Computing threads; 0: one per core.")] = 0,
) -> None:
    """Compute for models on other machines, which name this one in PUNA_RPC."""
    from puna.rpc.worker import Worker

    try:
        limit = parse_bytes(memory) if memory else None
    except ValueError as error:
        raise typer.BadParameter(f"{memory!r} is {error}", param_hint="--memory") from error
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    worker = Worker(host, port, limit=limit, n_threads=threads)
    if not Address(host=host).is_loopback:
        logging.warning(
            "Warning: the protocol has neither authentication nor encryption. Whoever reaches %s:%d can read what is computed "
            "here and have anything computed: let nobody but the machine that serves get there.",
            *(host, worker.port),
        )
    for index, device in enumerate(worker.devices):
        free, total = worker.memory(index)
        print(f"{device.description}: {human_bytes(free)} of {human_bytes(total)} free", flush=True)
    at = f"[{host}]" if ":" in host else host
    print(f"RPC worker (protocol {'.'.join(map(str, worker.version))}) on {at}:{worker.port}", flush=True)

    def end(_number: int, _frame: FrameType | None) -> None:
        # Not here: whoever holds a lock that closing needs is this very thread.
        threading.Thread(target=worker.close, daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    worker.serve()
