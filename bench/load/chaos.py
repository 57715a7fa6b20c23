"""Chaos: many requests for more models than fit, while their runners are killed at random, and what is left afterwards.

Run it with ``python -m bench.load.chaos``; the tests run the same in small. Checked are: every request ends, in an answer
or in an error that says what happened; then every model answers as before; when the server has stopped, no process, no
open port and no temporary file of it is left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import psutil
from tests.patience import PATIENCE_S
from tests.processes import is_alive
from tests.tiny import write_llama

from bench.ending import interrupt_on_sigterm
from bench.load import contenders

KILL_WITHIN_S = 0.1  # of a request's end, which may be in the midst of another's, or of a load
COMMAND = (sys.executable, "-m", "puna", "serve")
WAYS = (signal.SIGKILL, signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV, signal.SIGTERM)
# What an error may say of a runner that was killed: how it ended, or that it was told to.
_TELLING = re.compile(
    r"unexpectedly stopped \((signal SIG(KILL|ABRT|SEGV|TERM)|exit status 0)"
    r"|runner has terminated \((signal SIG(KILL|ABRT|SEGV|TERM)|exit status 0)"
    r"|has crashed \d+ times in a row, the last time with (signal SIG|exit status 0)"
    r"|the model was unloaded"
)
GREEDY = {"temperature": 0, "ignore_eos": True, "num_ctx": 256}


@dataclass
class Server:
    """A server process of this checkout, all it has started, and where that listened."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    scratch: Path  # its folder for temporary files
    started: set[psutil.Process] = field(default_factory=set)
    ports: set[int] = field(default_factory=set)

    def look(self) -> list[psutil.Process]:
        """The runners there are now, the spare included."""
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    self.started.add(child)
                    self.ports |= {c.laddr.port for c in child.net_connections() if c.status == psutil.CONN_LISTEN}
                    if any("runner" in part for part in child.cmdline()):
                        found.append(child)
        return found

    def leftovers(self) -> list[str]:
        """What should have gone with the server."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            left = [f"process {process.pid} has outlived the server" for process in self.started if is_alive(process)]
            left += [f"port {port} is still open" for port in self.ports if _is_open(port)]
            left += [f"{path} was left behind" for path in self.scratch.iterdir()]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.02)


def _is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@contextmanager
def serving(folder: Path, command: Sequence[str] = COMMAND, **environment: str) -> Iterator[Server]:
    """The process is killed at the end if it is still there."""
    scratch, log = folder / "scratch", folder / "server.log"
    scratch.mkdir()
    places = {"OLLAMA_HOST": "127.0.0.1:0", "OLLAMA_MODELS": str(folder / "models"), "TMPDIR": str(scratch)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **places, **environment},
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while "Listening on " not in (text := log.read_text(errors="replace")):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{text}")
            time.sleep(0.02)
        yield Server(process, "http://" + text.partition("Listening on ")[2].split()[0], log, scratch)
    finally:
        process.kill()
        process.wait()


@dataclass
class Outcome:
    seed: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


async def chaos(
    server: Server, models: Sequence[Path], n_requests: int, *, n_clients: int = 6, kill_every: int = 12, seed: int = 0
) -> Outcome:
    """Send the requests while runners are killed; then ask every model for what it said before."""
    outcome = Outcome(seed)
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, limits=httpx.Limits(max_connections=None)) as client:
        before = [await _greedy(client, model) for model in models]
        killer = asyncio.create_task(_kill(server, kill_every, random.Random(seed), outcome))
        numbers = iter(range(n_requests))

        async def one_client() -> None:
            for number in numbers:
                outcome.ends[await _request(client, models, random.Random(f"{seed}/{number}"), number, outcome)] += 1

        await asyncio.gather(*(one_client() for _ in range(n_clients)))
        killer.cancel()
        await asyncio.wait({killer})
        for model, expected in zip(models, before, strict=True):
            if (answer := await _greedy(client, model)) != expected:
                outcome.problems.append(f"{model.name} now answers {answer!r}, before {expected!r}")
    server.look()
    return outcome


async def _kill(server: Server, every: int, source: random.Random, outcome: Outcome) -> None:
    """Once in about so many requests, however long those take."""
    due = 0
    while True:
        due += source.randint(1, 2 * every - 1)
        while outcome.ends.total() < due:
            await asyncio.sleep(0.002)
        await asyncio.sleep(source.uniform(0, KILL_WITHIN_S))
        runners = await asyncio.to_thread(server.look)
        if runners:
            way = source.choice(WAYS)
            with contextlib.suppress(psutil.NoSuchProcess):
                source.choice(runners).send_signal(way)
                outcome.kills[way.name] += 1


async def _request(
    client: httpx.AsyncClient, models: Sequence[Path], source: random.Random, number: int, outcome: Outcome
) -> str:
    """One request and how it ended; what is wrong with its end is noted."""
    # Neighbours mostly want the same model: else the time goes into loading.
    model = random.Random(f"{outcome.seed}/{number // 8}").choice(models)
    is_chat, is_streamed = source.random() < 0.5, source.random() < 0.7
    words = " ".join(source.choice(("the", "river", "fox", "is", "old")) for _ in range(source.choice((1, 5, 60))))
    body: dict[str, Any] = {"model": str(model), "stream": is_streamed}
    body["options"] = {**GREEDY, "num_predict": source.choice((1, 20, 150)), "seed": number}
    body |= {"messages": [{"role": "user", "content": words}]} if is_chat else {"prompt": words}
    begin = time.monotonic()
    try:
        async with asyncio.timeout(PATIENCE_S):
            response = await client.post("/api/chat" if is_chat else "/api/generate", json=body)
        lines = [json.loads(line) for line in response.content.splitlines()]
    except (TimeoutError, httpx.HTTPError, ValueError) as error:
        outcome.problems.append(f"request {number} broke off after {time.monotonic() - begin:.1f} s: {error!r}")
        return "broken"
    last = lines[-1] if lines else {}
    told = str(last.get("error", ""))
    if told:
        if not _TELLING.search(told):
            outcome.problems.append(f"request {number}: an error that does not say what happened: {told}")
        return "error"
    if response.status_code != 200 or last.get("done") is not True or any(line.get("done") for line in lines[:-1]):
        outcome.problems.append(f"request {number}: status {response.status_code}, {len(lines)} lines, the last {last}")
        return "wrong"
    return "answer"


async def _greedy(client: httpx.AsyncClient, model: Path) -> str:
    """Its answer; who has crashed in a row until now is asked again later, as its refusal says."""
    options = {**GREEDY, "num_predict": 12}
    body = {"model": str(model), "prompt": "the old fox", "stream": False, "options": options, "keep_alive": "5m"}
    deadline = time.monotonic() + PATIENCE_S
    while True:
        response = await client.post("/api/generate", json=body)
        if response.status_code != HTTPStatus.SERVICE_UNAVAILABLE or time.monotonic() > deadline:
            return str(response.json().get("response", response.text))
        await asyncio.sleep(0.1)


def stop(server: Server, number: signal.Signals) -> list[str]:
    """End the server by this signal; what was wrong with that, and what is left of it."""
    server.look()
    server.process.send_signal(number)
    try:
        status = server.process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        return [f"the server has not ended within {PATIENCE_S:g} s of {number.name}"]
    expected = 0 if number == signal.SIGTERM else -number
    wrong = [] if status == expected else [f"the server ended with status {status}"]
    return wrong + server.leftovers()


def tiny_models(folder: Path, count: int) -> list[Path]:
    return [write_llama(folder / f"tiny{seed}.gguf", seed=seed, n_layers=1) for seed in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--models", type=int, default=4, help="tiny models with random weights (default: %(default)s)")
    parser.add_argument("--max-loaded", type=int, default=2, help="OLLAMA_MAX_LOADED_MODELS (default: %(default)s)")
    parser.add_argument("--kill-every", type=int, default=12, metavar="N", help="requests, on average (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    interrupt_on_sigterm()
    with contenders.scratch() as folder:
        models = tiny_models(folder, args.models)
        with serving(folder, OLLAMA_MAX_LOADED_MODELS=str(args.max_loaded)) as server:
            begin = time.perf_counter()
            outcome = asyncio.run(
                chaos(server, models, args.requests, n_clients=args.clients, kill_every=args.kill_every, seed=args.seed)
            )
            seconds = time.perf_counter() - begin
            problems = outcome.problems + stop(server, signal.SIGTERM)
        print(f"{args.requests} requests in {seconds:.1f} s, ends {dict(outcome.ends)}, kills {dict(outcome.kills)}")
        print(f"  {len(server.started)} processes and {len(server.ports)} ports were seen")
        for problem in problems:
            print(f"  {problem}")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
