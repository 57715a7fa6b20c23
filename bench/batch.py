"""A batch of short prompts through ``Engine`` against the same through HTTP with 32 clients: Puna's server, and a llama-server.

All have the same file, threads and number of requests computed at once, and take turns; each turn has prompts of its own, so that
no cache has seen them. Answers are greedy and as long as they get, up to the same number of tokens. "Equal" counts the answers
that are those of ``Engine`` word for word: what is computed beside a request rounds sums differently, so a few differ. Only
ratios mean anything; where others are at work, those of the processor's time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
import psutil
import uvloop
from rich.console import Console
from rich.table import Table

from bench import models
from bench.ending import interrupt_on_sigterm
from bench.facts import facts
from bench.load import contenders
from bench.load.contenders import Contender, Limits
from bench.load.prompts import Prompts
from puna import Engine

ENGINE = "Engine"
N_WORDS = (12, 32)  # of a prompt; with the template's own, 20 to 40 tokens and some more
REQUEST_S = 600.0


@dataclass
class Turn:
    """What one side made of one batch."""

    texts: list[str]
    n_tokens: int
    n_prompt_tokens: int
    seconds: float = 0.0
    cpu_s: float = 0.0  # of the processes that answer; of Engine also of the program itself
    client_cpu_s: float = 0.0


@dataclass
class Side:
    name: str
    turns: list[Turn] = field(default_factory=list)

    def rate(self) -> float:
        return sum(turn.n_tokens for turn in self.turns) / sum(turn.seconds for turn in self.turns)

    def cpu_per_token(self) -> float:
        return sum(turn.cpu_s for turn in self.turns) / sum(turn.n_tokens for turn in self.turns)


def ratios(side: Side, first: Side) -> list[float]:
    """The first side's rate to this one's, turn by turn."""
    pairs = zip(first.turns, side.turns, strict=True)
    return [one.n_tokens / one.seconds / (other.n_tokens / other.seconds) for one, other in pairs]


def n_equal(side: Side, first: Side) -> int:
    pairs = zip(first.turns, side.turns, strict=True)
    return sum(one == other for a, b in pairs for one, other in zip(a.texts, b.texts, strict=True))


def texts_of(turn: int, n: int) -> list[str]:
    drawn = Prompts(f"batch/{turn}")
    spread = N_WORDS[1] - N_WORDS[0] + 1
    return [f"Write about: {drawn.words(N_WORDS[0] + number % spread)}" for number in range(n)]


def through_engine(engine: Engine, texts: Sequence[str], n_tokens: int) -> Turn:
    answers = engine.chat_many(texts, temperature=0.0, num_predict=n_tokens)
    n_prompt = sum(answer.prompt_tokens for answer in answers)
    return Turn([answer.text for answer in answers], sum(answer.tokens for answer in answers), n_prompt)


async def through_http(contender: Contender, texts: Sequence[str], n_tokens: int, n_clients: int) -> Turn:
    turn, left = Turn([""] * len(texts), 0, 0), iter(enumerate(texts))
    limits = httpx.Limits(max_connections=n_clients, max_keepalive_connections=n_clients)

    async def client(http: httpx.AsyncClient) -> None:
        for number, text in left:
            body = {
                "model": contender.model,
                "messages": [{"role": "user", "content": text}],
                "temperature": 0.0,
                "max_tokens": n_tokens,
            }
            response = await http.post(f"{contender.url}/v1/chat/completions", json=body, headers=contender.headers)
            response.raise_for_status()
            answer = response.json()
            turn.texts[number] = answer["choices"][0]["message"]["content"]
            turn.n_tokens += answer["usage"]["completion_tokens"]
            turn.n_prompt_tokens += answer["usage"]["prompt_tokens"]

    async with httpx.AsyncClient(limits=limits, timeout=REQUEST_S) as http:
        await asyncio.gather(*(client(http) for _ in range(n_clients)))
    return turn


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def measured(side: Side, work: Turn, began: tuple[float, float, float], processes: Sequence[psutil.Process]) -> None:
    wall, cpu, client = began
    work.seconds = time.perf_counter() - wall
    work.client_cpu_s = time.process_time() - client
    work.cpu_s = cpu_s(processes) - cpu + (work.client_cpu_s if side.name == ENGINE else 0.0)
    side.turns.append(work)


@contextmanager
def opened(path: Path, limits: Limits) -> Iterator[tuple[Engine, list[psutil.Process]]]:
    """An Engine, and the processes it has started."""
    before = set(psutil.Process().children(recursive=True))
    with contenders.scratch() as folder:
        link = folder / "model.gguf"
        link.symlink_to(path)
        with Engine(link, n_ctx=limits.n_ctx, parallel=limits.n_slots, models=folder / "models", progress=False) as engine:
            yield engine, [process for process in psutil.Process().children(recursive=True) if process not in before]


def race(args: argparse.Namespace, sides: list[Side], entered: Sequence[Contender], path: Path, limits: Limits) -> None:
    with opened(path, limits) as (engine, processes):
        through_engine(engine, texts_of(-1, limits.n_slots), 4)
        for contender in entered:
            uvloop.run(through_http(contender, texts_of(-1, limits.n_slots), 4, args.clients))
        for number in range(args.turns):
            texts = texts_of(number, args.prompts)
            order = list(range(len(sides)))
            for index in order if number % 2 == 0 else reversed(order):
                side = sides[index]
                at_work = processes if side.name == ENGINE else entered[index - 1].processes()
                began = time.perf_counter(), cpu_s(at_work), time.process_time()
                if side.name == ENGINE:
                    work = through_engine(engine, texts, args.tokens)
                else:
                    work = uvloop.run(through_http(entered[index - 1], texts, args.tokens, args.clients))
                measured(side, work, began, at_work)
                print(f"turn {number + 1}: {side.name} {work.seconds:.1f} s", file=sys.stderr, flush=True)


def table_of(sides: Sequence[Side]) -> Table:
    first = sides[0]
    table = Table("", "tokens/s", "Engine's to it", "CPU ms/token", "client's CPU, s", "tokens", "of prompts", "equal")
    for side in sides:
        rate, cpu = f"{side.rate():.1f}", f"{side.cpu_per_token() * 1000:.2f}"
        client = f"{sum(turn.client_cpu_s for turn in side.turns):.2f}"
        n_tokens, n_prompt = (sum(getattr(turn, name) for turn in side.turns) for name in ("n_tokens", "n_prompt_tokens"))
        n_texts = sum(len(turn.texts) for turn in side.turns)
        ratio = f"{statistics.median(ratios(side, first)):.3f}"
        table.add_row(side.name, rate, ratio, cpu, client, str(n_tokens), str(n_prompt), f"{n_equal(side, first)}/{n_texts}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=1000, help="in a batch (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=1, help="batches of each side (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=24, help="of an answer at most (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=32, help="of a server at once (default: %(default)s)")
    parser.add_argument("--slots", type=int, default=32, help="requests computed at once (default: %(default)s)")
    parser.add_argument("--n-ctx", type=int, default=512, help="tokens of one sequence (default: %(default)s)")
    parser.add_argument("--model", type=Path, metavar="PATH", help="a GGUF file (default: SmolLM2)")
    parser.add_argument("--peer-binary", type=Path, metavar="PATH", help="a llama-server to start and compare with")
    parser.add_argument("--json", type=Path, help="write the turns and the machine's facts to this file")
    args = parser.parse_args()
    interrupt_on_sigterm()
    path = (args.model or models.smollm2()).resolve()
    limits = Limits(args.n_ctx, args.slots, psutil.cpu_count(logical=False) or 1)
    about = facts()
    with ExitStack() as stack:
        entered = [stack.enter_context(contenders.puna(path, limits, "Puna's server"))]
        if args.peer_binary:
            entered.append(stack.enter_context(contenders.llama_server(args.peer_binary, path, limits, [])))
        sides = [Side(ENGINE), *(Side(contender.name) for contender in entered)]
        with suppress(KeyboardInterrupt):  # what was measured until then is shown
            race(args, sides, entered, path, limits)
    sides = [side for side in sides if side.turns and len(side.turns) == len(sides[0].turns)]
    if not sides:
        sys.exit("interrupted before anything was measured")
    console = Console(width=120)
    console.print(table_of(sides))
    about |= {name: getattr(args, name) for name in ("prompts", "turns", "tokens", "clients", "slots", "n_ctx")}
    console.print(about, soft_wrap=True)
    if args.json:
        args.json.write_text(json.dumps({"facts": about, "sides": [asdict(side) for side in sides]}, indent=1))


if __name__ == "__main__":
    main()
