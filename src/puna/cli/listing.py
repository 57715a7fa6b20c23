"""``puna list`` (``ls``): the models in the store."""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from puna.cli.connect import connected, settings
from puna.cli.format import human_bytes, human_time, parse_time
from puna.cli.options import JsonFlag, Prefix
from puna.cli.table import table
from puna.cli.terminal import safe

_ID_CHARS = 12


def list_models(
    prefix: Prefix = "",
    everything: Annotated[
        bool, typer.Option("--all", help="Also model files of other programs, which can be run by their paths.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """List the models in the store."""
    with connected() as client:
        models = with_prefix(client.tags().get("models") or [], prefix)
    files = _files_of_others(prefix) if everything and settings().host.is_here else []
    if json:
        found = {"models": models, **({"files": files} if everything else {})}
        print(json_format.dumps(found, indent=2, ensure_ascii=False))
    else:
        listed = [*models, *({**item, "name": item["path"], "digest": "-"} for item in files)]
        sys.stdout.write(safe(models_table(listed, datetime.now(UTC)), sys.stdout))


def _files_of_others(prefix: str) -> list[dict[str, Any]]:
    """Of the hub's cache and of LM Studio, by the beginning of their own names or of their paths."""
    from puna.store.sources.strangers import find

    home = Path.home()
    folders = [settings().hub_cache or settings().hub_home / "hub", home / ".lmstudio" / "models"]
    found = find([*folders, home / ".cache" / "lm-studio" / "models"])
    return [
        {
            "path": str(item.path),
            "size": item.n_bytes,
            "modified_at": datetime.fromtimestamp(item.modified_at, UTC).isoformat(),
            "family": item.family,
            "quantization_level": item.quantization,
        }
        for item in found
        if any(text.lower().startswith(prefix.lower()) for text in (item.path.name, str(item.path)))
    ]


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
