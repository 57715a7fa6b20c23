"""How fast a blob comes from a server on loopback into a store, its digest verified, beside curl that writes a file.

Each side is a process of its own, they take turns, and all are served by sendfile. Puna's figures are those of the pull alone,
since a server pulls that runs already; the others' are those of their processes. Puna flushes what it fetched to the disk,
which curl does not: "curl, then sync" does. "curl | tee | sha256sum" and "curl, then sha256sum" verify as one does without Puna;
"the hash alone" is SHA-256 of the file by the library that Puna uses, which no pull that verifies can outrun. A second table has
the processor's time by stage, and what the best schedule could make of it: SHA-256 is one chain, so a pull lasts at least as long
as that, and as all its processor's time divided by the cores. Processor's time counts where others are at work. A second size
shows whether the memory grows with the blob.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
from rich.table import Table

from bench.ending import interrupt_on_sigterm
from bench.facts import facts
from bench.report import report
from puna.store.disk.blobs import Blobs
from puna.store.progress import silent
from puna.store.sources.web.download import Remote, fetch
from puna.store.sources.web.http import Http

PUNA, HASH = "puna", "the hash alone"
COMMANDS = {  # of a shell, with the address and the target
    "curl": 'curl -sS -o "$2" "$1"',
    "curl, then sync": 'curl -sS -o "$2" "$1" && sync "$2"',
    "curl | tee | sha256sum": 'curl -sS "$1" | tee "$2" | sha256sum',
    "curl, then sha256sum": 'curl -sS -o "$2" "$1" && sha256sum "$2"',
}
SIDES = (PUNA, *COMMANDS, HASH)
OTHER = "other"
STAGES = ("receive", "hash", "flush", OTHER)
BLOCK_BYTES = 1 << 20
SERVED_S = 3600


@dataclass
class Row:
    n_bytes: int
    n_streams: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})
    cpu_seconds: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})
    server_cpu_seconds: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})
    stages: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {stage: [] for stage in STAGES})  # user, system
    peak_bytes: list[int] = field(default_factory=list)  # of Puna's process, beyond what it had before

    def ratio(self, side: str) -> float:
        """Of the rates, Puna's to the other's, each turn on its own."""
        pairs = zip(self.seconds[side], self.seconds["puna"], strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)


def serve(path: Path) -> None:
    """Send the file and ranges of it to whoever asks; ends with its standard input."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            size = path.stat().st_size
            found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            begin, end = (int(found[1]), min(int(found[2]) + 1, size)) if found else (0, size)
            self.send_response(206 if found else 200)
            self.send_header("content-length", str(end - begin))
            if found:
                self.send_header("content-range", f"bytes {begin}-{end - 1}/{size}")
            self.end_headers()
            with path.open("rb") as file:
                while begin < end:
                    begin += os.sendfile(self.connection.fileno(), file.fileno(), begin, end - begin)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()


def pull(url: str, folder: Path, digest: str, n_bytes: int, n_streams: int) -> None:
    """Fetch the file as a pull does; prints seconds, the processor's by stage as user's and system's, and bytes of memory."""
    with Http("127.0.0.1", n_streams) as http, stages() as taken:
        remote = Remote(digest, n_bytes, lambda begin, end: http.ask("GET", url, {"Range": f"bytes={begin}-{end - 1}"}))
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        fetch(Blobs(folder), remote, silent, n_streams)
        seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    all_s = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    threads_s = [sum(parts) for parts in zip(*taken.values(), strict=True)]
    by_stage = {OTHER: [all_s[0] - threads_s[0], all_s[1] - threads_s[1]]} | taken
    print(json.dumps({"seconds": seconds, "stages": by_stage, "peak_bytes": (after.ru_maxrss - before.ru_maxrss) * 1024}))


@contextmanager
def stages() -> Iterator[dict[str, list[float]]]:
    """What the threads of a download take of the processor, user's and system's seconds, by what they are for."""
    taken: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    real, lock = threading.Thread.run, threading.Lock()

    def run(thread: threading.Thread) -> None:
        real(thread)
        usage = resource.getrusage(resource.RUSAGE_THREAD)
        with lock:
            stage = taken[thread.name.removeprefix("download: ")]
            stage[0], stage[1] = stage[0] + usage.ru_utime, stage[1] + usage.ru_stime

    threading.Thread.run = run  # type: ignore[assignment, method-assign]
    try:
        yield taken
    finally:
        threading.Thread.run = real  # type: ignore[method-assign]


def cpu_s(usage: resource.struct_rusage) -> float:
    return usage.ru_utime + usage.ru_stime


@contextmanager
def served(path: Path) -> Iterator[tuple[str, psutil.Process]]:
    """The address, and the process that serves."""
    command = [sys.executable, "-m", "bench.pulling", "--serve", str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/", psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def write_random(path: Path, n_bytes: int) -> str:
    """Returns the digest."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for at in range(0, n_bytes, BLOCK_BYTES):
            block = os.urandom(min(BLOCK_BYTES, n_bytes - at))
            digest.update(block)
            file.write(block)
    return f"sha256:{digest.hexdigest()}"


def measure(row: Row, folder: Path, runs: int) -> None:
    source, target = folder / "source", folder / "target"
    digest = write_random(source, row.n_bytes)
    with served(source) as (url, server):
        for _ in range(runs):
            with of_server(server, row, PUNA), tempfile.TemporaryDirectory(dir=folder) as store:
                measure_pull(row, url, store, digest)
            for side, command in COMMANDS.items():
                with of_server(server, row, side), timed(row, side, resource.RUSAGE_CHILDREN):
                    shell = ["sh", "-c", command, "sh", url, str(target)]
                    subprocess.run(shell, check=True, stdout=subprocess.DEVNULL, timeout=SERVED_S)
                target.unlink()
            with of_server(server, row, HASH), timed(row, HASH, resource.RUSAGE_SELF), source.open("rb") as file:
                hashlib.file_digest(file, "sha256")
    source.unlink()


def measure_pull(row: Row, url: str, store: str, digest: str) -> None:
    work = ["--pull", url, store, digest, str(row.n_bytes), str(row.n_streams)]
    command = [sys.executable, "-m", "bench.pulling", *work]
    done = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=SERVED_S).stdout)
    row.seconds[PUNA].append(done["seconds"])
    row.cpu_seconds[PUNA].append(sum(map(sum, done["stages"].values())))
    row.peak_bytes.append(done["peak_bytes"])
    for stage in STAGES:
        row.stages[stage].append(tuple(done["stages"].get(stage, (0.0, 0.0))))


@contextmanager
def timed(row: Row, side: str, who: int) -> Iterator[None]:
    began, before = time.perf_counter(), cpu_s(resource.getrusage(who))
    yield
    row.seconds[side].append(time.perf_counter() - began)
    row.cpu_seconds[side].append(cpu_s(resource.getrusage(who)) - before)


@contextmanager
def of_server(server: psutil.Process, row: Row, side: str) -> Iterator[None]:
    before = server.cpu_times()
    yield
    after = server.cpu_times()
    row.server_cpu_seconds[side].append(after.user + after.system - before.user - before.system)


def table_of_sides(rows: Sequence[Row]) -> Table:
    table = Table("blob", "side", "GB/s", "Puna's to it", "CPU s/GB", "server's", "memory", title="A pull over loopback")
    for row in rows:
        n_gb = row.n_bytes / 1e9
        for side in SIDES:
            rate = f"{n_gb / statistics.median(row.seconds[side]):.2f}"
            cpu = f"{statistics.median(row.cpu_seconds[side]) / n_gb:.2f}"
            server = f"{statistics.mean(row.server_cpu_seconds[side]) / n_gb:.2f}"
            memory = f"+{max(row.peak_bytes) / 1e6:.0f} MB" if side == PUNA else ""
            table.add_row(f"{row.n_bytes // 10**6} MB", side, rate, f"{row.ratio(side):.2f}", cpu, server, memory)
    return table


def table_of_stages(rows: Sequence[Row]) -> Table:
    """Seconds of the processor per GB, and the shortest that this machine's cores could make of them."""
    table = Table("blob", "stage", "user", "system", "sum", title="Seconds of the processor per GB")
    for row in rows:
        n_gb, blob = row.n_bytes / 1e9, f"{row.n_bytes // 10**6} MB"
        for stage in STAGES:
            user, system = (statistics.median(part) / n_gb for part in zip(*row.stages[stage], strict=True))
            parts = ("", "") if stage == OTHER else (f"{user:.3f}", f"{system:.3f}")  # of a whole process they are estimates
            table.add_row(blob, stage, *parts, f"{user + system:.3f}")
        shortest, beside_curl = best_case(row)
        table.add_row(blob, "shortest pull that verifies", "", "", f"{shortest:.3f}")
        table.add_row(blob, "its rate to curl's", "", "", f"{beside_curl:.2f}")
    return table


def best_case(row: Row) -> tuple[float, float]:
    """Seconds per GB that a pull takes at least, and its rate to that of a curl that never waits for anything."""
    n_gb, n_cores = row.n_bytes / 1e9, os.cpu_count() or 1
    chain, curl = min(row.cpu_seconds[HASH]) / n_gb, min(row.cpu_seconds["curl"]) / n_gb
    served, served_to_curl = (statistics.mean(row.server_cpu_seconds[side]) / n_gb for side in (PUNA, "curl"))
    receiving = min(sum(pair) for pair in row.stages["receive"]) / n_gb
    shortest = max(chain, (chain + receiving + served) / n_cores)
    return shortest, max(curl, (curl + served_to_curl) / n_cores) / shortest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="turns per row (default: %(default)s)")
    parser.add_argument("--mb", type=int, action="append", help="size of the blob in MB; may be repeated (default: 250 and 1000)")
    parser.add_argument("--streams", type=int, default=4, help="connections (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--json", type=Path, help="write the times and the machine's facts to this file")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--pull", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return
    if args.pull:
        url, folder, digest, n_bytes, n_streams = args.pull
        pull(url, Path(folder), digest, int(n_bytes), int(n_streams))
        return
    interrupt_on_sigterm()
    rows = [Row(mb * 1_000_000, args.streams) for mb in args.mb or (250, 1000)]
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for row in rows:
            measure(row, Path(folder), args.runs)
    about = facts() | {"runs": args.runs, "streams": args.streams, "cores": os.cpu_count()}
    report([table_of_sides(rows), table_of_stages(rows)], about, rows, args.json)


if __name__ == "__main__":
    main()
