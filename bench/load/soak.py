"""A soak: many requests of every kind at one runner or server, and whether anything is left of them afterwards.

Run it with ``python -m bench.load.soak``; the tests run the same in small. Checked are: every request has one end; then
nothing is active or waiting; as many requests run at once as at the start; the cache can be filled to its last cell; the
memory has stayed as it was.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import httpx
import psutil
import uvloop
from tests.patience import PATIENCE_S
from tests.processes import command_of
from tests.tiny import write_llama

from bench.ending import interrupt_on_sigterm
from bench.load import contenders
from bench.load.client import Exchange
from bench.load.contenders import Contender, Limits
from bench.load.drawn import Front, RunnerFront, ServerFront
from bench.load.prompts import Prompts
from puna import wire
from puna.errors import BadRequest

# Of the idle runner after the first third of the requests: holes in its heap, and graphs of shapes not seen before.
MAX_GROWTH_BYTES = 8 << 20


class LostRunner(Exception):
    """The runner that is looked at has ended, or hangs."""


@dataclass(frozen=True)
class Place:
    """Where a soak's requests go, and the runner that computes them."""

    front: Front
    contender: Contender
    look: Callable[[Contender], wire.Health]  # at the runner
    runner_pid: int
    limits: Limits

    @property
    def url(self) -> str:
        return self.contender.url

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.runner_pid)

    def health(self) -> wire.Health:
        """Errors: LostRunner."""
        try:
            return self.look(self.contender)
        except (httpx.HTTPError, BadRequest, LookupError) as error:
            raise LostRunner(f"the runner does not tell its health: {error}\n{self.contender.last_words()}") from error

    def resident_bytes(self) -> int:
        """Without what it keeps of ended requests on purpose, up to a bound of its own."""
        return int(self.process.memory_info().rss) - self.health().host_cache_bytes


@dataclass
class Outcome:
    ends: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    resident_bytes: list[int] = field(default_factory=list)  # of the idle runner, after each stage

    @property
    def growth_bytes(self) -> int:
        """From the end of the first third of the requests."""
        return self.resident_bytes[-1] - self.resident_bytes[(len(self.resident_bytes) - 1) // 3]


async def soak(place: Place, n_requests: int, n_clients: int, *, seed: int = 0, n_stages: int = 3) -> Outcome:
    """Send the requests in stages; after each the runner must be idle."""
    outcome = Outcome()
    try:
        await _stages(place, n_requests, n_clients, seed, n_stages, outcome)
    except LostRunner as error:
        outcome.problems.append(str(error))
    return outcome


async def _stages(place: Place, n_requests: int, n_clients: int, seed: int, n_stages: int, outcome: Outcome) -> None:
    bounds = [n_requests * stage // n_stages for stage in range(n_stages + 1)]
    for begin, end in pairwise(bounds):
        await _send(place, range(begin, end), n_clients, seed, outcome)
        await _until_idle(place, outcome)
        outcome.resident_bytes.append(place.resident_bytes())
    if outcome.growth_bytes > MAX_GROWTH_BYTES:
        outcome.problems.append(f"the idle runner has grown by {outcome.growth_bytes / 2**20:.1f} MiB")
    outcome.problems += await slots_lost(place)
    outcome.problems += await cells_lost(place)
    await _until_idle(place, outcome)


async def _send(place: Place, numbers: range, n_clients: int, seed: int, outcome: Outcome) -> None:
    waiting = iter(numbers)

    async def client() -> None:
        for number in waiting:
            drawn = place.front.draw(random.Random(f"{seed}/{number}"))
            exchange = await Exchange.post(place.url + drawn.path, drawn.body, place.contender.key)
            leaving = asyncio.create_task(drawn.leaving.leave(exchange)) if drawn.leaving else None
            try:
                await asyncio.wait_for(exchange.wait(), PATIENCE_S)
                outcome.ends[drawn.judge(exchange)] += 1
            except TimeoutError:
                exchange.abort()
                outcome.problems.append(f"request {number}: no end within {PATIENCE_S:g} s")
            except (AssertionError, ValueError, KeyError, TypeError) as error:
                outcome.problems.append(f"request {number}: {error!r}: {drawn.body[:500]!r}")
            finally:
                if leaving is not None:
                    leaving.cancel()

    await asyncio.gather(*(client() for _ in range(n_clients)))


async def _until_idle(place: Place, outcome: Outcome) -> None:
    health = await _wait_for(place, active=0)
    if (health.active, health.waiting) != (0, 0):
        outcome.problems.append(f"{health.active} active and {health.waiting} waiting requests that nobody made")


async def _wait_for(place: Place, active: int) -> wire.Health:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        health = await asyncio.to_thread(place.health)
        if (health.active, health.waiting) == (active, 0) or time.monotonic() > deadline:
            return health
        await asyncio.sleep(0.01)


async def slots_lost(place: Place) -> list[str]:
    """As many requests as there are slots must all run at once. Each is followed by another: none of them is endless."""
    n_slots, prompts = place.limits.n_slots, Prompts("endless")
    requests = [place.front.greedy(prompts.words(3), -1, shift=True) for _ in range(n_slots)]
    running: dict[bytes, Exchange] = {}
    is_seen = False

    async def go_on(path: str, body: bytes) -> None:
        while not is_seen:
            running[body] = await Exchange.post(place.url + path, body, place.contender.key)
            await running[body].wait()

    clients = {asyncio.create_task(go_on(path, body)) for path, body in requests}
    try:
        health = await _wait_for(place, active=n_slots)
    finally:
        is_seen = True
        while clients:
            for exchange in running.values():
                exchange.abort()
            _, clients = await asyncio.wait(clients, timeout=0.01)
    idle = await _wait_for(place, active=0)
    lost = [] if health.active == n_slots else [f"{health.active} of {n_slots} requests run at once"]
    return lost + ([f"{idle.active} requests run on after their clients left"] if idle.active else [])


async def cells_lost(place: Place) -> list[str]:
    """Requests that fill the context, one per slot, need every cell there is."""
    n_ctx, prompts = place.limits.n_ctx, Prompts("full")
    requests = [place.front.greedy(prompts.words(2 * n_ctx), 2 * n_ctx, shift=False) for _ in range(place.limits.n_slots)]
    exchanges = await asyncio.gather(*(Exchange.post(place.url + path, body, place.contender.key) for path, body in requests))
    await asyncio.wait([asyncio.ensure_future(exchange.wait()) for exchange in exchanges], timeout=PATIENCE_S)
    problems = []
    for exchange in exchanges:
        last = exchange.body.splitlines()[-1:]
        if not exchange.is_complete or exchange.status != 200 or not last or b'"length"' not in last[0]:
            exchange.abort()
            problems.append(f"a context cannot be filled: status {exchange.status}, {exchange.error or last}")
    return problems


def _health_of_runner(runner: Contender) -> wire.Health:
    return wire.decode(wire.Health, httpx.get(f"{runner.url}/health", headers=runner.headers, timeout=PATIENCE_S).content)


def _health_in_metrics(server: Contender) -> wire.Health:
    """Of a server's only runner, as far as its numbers tell. They are missing while it is too busy to answer at once."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        text = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text
        found = {line.partition("{")[0]: int(float(line.rpartition(" ")[2])) for line in text.splitlines() if "{model=" in line}
        if "puna_runner_requests_active" in found or time.monotonic() > deadline:
            break
    return wire.Health(
        status="ready",
        active=found["puna_runner_requests_active"],
        waiting=found["puna_runner_requests_waiting"],
        steps=found["puna_runner_steps_total"],
        host_cache_bytes=found["puna_host_cache_bytes"],
        cache_used=found["puna_cache_cells_used"],
    )


@contextmanager
def runner(model: Path, limits: Limits) -> Iterator[Place]:
    """A runner alone."""
    with contenders.runner(model, limits) as contender:
        yield Place(RunnerFront(limits.n_ctx), contender, _health_of_runner, contender.pid, limits)


@contextmanager
def server(model: Path, limits: Limits) -> Iterator[Place]:
    """A server, whose runner is looked at as well."""
    with contenders.puna(model, limits, PUNA_WARM_SPARE="0", PUNA_HOST_CACHE="2M") as contender:  # the only runner is the model's
        process = next(child for child in contender.processes() if "runner" in command_of(child))
        front = ServerFront(contender.model, limits.n_ctx)
        yield Place(front, contender, _health_in_metrics, process.pid, limits)


PLACES = {"runner": runner, "server": server}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PLACES, help="a runner alone, or a server with its runner (default: both)")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--n-ctx", type=int, default=512)
    parser.add_argument("--stages", type=int, default=10, help="times at which memory is looked at (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="a GGUF file (default: a tiny one with random weights)")
    args = parser.parse_args()
    interrupt_on_sigterm()
    with contenders.scratch() as folder:
        model = args.model or write_llama(folder / "tiny.gguf", n_ctx=2048)
        failed = False
        for name in [args.only] if args.only else PLACES:
            with PLACES[name](model, Limits(args.n_ctx, args.slots, 2)) as place:
                begin = time.perf_counter()
                outcome = uvloop.run(soak(place, args.requests, args.clients, seed=args.seed, n_stages=args.stages))
            mebibytes = ", ".join(f"{size / 2**20:.1f}" for size in outcome.resident_bytes)
            print(f"{name}: {args.requests} requests in {time.perf_counter() - begin:.1f} s, ends {dict(outcome.ends)}")
            print(f"  the idle runner's memory in MiB: {mebibytes}")
            for problem in outcome.problems:
                print(f"  {problem}")
            failed = failed or bool(outcome.problems)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
