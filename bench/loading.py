"""From a request for a model that is not loaded to its first token: with and without a spare runner, and beside llama-cpp-python.

Puna's server is up and has the model; the request starts a runner, or takes the spare one. The first load of a large model packs
its matrices and keeps them, which later loads find: both have rows, for a model of the store and for a file where it lies.
llama-cpp-python is a fresh Python process that imports the package, loads the file and picks one token, timed from its start.
The same prompt, context and threads, on a warm disk cache, taking turns. The rows "after" another model load one where only one
may be loaded: the other has to go.

Resident memory is that of the process which computed the token, right after it, pages of files that it maps included.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from rich.table import Table

from bench import models
from bench.ending import interrupt_on_sigterm
from bench.facts import facts
from bench.load import chaos, contenders
from bench.report import report
from puna import packed_files
from puna.ml.ggml.packed_cache import KEPT_FROM_BYTES
from puna.ml.ggml.packed_origin import SETTLED_NS, stamps_changes
from puna.native import cpu

PROMPT = "Once upon a time there was a little fox."
N_CTX = 2048
READY_S = 30.0
KEPT_S = 120.0
SIDES = ("spare", "cold", "peer")

PEER = """
import sys
from llama_cpp import Llama
model = Llama(sys.argv[1], n_ctx=int(sys.argv[2]), n_threads=int(sys.argv[3]), verbose=False)
answer = model.create_completion(sys.argv[4], max_tokens=1, temperature=0)
print(answer["choices"][0]["text"] or ".", flush=True)
print(open("/proc/self/statm").read().split()[1], flush=True)
"""


@dataclass
class Row:
    model: str
    what: str
    seconds: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})
    resident_bytes: dict[str, list[int]] = field(default_factory=lambda: {side: [] for side in SIDES})

    def add(self, side: str, loaded: tuple[float, int]) -> None:
        self.seconds[side].append(loaded[0])
        self.resident_bytes[side].append(loaded[1])

    def median_s(self, side: str) -> float | None:
        return statistics.median(self.seconds[side]) if self.seconds[side] else None

    def resident_mib(self, side: str) -> float | None:
        return statistics.median(self.resident_bytes[side]) / 2**20 if self.resident_bytes[side] else None


class Server:
    """Where at most one model is loaded."""

    def __init__(self, server: chaos.Server, models: Path, *, has_spare: bool) -> None:
        self._server = server
        self._models = models
        self._has_spare = has_spare
        self._client = httpx.Client(base_url=server.url, timeout=300)

    def create(self, name: str, path: Path) -> None:
        with contenders.scratch() as folder:
            (folder / "Modelfile").write_text(f"FROM {path}\n")
            command = [sys.executable, "-m", "puna", "create", name, "-f", str(folder / "Modelfile")]
            subprocess.run(command, env={**os.environ, "OLLAMA_HOST": self._server.url}, stdout=subprocess.DEVNULL, check=True)

    def wait_for_packed(self, n: int) -> None:
        """Until the packed weights of so many models are kept."""
        deadline = time.monotonic() + KEPT_S
        while time.monotonic() < deadline:
            names = [path.name for path in (self._models / packed_files.FOLDER).glob("*")]
            if len(names) == n and not any(name.endswith(packed_files.UNFINISHED) for name in names):
                return
            time.sleep(0.1)
        sys.exit("packed weights were not kept")

    def first_token(self, model: str) -> tuple[float, int]:
        """Seconds from the request to the answer's first piece, once there is a spare; the runner's resident bytes."""
        if self._has_spare:
            self._wait_for_spare()
        options = {"num_ctx": N_CTX, "num_predict": 1, "temperature": 0}
        body = {"model": model, "prompt": PROMPT, "raw": True, "options": options}
        begin = time.perf_counter()
        with self._client.stream("POST", "/api/generate", json=body) as response:
            parts = response.iter_bytes()
            data = next(parts)
            seconds = time.perf_counter() - begin
            for _ in parts:
                pass
        if response.status_code != 200 or b'"response"' not in data:
            sys.exit(f"{model} was not loaded: {data!r}")
        return seconds, max(runner.memory_info().rss for runner in self._server.look())

    def unload(self) -> None:
        for model in self._client.get("/api/ps").json()["models"]:
            self._client.post("/api/generate", json={"model": model["name"], "keep_alive": 0})
        while self._client.get("/api/ps").json()["models"]:
            time.sleep(0.02)

    def _wait_for_spare(self) -> None:
        """Until there is one that no longer imports."""
        deadline, before = time.monotonic() + READY_S, -1.0
        while time.monotonic() < deadline:
            time.sleep(0.3)
            used = sum(sum(child.cpu_times()[:2]) for child in self._server.look())
            if self._has_idle_spare() and used == before:
                return
            before = used
        sys.exit("there is no spare runner")

    def _has_idle_spare(self) -> bool:
        lines = self._client.get("/metrics").text.splitlines()
        return any(line.startswith("puna_spare_runner_bytes ") and float(line.split()[1]) > 0 for line in lines)

    def close(self) -> None:
        self._client.close()


def peer_first_token(path: Path) -> tuple[float, int]:
    """As Server.first_token, of the peer's process."""
    command = [sys.executable, "-c", PEER, str(path), str(N_CTX), str(cpu.facts().threads), PROMPT]
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        first = os.read(process.stdout.fileno(), 1)
        seconds = time.perf_counter() - begin
        rest = process.stdout.read()
    if not first or process.returncode:
        sys.exit("llama-cpp-python ended without a word")
    return seconds, int(rest.split()[-1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def serving(*, has_spare: bool) -> Iterator[Server]:
    with contenders.scratch() as folder:
        environment = {"OLLAMA_MAX_LOADED_MODELS": "1", "PUNA_WARM_SPARE": str(int(has_spare)), "OLLAMA_KEEP_ALIVE": "-1"}
        with chaos.serving(folder, **environment) as process:
            server = Server(process, folder / "models", has_spare=has_spare)
            try:
                yield server
            finally:
                server.close()


def measure(files: dict[str, Path], runs: int) -> list[Row]:
    first = {name: Row(name, "first load") for name in files}
    loads = {name: Row(name, "load") for name in files}
    firsts_elsewhere = {name: Row(name, "first load of a file") for name in files}
    elsewhere = {name: Row(name, "load of a file") for name in files}
    names = list(files)
    swaps = {name: Row(name, f"after {other}") for name, other in zip(names, names[::-1], strict=True) if name != other}
    with ExitStack() as stack:
        servers = {side: stack.enter_context(serving(has_spare=side == "spare")) for side in ("spare", "cold")}
        n_packed = 0
        for name, path in files.items():
            n_packed += path.stat().st_size > KEPT_FROM_BYTES
            for side, server in servers.items():
                server.create(name, path)
                first[name].add(side, server.first_token(name))
                server.wait_for_packed(n_packed)
                server.unload()
            n_packed += path.stat().st_size > KEPT_FROM_BYTES
            wait_until_settled(path)
            for side, server in servers.items():
                firsts_elsewhere[name].add(side, server.first_token(str(path)))
                server.wait_for_packed(n_packed)
                server.unload()
            path.read_bytes()  # into the disk cache
        for _ in range(runs):
            for name, path in files.items():
                for side, server in servers.items():
                    loads[name].add(side, server.first_token(name))
                    server.unload()
                    elsewhere[name].add(side, server.first_token(str(path)))
                    server.unload()
                peer = peer_first_token(path)
                for rows in (loads, elsewhere):  # to which it is the same
                    rows[name].add("peer", peer)
            for side, server in servers.items() if swaps else ():
                server.first_token(names[0])
                for name in (*names[1:], names[0]):
                    swaps[name].add(side, server.first_token(name))
                server.unload()
    return [row for rows in (first, loads, firsts_elsewhere, elsewhere, swaps) for row in rows.values()]


def called_gguf(name: str, path: Path) -> Path:
    """The same file under a name by which it can be asked for: a blob has none."""
    if path.suffix == ".gguf":
        return path
    linked = models.cache_dir() / f"{name}.gguf"
    if not (linked.exists() and linked.samefile(path)):
        linked.unlink(missing_ok=True)
        linked.hardlink_to(path)
    return linked


def wait_until_settled(path: Path) -> None:
    """What was written a moment ago would be packed without being kept."""
    while time.time_ns() - path.stat().st_ctime_ns < SETTLED_NS:
        time.sleep(0.5)


def has_peer() -> bool:
    return subprocess.run([sys.executable, "-c", "import llama_cpp"], capture_output=True, check=False).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="of each side per row (default: %(default)s)")
    parser.add_argument("--model", choices=("smollm2", "1b"), action="append", help="only this model; may be repeated")
    parser.add_argument("--json", type=Path, help="write the times and the machine's facts to this file")
    args = parser.parse_args()
    interrupt_on_sigterm()
    if not has_peer():
        sys.exit("the package llama_cpp cannot be imported, so there is nothing to compare with")
    wanted = args.model or ["smollm2", "1b"]
    makers = {"smollm2": models.smollm2, "1b": models.llama_1b}
    files = {name: called_gguf(name, make()) for name, make in makers.items() if name in wanted}
    if not all(stamps_changes(str(path)) for path in files.values()):
        sys.exit("of files on this file system no packed weights are kept (docs/kernels.md), so not every row could be measured")
    rows = measure(files, args.runs)
    table = Table("model", "what", title="First token; ratio: peer to spare; resident memory")
    for side in ("warm spare, s", "cold process, s", "llama-cpp-python, s", "ratio", "runner, MiB", "llama-cpp-python, MiB"):
        table.add_column(side)
    for row in rows:
        spare, cold, peer = (row.median_s(side) for side in SIDES)
        ratio = f"{peer / spare:.2f}" if peer and spare else "–"
        resident = (f"{mib:.0f}" if (mib := row.resident_mib(side)) else "–" for side in ("spare", "peer"))
        table.add_row(row.model, row.what, *(f"{s:.3f}" if s else "–" for s in (spare, cold, peer)), ratio, *resident)
    about = facts() | {"threads": cpu.facts().threads, "runs": args.runs, "n_ctx": N_CTX}
    report([table], about, rows, args.json)


if __name__ == "__main__":
    main()
