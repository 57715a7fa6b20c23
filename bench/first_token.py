"""From the command to the first word: ``puna run smollm2:135m hi`` against libllama's own load and first token.

Both sides are fresh processes on a warm disk cache, timed from their start to the first byte of the answer. Puna's figure
contains three processes (command line, server, runner), a template, HTTP twice and sampling; libllama's is one Python
process that opens the library, loads the file, reads the same prompt and picks one token.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import models
from bench.ending import interrupt_on_sigterm
from bench.facts import facts

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
    sides = {
        "puna run smollm2:135m hi": [sys.executable, "-m", "puna", "run", "smollm2:135m", "hi"],
        "libllama in a fresh process": [sys.executable, "-m", "bench.first_token", "--peer", str(path)],
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.runs):
        for name, command in sides.items():
            times[name].append(first_byte(command, environment))
    table = Table("from start to first token", "median s", "best s", title="First token, SmolLM2-135M Q4_1")
    for name, values in times.items():
        table.add_row(name, f"{statistics.median(values):.3f}", f"{min(values):.3f}")
    console = Console(width=120)
    console.print(table)
    console.print(facts(), soft_wrap=True)
    if args.json:
        args.json.write_text(json.dumps({"facts": facts(), "seconds": times}, indent=1))


if __name__ == "__main__":
    main()
