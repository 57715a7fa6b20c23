"""How fast a blob comes from a server on loopback into a store, its digest verified, beside curl that writes a file.

Each side is a process of its own, they take turns, and both are served by sendfile. Puna's figures are those of the pull alone,
since a server pulls that runs already; curl's are those of the process. "curl, then sha256sum" verifies as one does without
Puna; "the hash alone" is SHA-256 of the file by the library that Puna uses, which no pull that verifies can outrun. The
processor's time counts where others are at work. A second size shows whether the memory grows with the blob.
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.ending import interrupt_on_sigterm
from bench.facts import facts
from puna.store.disk.blobs import Blobs
from puna.store.progress import silent
from puna.store.sources.web.download import Remote, fetch
from puna.store.sources.web.http import Http

SIDES = ("puna", "curl", "curl, then sha256sum", "the hash alone")
BLOCK_BYTES = 1 << 20
SERVED_S = 3600


@dataclass
class Row:
    n_bytes: int
    n_streams: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})
    cpu_seconds: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})
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
    """Fetch the file as a pull does; prints seconds, the processor's seconds and bytes of memory."""
    with Http("127.0.0.1", n_streams) as http:
        remote = Remote(digest, n_bytes, lambda begin, end: http.ask("GET", url, {"Range": f"bytes={begin}-{end - 1}"}))
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        fetch(Blobs(folder), remote, silent, n_streams)
        seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    print(seconds, cpu_s(after) - cpu_s(before), (after.ru_maxrss - before.ru_maxrss) * 1024)


def cpu_s(usage: resource.struct_rusage) -> float:
    return usage.ru_utime + usage.ru_stime


@contextmanager
def served(path: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "bench.pulling", "--serve", str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/"
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
    with served(source) as url:
        curl = ["curl", "-sS", "-o", str(target), url]
        for _ in range(runs):
            with tempfile.TemporaryDirectory(dir=folder) as store:
                work = ["--pull", url, store, digest, str(row.n_bytes), str(row.n_streams)]
                done = subprocess.run(
                    [sys.executable, "-m", "bench.pulling", *work], capture_output=True, text=True, check=True, timeout=SERVED_S
                )
                seconds, cpu, n_peak = done.stdout.split()
                row.seconds["puna"].append(float(seconds))
                row.cpu_seconds["puna"].append(float(cpu))
                row.peak_bytes.append(int(n_peak))
            for side, verify in (("curl", []), ("curl, then sha256sum", ["sha256sum", str(target)])):
                began, before = time.perf_counter(), cpu_s(resource.getrusage(resource.RUSAGE_CHILDREN))
                subprocess.run(curl, check=True, timeout=SERVED_S)
                if verify:
                    subprocess.run(verify, check=True, stdout=subprocess.DEVNULL, timeout=SERVED_S)
                row.seconds[side].append(time.perf_counter() - began)
                row.cpu_seconds[side].append(cpu_s(resource.getrusage(resource.RUSAGE_CHILDREN)) - before)
                target.unlink()
            began, before = time.perf_counter(), cpu_s(resource.getrusage(resource.RUSAGE_SELF))
            with source.open("rb") as file:
                hashlib.file_digest(file, "sha256")
            row.seconds["the hash alone"].append(time.perf_counter() - began)
            row.cpu_seconds["the hash alone"].append(cpu_s(resource.getrusage(resource.RUSAGE_SELF)) - before)
    source.unlink()


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
    table = Table("blob", "side", "GB/s", "Puna's to it", "CPU s/GB", "memory", title="A pull over loopback")
    for row in rows:
        n_gb = row.n_bytes / 1e9
        for side in SIDES:
            rate = f"{n_gb / statistics.median(row.seconds[side]):.2f}"
            cpu = f"{statistics.median(row.cpu_seconds[side]) / n_gb:.2f}"
            memory = f"+{max(row.peak_bytes) / 1e6:.0f} MB" if side == "puna" else ""
            table.add_row(f"{row.n_bytes // 10**6} MB", side, rate, f"{row.ratio(side):.2f}", cpu, memory)
    console = Console(width=120)
    console.print(table)
    about = facts() | {"runs": args.runs, "streams": args.streams, "cores": os.cpu_count()}
    console.print(about, soft_wrap=True)
    if args.json:
        args.json.write_text(json.dumps({"facts": about, "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
