"""``puna list`` (``ls``): the models in the store."""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from puna.cli.connect import connected
from puna.cli.format import human_bytes, human_time, parse_time
from puna.cli.options import JsonFlag, Prefix
from puna.cli.table import table
from puna.cli.terminal import safe

_ID_CHARS = 12


def list_models(prefix: Prefix = "", json: JsonFlag = False) -> None:
    """List the models in the store."""
    with connected() as client:
        models = with_prefix(client.tags().get("models") or [], prefix)
    if json:
        print(json_format.dumps({"models": models}, indent=2, ensure_ascii=False))
    else:
        sys.stdout.write(safe(models_table(models, datetime.now(UTC)), sys.stdout))


def with_prefix(models: Iterable[Mapping[str, Any]], prefix: str) -> list[Mapping[str, Any]]:
    return [model for model in models if str(model.get("name", "")).lower().startswith(prefix.lower())]


def models_table(models: Iterable[Mapping[str, Any]], now: datetime) -> str:
    rows = [("NAME", "ID", "SIZE", "MODIFIED")]
    for model in models:
        is_remote = bool(model.get("remote_model"))
        rows.append(
            (
                str(model.get("name", "")),
                str(model.get("digest", ""))[:_ID_CHARS],
                "-" if is_remote else human_bytes(int(model.get("size") or 0)),
                modified(str(model.get("modified_at", "")), now),
            )
        )
    return table(rows)


def modified(text: str, now: datetime) -> str:
    try:
        return human_time(parse_time(text), now)
    except ValueError:
        return "Never"
