"""How a bench ends: its tables, what it was measured with, and all of it in a file for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def report(
    tables: Iterable[Table], about: Mapping[str, Any], rows: Sequence[DataclassInstance], file: Path | None, *, width: int = 120
) -> None:
    console = Console(width=width)
    for table in tables:
        console.print(table)
    console.print(about, soft_wrap=True)
    if file:
        file.write_text(json.dumps({"facts": about, "rows": [asdict(row) for row in rows]}, indent=1))
