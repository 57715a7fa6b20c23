"""``puna ps``: the models in memory."""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from puna.cli.connect import connected
from puna.cli.format import human_bytes, human_expiry, parse_time, processor
from puna.cli.listing import with_prefix
from puna.cli.options import JsonFlag, Prefix
from puna.cli.table import table
from puna.cli.terminal import safe

_ID_CHARS = 12


def ps(prefix: Prefix = "", json: JsonFlag = False) -> None:
    """List the models that are loaded."""
    with connected(private=False) as client:
        models = with_prefix(client.ps().get("models") or [], prefix)
    if json:
        print(json_format.dumps({"models": models}, indent=2, ensure_ascii=False))
    else:
        sys.stdout.write(safe(running_table(models, datetime.now(UTC)), sys.stdout))


def running_table(models: Iterable[Mapping[str, Any]], now: datetime) -> str:
    rows = [("NAME", "ID", "SIZE", "PROCESSOR", "CONTEXT", "UNTIL")]
    for model in models:
        n_bytes = int(model.get("size") or 0)
        rows.append(
            (
                str(model.get("name", "")),
                str(model.get("digest", ""))[:_ID_CHARS],
                human_bytes(n_bytes),
                processor(n_bytes, int(model.get("size_vram") or 0)),
                str(model.get("context_length") or ""),
                _until(str(model.get("expires_at", "")), now),
            )
        )
    return table(rows)


def _until(text: str, now: datetime) -> str:
    try:
        return human_expiry(parse_time(text), now)
    except ValueError:
        return "Never"
