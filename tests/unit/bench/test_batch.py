from __future__ import annotations

import io

from bench.batch import Side, Turn, table_of, texts_of
from rich.console import Console


def test_the_ratio_is_the_engines_rate_by_the_sides() -> None:
    engine = Side("Engine", [Turn(["a", "b"], 100, 60, 2.0, 1.0, 0.5), Turn(["c", "d"], 100, 60, 4.0, 1.0, 0.5)])
    server = Side("server", [Turn(["a", "x"], 100, 60, 4.0, 3.0, 0.5), Turn(["c", "d"], 100, 60, 8.0, 3.0, 0.5)])
    out = io.StringIO()
    Console(file=out, width=120).print(table_of([engine, server]))
    (line,) = (row for row in out.getvalue().splitlines() if "server" in row)
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    assert cells == ["server", "16.7", "2.000", "30.00", "1.00", "200", "120", "3/4"]


def test_prompts_are_new_in_every_turn_and_the_same_for_all() -> None:
    texts = texts_of(0, 100)
    assert texts == texts_of(0, 100)
    assert len({*texts, *texts_of(1, 100)}) == 200
