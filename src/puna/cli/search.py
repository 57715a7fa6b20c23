"""``puna search``: models elsewhere, by words."""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from puna.cli.connect import settings
from puna.cli.format import human_count
from puna.cli.listing import modified
from puna.cli.options import Insecure, JsonFlag
from puna.cli.progress import Spinner
from puna.cli.table import table
from puna.cli.terminal import safe

if TYPE_CHECKING:
    from puna.store.sources.search import Found


def search(
    words: Annotated[list[str], typer.Argument(metavar="WORD...", show_default=False, help="What their names have in them.")],
    registry: Annotated[
        str, typer.Option(metavar="HOST", help="Where to look: the hub, or a registry that lists models.")
    ] = "hf.co",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many at most.")] = 20,
    insecure: Insecure = False,
    json: JsonFlag = False,
) -> None:
    """Look for models that can be pulled."""
    from puna.store.sources import search as places
    from puna.store.sources.elsewhere import Elsewhere

    with Spinner():
        found = places.search(" ".join(words), Elsewhere.of(settings()), host=registry, limit=limit, insecure=insecure)
    if json:
        print(json_format.dumps({"models": [asdict(model) for model in found]}, indent=2, ensure_ascii=False))
    else:
        sys.stdout.write(safe(found_table(found, datetime.now(UTC)), sys.stdout))


def found_table(models: Iterable[Found], now: datetime) -> str:
    rows = [("NAME", "DOWNLOADS", "LIKES", "UPDATED")]
    for model in models:
        updated = modified(model.updated_at, now) if model.updated_at else ""
        rows.append((model.name, human_count(model.downloads), human_count(model.likes), updated))
    return table(rows)
