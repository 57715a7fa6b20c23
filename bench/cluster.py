"""Conversations on a cluster of three machines: routed by what replicas hold, in turns, and with a machine that is lost half way.

``python -m bench.cluster [MODEL]`` starts three raylets on this machine and prints for each way of routing the tokens of prompts
that were computed, the time to the first token and how the requests ended. Here the machines share one processor: the times say
who computes less, not how fast a cluster is.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.ending import interrupt_on_sigterm
from puna.settings import load

PATIENCE_S = 240.0
SERVE = ("-m", "puna", "serve", "--ray")
WORDS = "the quick brown fox jumps over the lazy dog and then the dog sleeps in the sun while the fox runs to the river"


@dataclass(frozen=True)
class Raylets:
    """A cluster; made by ``raylets``."""

    process: subprocess.Popen[str]
    address: str

    def kill(self, number: int) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"kill {number}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline().strip() == "killed"


@contextmanager
def raylets(folder: Path, n_nodes: int) -> Iterator[Raylets]:
    command = [sys.executable, "-m", "bench.raylets", str(folder), str(n_nodes)]
    log = (folder / "raylets.log").open("w")
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent), "OLLAMA_NUM_PARALLEL": "4"}
    environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="ray-")  # short, since sockets lie below it; nobody else finds this cluster
    with (
        log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, (folder / "raylets.log").read_text()[-4000:]
            yield Raylets(process, json.loads(line)["address"])
        finally:
            process.stdin.close()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
            shutil.rmtree(environ["RAY_TMPDIR"], ignore_errors=True)


@contextmanager
def head(
    folder: Path, address: str, port: int, models: Path, program: tuple[str, ...] = SERVE, **environ: str
) -> Iterator[httpx.Client]:
    """``puna serve --ray`` on that cluster, or another *program* that listens there; it may not be ready yet."""
    log = (folder / f"head-{port}.log").open("w")
    own = {"RAY_ADDRESS": address, "OLLAMA_HOST": f"127.0.0.1:{port}", "OLLAMA_MODELS": str(models), "OLLAMA_NUM_PARALLEL": "4"}
    with (
        log,
        subprocess.Popen([sys.executable, *program], stdout=log, stderr=log, env={**os.environ, **own, **environ}) as process,
    ):
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
                yield client
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            if condition():
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def metric(client: httpx.Client, name: str) -> dict[str, float]:
    """Values by their labels, as they are written."""
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return {line.rpartition(" ")[0].removeprefix(name): float(line.rpartition(" ")[2]) for line in lines}


@dataclass
class Result:
    """What became of all requests."""

    n_prompt: int = 0
    n_computed: int = 0  # tokens of prompts that were not found in a cache
    first_token_s: list[float] = field(default_factory=list)
    endings: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, lines: list[Mapping[str, Any]], first_s: float) -> None:
        last = lines[-1] if lines else {}
        with self.lock:
            if "error" in last:
                self.endings["error in the middle" if len(lines) > 1 else "error"] += 1
                self.errors.append(str(last["error"]))
            elif last.get("done"):
                self.endings["answered"] += 1
                self.n_prompt += last["prompt_eval_count"]
                self.n_computed += last["prompt_eval_count"] - last.get("cached_count", 0)
                self.first_token_s.append(first_s)
            else:
                self.endings["no end"] += 1

    def told(self) -> str:
        first = statistics.median(self.first_token_s) if self.first_token_s else float("nan")
        return f"{self.n_computed:>9} of {self.n_prompt:>7} computed | first token p50 {first:6.3f} s | {dict(self.endings)}"


def ask(client: httpx.Client, result: Result, body: dict[str, Any]) -> str:
    """One streamed request; its text as far as it came."""
    begin, first, lines = time.monotonic(), 0.0, []
    with client.stream("POST", "/api/chat", json=body) as reply:
        for line in reply.iter_lines():
            lines.append(json.loads(line))
            first = first or time.monotonic() - begin
    result.add(lines, first)
    return "".join(line.get("message", {}).get("content", "") for line in lines)


def converse(
    client: httpx.Client,
    model: str,
    *,
    tag: str,
    n_conversations: int,
    n_turns: int,
    n_predict: int = 8,
    n_clients: int = 6,
    at_half: Callable[[], None] = lambda: None,
) -> Result:
    """So many conversations, whose turns come one after the other, those of all conversations in another order each time: as it
    is with people, whose turn it is says nothing about who went before.
    """
    result, histories = Result(), [opening(f"{tag} {number}") for number in range(n_conversations)]

    def turn(messages: list[dict[str, str]]) -> None:
        options = {"num_predict": n_predict, "temperature": 0, "seed": 1}
        answer = ask(client, result, {"model": model, "messages": messages, "options": options})
        messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": f"and then the {WORDS.split()[len(messages)]}?"},
        ]

    with ThreadPoolExecutor(n_clients) as pool:
        for number in range(n_turns):
            if number == n_turns // 2:
                at_half()
            list(pool.map(turn, random.Random(number).sample(histories, len(histories))))
    return result


def opening(tag: str) -> list[dict[str, str]]:
    """No two of them begin alike: what they have in common stands at the end."""
    story = " ".join(WORDS.split()[(len(tag) + number) % len(WORDS.split())] for number in range(60))
    return [{"role": "system", "content": f"{tag}: {story}"}, {"role": "user", "content": "what did the fox do?"}]


def spread(client: httpx.Client, model: str, n_nodes: int) -> None:
    """Keep the model so busy that every node has it."""

    def is_everywhere() -> bool:
        models = [item for item in client.get("/api/engine").json()["models"] if item["state"] == "ready"]
        return len({item["node"] for item in models if item["name"].startswith(model)}) >= n_nodes

    stop, result = threading.Event(), Result()

    def load(number: int) -> None:
        while not stop.is_set():
            options = {"num_predict": 200, "ignore_eos": True}
            ask(client, result, {"model": model, "messages": opening(f"load {number}"), "options": options})

    with ThreadPoolExecutor(5 * n_nodes) as pool:
        for number in range(5 * n_nodes):
            pool.submit(load, number)
        try:
            until(is_everywhere)
        finally:
            stop.set()
    assert set(result.endings) <= {"answered"}, result.errors


def main(model: str) -> None:
    models = load().models
    with tempfile.TemporaryDirectory(prefix="puna-cluster-") as name, raylets(Path(name), 3) as cluster:
        heads = [("turns", 11531, {"PUNA_CLUSTER_ROUTE": "turns"}), ("prefix", 11532, {})]
        for route, port, environ in heads:
            with head(Path(name), cluster.address, port, models, SERVE, **environ) as client:
                until(lambda client=client: len(metric(client, "puna_node_up")) == 3)  # type: ignore[misc]
                spread(client, model, 3)
                print(f"{route:8} {converse(client, model, tag=route, n_conversations=60, n_turns=4).told()}", flush=True)
                if route == "prefix":
                    lost = converse(client, model, tag="lost", n_conversations=60, n_turns=4, at_half=lambda: cluster.kill(2))
                    print(f"killed   {lost.told()}", flush=True)


if __name__ == "__main__":
    interrupt_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2:135m", help="in the store (default: %(default)s)")
    main(parser.parse_args().model)
