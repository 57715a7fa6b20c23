"""Puna's server under load, against another OpenAI-compatible server: same machine, same file, same threads, taking turns.

The peer is started here (``--peer-binary``, a llama-server) or is given by its address (``--peer-url``). With
``--token-gap`` several of Puna's servers take part, each with another bound on the time between two tokens, and with
``--before`` that of another checkout. Only ratios mean anything: machines are shared and differ. What else ran on the
machine meanwhile, and what the client itself took, is measured too: read it before believing a row.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

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
from bench.load.rows import API, ROWS, WARM_UP, Row, Target
from bench.load.sample import Sample

# Name, key, digits; a row shows those it has.
FIGURES = (
    ("first token, p50 s", "first_token_p50_s", 3),
    ("first token, p95 s", "first_token_p95_s", 3),
    ("first token of short prompts, p50 s", "short_first_token_p50_s", 3),
    ("first token of short prompts, longest s", "short_first_token_max_s", 3),
    ("first token of long prompts, p50 s", "long_first_token_p50_s", 3),
    ("between texts, p50 ms", "gap_p50_s", 1),
    ("between texts, p95 ms", "gap_p95_s", 1),
    ("longest between texts, ms", "gap_max_s", 1),
    ("longest without text for anyone, ms", "stall_max_s", 1),
    ("between texts before, p50 ms", "gap_before_p50_s", 1),
    ("between texts without the schema, p50 ms", "gap_free_p50_s", 1),
    ("its growth by the schema, p50", "gap_growth", 3),
    ("its growth by the schema, mean", "gap_mean_growth", 3),
    ("first token when idle, s", "idle_first_token_s", 3),
    ("chunks of the prompt", "chunks", 0),
    ("one chunk's own time, ms", "chunk_s", 1),
    ("longest without text, in chunks", "stall_max_per_chunk", 2),
    ("whole answers", "answers", 0),
    ("tokens/s", "tokens_per_s", 1),
    ("tokens per text", "tokens_per_text", 2),
    ("prompt tokens", "prompt_tokens", 0),
    ("prompt tokens computed", "computed_prompt_tokens", 0),
    ("clients that left", "left", 0),
    ("answer afterwards, s", "answer_afterwards_s", 3),
    ("server's CPU, cores", "server_cpu_share", 2),
    ("client's CPU, cores", "client_cpu_share", 3),
    ("others' CPU, cores", "foreign_cpu_share", 2),
)
NO_RATIO = {
    "gap_growth",
    "gap_mean_growth",
    "answers",
    "tokens_per_text",
    "chunks",
    "left",
    "client_cpu_share",
    "foreign_cpu_share",
}


# Rows during which others took more than this are marked: they say little.
MAX_FOREIGN_CORES = 0.1

Totals = dict[str, list[Sample]]  # by row, one per contender


def _machine_busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal")))


async def measured(target: Target, row: Row, turn: int) -> Sample:
    """One turn of one contender, with what it cost whom."""
    busy, server, client = _machine_busy_s(), target.contender.cpu_s(), time.process_time()
    begin = time.perf_counter()
    sample = await row.measure(target, Prompts(f"{row.key}/{turn}"))
    share = sample.wall_s / (time.perf_counter() - begin)  # of the CPU, for what was part of the measurement
    client_s, server_s = time.process_time() - client, target.contender.cpu_s() - server
    foreign_s = _machine_busy_s() - busy - client_s - server_s
    sample.client_cpu_s, sample.server_cpu_s = client_s * share, server_s * share
    sample.foreign_cpu_s = max(0.0, foreign_s) * share if target.contender.pid else 0.0
    return sample


async def race(targets: Sequence[Target], rows: Sequence[Row], turns: int, totals: Totals) -> None:
    """Add every turn to the totals; who begins changes with each."""
    for target in targets:
        warm = await WARM_UP(target, Prompts("warm up"))
        if warm.problems:
            sys.exit(f"{target.contender.name} does not answer: {warm.problems[0]}")
    for turn in range(turns):
        for row in rows:
            order = list(range(len(targets)))
            for index in order if turn % 2 == 0 else reversed(order):
                name = targets[index].contender.name
                sample = await measured(targets[index], row, turn)
                print(f"turn {turn + 1}, {row.what}: {name} {sample.wall_s:.1f} s", file=sys.stderr, flush=True)
                for problem in sample.problems[:5]:
                    print(f"  {name}: {problem}", file=sys.stderr, flush=True)
                totals[row.key][index].add(sample)


def table_of(row: Row, names: Sequence[str], samples: Sequence[Sample]) -> Table:
    table = Table("", *names, *(["ratio"] if len(names) == 2 else []), title=row.what)
    figures = [sample.figures() for sample in samples]
    for name, key, digits in FIGURES:
        values = [found.get(key) for found in figures]
        if not any(value is not None for value in values):
            continue
        factor = 1000 if "ms" in name else 1
        cells = ["-" if value is None else f"{value * factor:,.{digits}f}" for value in values]
        if len(names) == 2:
            one, other = values
            cells.append(f"{one / other:.3f}" if one is not None and other and key not in NO_RATIO else "")
        table.add_row(name, *cells)
        if len(names) > 2 and key == "tokens_per_s" and (last := values[-1]):
            table.add_row(f"{name}, by the last one's", *("-" if value is None else f"{value / last:.3f}" for value in values))
    if any(found["foreign_cpu_share"] > MAX_FOREIGN_CORES for found in figures):
        table.caption = "The machine was busy with other things: measure again before believing this."
    n_problems = [len(sample.problems) for sample in samples]
    if any(n_problems):
        table.add_row("requests that failed", *map(str, n_problems))
    return table


def as_json(row: Row, names: Sequence[str], samples: Sequence[Sample]) -> dict[str, Any]:
    found = {name: sample.figures() | {"problems": sample.problems} for name, sample in zip(names, samples, strict=True)}
    return {"row": row.key, "what": row.what, "contenders": found}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    peer = parser.add_mutually_exclusive_group()
    peer.add_argument("--peer-binary", type=Path, metavar="PATH", help="a llama-server to start and compare with")
    peer.add_argument("--peer-url", metavar="URL", help="a running server to compare with, of the same file and limits")
    parser.add_argument("--peer-args", type=shlex.split, default=[], metavar="ARGS", help="further arguments of the binary")
    parser.add_argument("--peer-model", default="model", metavar="NAME", help="what the server at the URL calls the model")
    parser.add_argument(
        "--token-gap",
        nargs="+",
        default=[],
        metavar="TIME",
        help="one server of Puna's for each of these bounds (PUNA_TOKEN_GAP), for a curve over them",
    )
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="another checkout's server as well; it has a .venv")
    parser.add_argument("--model", default="smollm2", metavar="NAME", help="smollm2, 1b or a GGUF file (default: %(default)s)")
    parser.add_argument("--api", choices=("chat", "text"), help="chat or plain completions (default: chat, text for 1b)")
    parser.add_argument("--row", choices=[row.key for row in ROWS], action="append", help="only this row; may be repeated")
    parser.add_argument("--turns", type=int, default=3, help="turns of each contender per row (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--slots", type=int, default=8, help="requests computed at once (default: %(default)s)")
    parser.add_argument("--n-ctx", type=int, default=5120, help="tokens of one sequence (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the rows and the machine's facts to this file")
    return parser.parse_args()


def model_file(name: str) -> Path:
    known = {"smollm2": models.smollm2, "1b": models.llama_1b}
    return known[name]() if name in known else Path(name).resolve()


def started(args: argparse.Namespace, stack: ExitStack) -> list[Contender]:
    path, limits = model_file(args.model), Limits(args.n_ctx, args.slots, args.threads)
    found = [stack.enter_context(contenders.puna(path, limits, f"puna {gap}", PUNA_TOKEN_GAP=gap)) for gap in args.token_gap] or [
        stack.enter_context(contenders.puna(path, limits))
    ]
    if args.before:
        python = str(args.before.resolve() / ".venv/bin/python")
        found.insert(0, stack.enter_context(contenders.puna(path, limits, "before", python)))
    if args.peer_binary:
        found.append(stack.enter_context(contenders.llama_server(args.peer_binary, path, limits, args.peer_args)))
    elif args.peer_url:
        found.append(stack.enter_context(contenders.given(args.peer_url, args.peer_model)))
    return found


def main() -> None:
    args = arguments()
    interrupt_on_sigterm()
    rows = [row for row in ROWS if not args.row or row.key in args.row]
    about = facts()  # now: the checkout may be another when the run is over
    api: API = args.api or ("text" if args.model == "1b" else "chat")
    with ExitStack() as stack:
        entered = started(args, stack)
        totals: Totals = {row.key: [Sample() for _ in entered] for row in rows}
        with suppress(KeyboardInterrupt):  # what was measured until then is shown
            uvloop.run(race([Target(contender, api) for contender in entered], rows, args.turns, totals))
        resident = {contender.name: round(contender.resident_bytes() / 2**20) for contender in entered}
    names = [contender.name for contender in entered]
    console = Console(width=max(110, 46 + 16 * len(names)))
    rows = [row for row in rows if all(sample.wall_s for sample in totals[row.key])]
    for row in rows:
        console.print(table_of(row, names, totals[row.key]))
    about |= {name: getattr(args, name) for name in ("model", "threads", "slots", "n_ctx", "turns")}
    about |= {"api": api, "commands": {c.name: " ".join(c.command) for c in entered}, "resident_mib": resident}
    console.print(about, soft_wrap=True)
    if args.json:
        found = [as_json(row, names, totals[row.key]) for row in rows]
        args.json.write_text(json.dumps({"facts": about, "rows": found}, indent=1))
    if any(sample.problems for samples in totals.values() for sample in samples):
        sys.exit("some requests failed")


if __name__ == "__main__":
    main()
