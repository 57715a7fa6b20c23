"""Quantise a model file in a process of its own: ``python -m puna.runner.process.quantise SOURCE TARGET FILE_TYPE``.

Prints one JSON object per line on standard output: ``{"done": bytes, "total": bytes}`` after each tensor, of the source's
bytes, and ``{"error": text}`` before it ends with status 1. It ends with the process that started it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from puna.errors import PunaError
from puna.gguf.reader import GGUFFile
from puna.guard import exit_with_parent
from puna.host import usable_cores
from puna.native import cpu
from puna.native.library import opened
from puna.native.log import route_to_logging
from puna.native.quantiser import quantise

_TENSOR = re.compile(r"\[ *\d+/ *\d+\] +(\S+) ")  # how libllama begins the line about a tensor that it has written
_FAILURE = "failed to quantize: "


class _Listener(logging.Handler):
    """Reads the progress, and the reason of a failure, from libllama's log: it tells neither anywhere else."""

    def __init__(self, n_bytes: Mapping[str, int]) -> None:
        super().__init__()
        self._n_bytes = n_bytes
        self._total = sum(n_bytes.values())
        self._done = 0
        self.reason = ""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if _FAILURE in text:  # at the end of a line that it interrupts
            self.reason = text.partition(_FAILURE)[2].strip()
        elif match := _TENSOR.match(text):
            self._done += self._n_bytes.get(match.group(1), 0)
            _say(done=self._done, total=self._total)


def _say(**fields: int | str) -> None:
    print(json.dumps(fields), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m puna.runner.process.quantise", description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("file_type", type=int, help="a number of enum llama_ftype")
    arguments = parser.parse_args()
    exit_with_parent()
    if hasattr(os, "nice"):
        os.nice(5)  # a server that answers goes first
    try:
        with GGUFFile.open(arguments.source) as file:
            listener = _Listener({name: tensor.n_bytes for name, tensor in file.tensors.items()})
        opened()
    except PunaError as error:
        _say(error=str(error))
        return 1
    route_to_logging()
    log = logging.getLogger("ggml")
    log.setLevel(logging.DEBUG)
    log.addHandler(listener)
    n_threads = cpu.threads(cpu.physical_cores(), usable_cores(), cpu.cgroup_limits().cpus)
    if not quantise(arguments.source, arguments.target, arguments.file_type, n_threads):
        _say(error=listener.reason or "libllama gives no reason")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
