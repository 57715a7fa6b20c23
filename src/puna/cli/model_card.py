"""What ``puna show`` and ``/show info`` print about a model, from the reply of /api/show."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from puna.api.parameter_count import human_number
from puna.cli.table import table

_EXCERPT_LINES = 2
_SHOWN_ITEMS = 3

Row = tuple[str, ...]


def model_card(reply: Mapping[str, Any], *, verbose: bool = False) -> str:
    """Sections with a heading each; those without content are left out."""
    details, info = reply.get("details") or {}, reply.get("model_info") or {}
    sections: list[tuple[str, list[Row]]] = [
        ("Model", _model_rows(reply, details, info)),
        ("Capabilities", [(str(name),) for name in reply.get("capabilities") or []]),
        ("Projector", _projector_rows(reply.get("projector_info") or {})),
        ("Parameters", parameter_rows(str(reply.get("parameters") or ""))),
    ]
    if verbose:
        sections += [("Metadata", _metadata_rows(info)), ("Tensors", _tensor_rows(reply.get("tensors") or []))]
    sections += [("System", _excerpt(reply.get("system"))), ("License", _excerpt(reply.get("license")))]
    return "\n".join(f"  {heading}\n{table(rows, indent='    ')}" for heading, rows in sections if rows)


def parameter_rows(text: str) -> list[Row]:
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def _model_rows(reply: Mapping[str, Any], details: Mapping[str, Any], info: Mapping[str, Any]) -> list[Row]:
    architecture = info.get("general.architecture") or details.get("family") or ""
    count = info.get("general.parameter_count")
    values = {
        "architecture": architecture,
        "parameters": human_number(int(count)) if count else details.get("parameter_size"),
        "context length": info.get(f"{architecture}.context_length") or details.get("context_length"),
        "embedding length": info.get(f"{architecture}.embedding_length") or details.get("embedding_length"),
        "quantization": details.get("quantization_level"),
        "requires": reply.get("requires"),
        "engine": _engine(reply),
        "remote model": reply.get("remote_model"),
        "remote url": reply.get("remote_host"),
    }
    return [(name, str(value)) for name, value in values.items() if value]


def _engine(reply: Mapping[str, Any]) -> str:
    """Which engine runs the model, and why; nothing from servers that do not say."""
    engine, reason = reply.get("engine") or "", reply.get("engine_reason") or ""
    return f"{engine} ({reason})" if engine and reason else str(engine)


def _projector_rows(info: Mapping[str, Any]) -> list[Row]:
    if not info:
        return []
    architecture = str(info.get("general.architecture", ""))
    count = info.get("general.parameter_count")
    values = {
        "architecture": architecture,
        "parameters": human_number(int(count)) if count else None,
        "embedding length": info.get(f"{architecture}.vision.embedding_length"),
        "dimensions": info.get(f"{architecture}.vision.projection_dim"),
    }
    return [(name, str(value)) for name, value in values.items() if value]


def _metadata_rows(info: Mapping[str, Any]) -> list[Row]:
    return [(key, _metadata_value(info[key])) for key in sorted(info)]


def _metadata_value(value: Any) -> str:
    if isinstance(value, list):
        shown = ", ".join(json.dumps(item, ensure_ascii=False) for item in value[:_SHOWN_ITEMS])
        return f"[{shown}, ...+{len(value) - _SHOWN_ITEMS} more]" if len(value) > _SHOWN_ITEMS else f"[{shown}]"
    return value if isinstance(value, str) else json.dumps(value)


def _tensor_rows(tensors: list[Mapping[str, Any]]) -> list[Row]:
    return [(str(t.get("name", "")), str(t.get("type", "")), str(t.get("shape", ""))) for t in tensors]


def _excerpt(text: Any) -> list[Row]:
    lines = [line.strip() for line in str(text or "").splitlines() if line.strip()]
    shown: list[Row] = [(line,) for line in lines[:_EXCERPT_LINES]]
    return [*shown, ("...",)] if len(lines) > _EXCERPT_LINES else shown
