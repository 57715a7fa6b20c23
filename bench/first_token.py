"""From the command to the first word: ``puna run smollm2:135m hi`` against libllama's own load and first token.

Both sides are fresh processes on a warm disk cache, with Python's files compiled, timed from their start to the first byte of
the answer. Puna's figure contains four processes (command line, server, runner, templates), HTTP and sampling; libllama's
is one Python process that opens the library, loads the file, reads the same prompt and picks one token.

And from ``puna serve`` to the first answer of ``/``, beside a process of Python that imports numpy and ends.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import models
from bench.ending import interrupt_on_sigterm
from bench.facts import facts

_POLL_S = 0.002
PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
)


def first_byte(command: list[str], environment: dict[str, str]) -> float:
    """Seconds until the process writes the first byte of its output; it is ended then."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, env=environment
    )
    assert process.stdout is not None
    with process:
        try:
            data = os.read(process.stdout.fileno(), 1)
            elapsed = time.perf_counter() - begin
        finally:
            process.terminate()
    if not data:
        sys.exit(f"{' '.join(command)} ended without a word")
    return elapsed


def ready(environment: dict[str, str]) -> float:
    """Seconds until a server answers; it is ended then."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "puna", "serve"]
    begin = time.perf_counter()
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**environment, "OLLAMA_HOST": f"127.0.0.1:{port}"},
    ) as process:
        try:
            while process.poll() is None:
                with suppress(OSError, http.client.HTTPException):
                    connection = http.client.HTTPConnection("127.0.0.1", port)
                    connection.request("GET", "/")
                    if connection.getresponse().status == http.HTTPStatus.OK:
                        return time.perf_counter() - begin
                time.sleep(_POLL_S)
        finally:
            process.terminate()
    sys.exit("puna serve ended before it answered")


def importing() -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import numpy"], check=True)
    return time.perf_counter() - begin


def peer(path: str) -> None:
    """What the fresh libllama process does."""
    from tests.oracle import Oracle

    from puna.native.log import route_to_logging
    from puna.tokenizer.tokenizer import Tokenizer

    route_to_logging()
    oracle = Oracle(path, n_ctx=4096)
    tokenizer = Tokenizer(path)
    token = oracle.greedy(tokenizer.encode(PROMPT), 1)[0]
    print(tokenizer.decode([token]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7, help="of each side, alternating (default: %(default)s)")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write the times and the machine's facts to this file")
    args = parser.parse_args()
    if args.peer:
        peer(args.peer)
        return
    interrupt_on_sigterm()
    path = models.smollm2()
    # No server may answer: the time of starting one is part of the figure.
    environment = {**os.environ, "OLLAMA_MODELS": str(models.cache_dir() / "models"), "OLLAMA_HOST": "127.0.0.1:1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed Puna is compiled at its first start
    ours, theirs = "puna run smollm2:135m hi", "libllama in a fresh process"
    serving, python = "puna serve, until / answers", "python -c 'import numpy'"
    sides: dict[str, Callable[[], float]] = {
        ours: partial(first_byte, [sys.executable, "-m", "puna", "run", "smollm2:135m", "hi"], environment),
        theirs: partial(first_byte, [sys.executable, "-m", "bench.first_token", "--peer", str(path)], environment),
        serving: partial(ready, environment),
        python: importing,
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(args.runs + 1):
        for name, measure in sides.items():
            seconds = measure()
            if turn:  # the first one fills caches
                times[name].append(seconds)
    table = Table("from the process's start", "median s", "best s", "by its peer", title="First token, SmolLM2-135M Q4_1")
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, other in ((ours, theirs), (theirs, ""), (serving, python), (python, "")):
        ratio = f"{medians[name] / medians[other]:.2f}" if other else ""
        table.add_row(name, f"{medians[name]:.3f}", f"{min(times[name]):.3f}", ratio)
    console = Console(width=120)
    console.print(table)
    console.print(facts(), soft_wrap=True)
    if args.json:
        args.json.write_text(json.dumps({"facts": facts(), "seconds": times}, indent=1))


if __name__ == "__main__":
    main()
