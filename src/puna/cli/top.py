"""``puna top``: what a running server does, as it does it: models, requests, tokens, memory."""

from __future__ import annotations

import json as json_format
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import typer

from puna.api.client import Client
from puna.cli.connect import connected
from puna.cli.format import human_bytes, processor
from puna.cli.options import JsonFlag
from puna.cli.progress import shortened
from puna.cli.table import table
from puna.cli.terminal import can_draw, columns, printable, safe

_HEADING = ("NAME", "SIZE", "PROCESSOR", "RUNNING", "WAITING", "TOKENS/S", "PROMPT/S", "REUSED", "CACHE", "HOST CACHE", "STEPS/S")
_SHORTEST_S = 0.1
_NAME_SHARE, _SHORTEST_NAME = 4, 20

Samples = Mapping[str, Mapping[str, float]]  # by metric and model


@dataclass(frozen=True)
class Row:
    """One model. Rates are per second since the last look; None before there is one."""

    name: str
    size: int
    size_vram: int
    running: int
    waiting: int
    answer_per_s: float | None
    prompt_per_s: float | None
    reused: float | None  # of the tokens of all prompts, the share that was not computed again
    cache_cells: int  # 0: the cache has no such bound
    cache_used: int
    host_cache: int
    steps_per_s: float | None


def top(
    interval: Annotated[float, typer.Option(metavar="SECONDS", help="Between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, over one interval, and end.")] = False,
    json: JsonFlag = False,
) -> None:
    """Watch a server work: models, requests, tokens per second, memory."""
    interval = max(interval, _SHORTEST_S)
    with connected(private=False) as client, suppress(KeyboardInterrupt):
        looks = _looks(client, interval)
        if json:
            for rows in looks:
                print(json_format.dumps([asdict(row) for row in rows]), flush=True)
                if once:
                    return
        elif once or not can_draw(sys.stdout):
            sys.stdout.write(safe(_text(next(looks)), sys.stdout))
        else:
            _draw(looks)


def _draw(looks: Iterator[list[Row]]) -> None:
    from rich.live import Live
    from rich.text import Text

    with Live(Text("looking…"), screen=True, auto_refresh=False) as live:
        for rows in looks:
            text = printable(_text([_narrower(row, columns()) for row in rows])) + "\nCtrl-C ends this"
            live.update(Text(text, no_wrap=True, overflow="crop"), refresh=True)


def _looks(client: Client, interval: float) -> Iterator[list[Row]]:
    """Without end; each as long after the one before."""
    before, began = samples(client.metrics()), time.monotonic()
    while True:
        time.sleep(interval)
        now, found = time.monotonic(), samples(client.metrics())
        yield rows_of(client.ps().get("models") or [], before, found, now - began)
        before, began = found, now


def samples(text: str) -> Samples:
    """The metrics that have the model as their only label."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if set(sample.labels) == {"model"}:
                found.setdefault(sample.name, {})[sample.labels["model"]] = sample.value
    return found


def rows_of(running: list[dict[str, Any]], before: Samples, after: Samples, elapsed: float) -> list[Row]:
    """One for each model, wherever it is: a server of several machines tells each machine's memory, and sums of all else."""
    models: dict[str, dict[str, Any]] = {}
    for model in running:
        found = models.setdefault(str(model.get("name", "")), {**model, "size": 0, "size_vram": 0})
        for part in ("size", "size_vram"):
            found[part] += int(model.get(part) or 0)
    return [_row(model, before, after, elapsed) for model in models.values()]


def _row(model: Mapping[str, Any], before: Samples, after: Samples, elapsed: float) -> Row:
    name = str(model.get("name", ""))
    labels = {name, str(model.get("model", "")), name.removesuffix(":latest")}

    def value(metric: str, source: Samples = after) -> float:
        return next((number for label, number in source.get(metric, {}).items() if label in labels), 0.0)

    def rate(metric: str, without: str = "") -> float | None:
        """None where a process has begun anew meanwhile."""
        both = [value(metric, source) - (value(without, source) if without else 0.0) for source in (before, after)]
        return (both[1] - both[0]) / elapsed if elapsed > 0 and both[1] >= both[0] else None

    prompt = value("puna_prompt_tokens_total")
    return Row(
        name=name,
        size=int(model.get("size") or 0),
        size_vram=int(model.get("size_vram") or 0),
        running=int(value("puna_runner_requests_active")),
        waiting=int(value("puna_runner_requests_waiting") + value("puna_requests_waiting")),
        answer_per_s=rate("puna_runner_answer_tokens_total"),
        prompt_per_s=rate("puna_runner_tokens_total", without="puna_runner_answer_tokens_total"),
        reused=value("puna_prompt_tokens_cached_total") / prompt if prompt else None,
        cache_cells=int(value("puna_cache_cells")),
        cache_used=int(value("puna_cache_cells_used")),
        host_cache=int(value("puna_host_cache_bytes")),
        steps_per_s=rate("puna_runner_steps_total"),
    )


def _text(rows: list[Row]) -> str:
    if not rows:
        return "no model is loaded\n"
    return table([_HEADING, *map(_cells, rows)])


def _narrower(row: Row, width: int) -> Row:
    """A path in place of a name leaves room for the numbers."""
    return replace(row, name=shortened(row.name, max(width // _NAME_SHARE, _SHORTEST_NAME)))


def _cells(row: Row) -> tuple[str, ...]:
    cache = f"{row.cache_used / row.cache_cells:.0%} of {row.cache_cells}" if row.cache_cells else "-"
    return (
        *(row.name, human_bytes(row.size), processor(row.size, row.size_vram), str(row.running), str(row.waiting)),
        *(_number(row.answer_per_s), _number(row.prompt_per_s), "-" if row.reused is None else f"{row.reused:.0%}"),
        *(cache, human_bytes(row.host_cache) if row.host_cache else "-", _number(row.steps_per_s)),
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
