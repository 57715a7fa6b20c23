"""Write the dashboard for Grafana: ``python -m tools.dashboard``.

Each panel is a title, a unit and what Prometheus is asked; a test holds the names against what a server counts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "packaging" / "grafana" / "puna.json"

WINDOW = "$__rate_interval"
MODEL = '{model=~"$model"}'
_WIDTH, _HEIGHT, _PER_ROW = 8, 8, 3


class Panel(NamedTuple):
    title: str
    unit: str  # as Grafana calls it
    queries: dict[str, str]  # PromQL by the name of the line


def _rate(name: str) -> str:
    return f"sum by (model) (rate({name}{MODEL}[{WINDOW}]))"


def _sum(name: str) -> str:
    return f"sum by (model) ({name}{MODEL})"


def _quantile(share: float, name: str) -> str:
    return f"histogram_quantile({share}, sum by (le, model) (rate({name}_bucket{MODEL}[{WINDOW}])))"


def _quantiles(name: str) -> dict[str, str]:
    return {f"{{{{model}}}} p{round(share * 100)}": _quantile(share, name) for share in (0.5, 0.95)}


PANELS = (
    Panel("Tokens of answers", "short", {"{{model}}": _rate("puna_runner_answer_tokens_total")}),
    Panel(
        "Tokens of prompts, computed and found in the cache",
        "short",
        {
            "{{model}} computed": f"{_rate('puna_runner_tokens_total')} - {_rate('puna_runner_answer_tokens_total')}",
            "{{model}} found": _rate("puna_prompt_tokens_cached_total"),
        },
    ),
    Panel("Steps", "ops", {"{{model}}": _rate("puna_runner_steps_total")}),
    Panel(
        "Requests being computed and waiting",
        "short",
        {
            "{{model}} computed": _sum("puna_runner_requests_active"),
            "{{model}} in the runner's queue": _sum("puna_runner_requests_waiting"),
            "{{model}} for the model": _sum("puna_requests_waiting"),
        },
    ),
    Panel("Time to the first token", "s", _quantiles("puna_time_to_first_token_seconds")),
    Panel("Time between tokens", "s", _quantiles("puna_inter_token_seconds")),
    Panel("Wait for a place and the model's load", "s", _quantiles("puna_queue_seconds")),
    Panel("Whole requests", "s", _quantiles("puna_request_duration_seconds")),
    Panel("Requests by outcome", "reqps", {"{{outcome}}": f"sum by (outcome) (rate(puna_requests_total{MODEL}[{WINDOW}]))"}),
    Panel("Key/value cache", "percentunit", {"{{model}}": f"{_sum('puna_cache_cells_used')} / {_sum('puna_cache_cells')}"}),
    Panel("Host cache", "bytes", {"{{model}}": _sum("puna_host_cache_bytes")}),
    Panel(
        "Memory by device",
        "bytes",
        {
            "{{device}}": f"sum by (device) (puna_model_memory_bytes{MODEL})",
            "the idle runner": "puna_spare_runner_bytes",
            "the server": "process_resident_memory_bytes",
        },
    ),
    Panel("Texts embedded or ranked", "short", {"{{model}}": _rate("puna_embedding_texts_total")}),
    Panel("Models loaded", "short", {"models": "puna_models_loaded"}),
)


def dashboard() -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "title": "Puna",
        "uid": "puna",
        "tags": ["puna", "llm"],
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
                {
                    "name": "model",
                    "label": "Model",
                    "type": "query",
                    "datasource": source,
                    "query": {"query": "label_values(puna_requests_total, model)", "refId": "model"},
                    "includeAll": True,
                    "multi": True,
                    "allValue": ".*",
                    "current": {"text": "All", "value": "$__all"},
                    "refresh": 2,
                },
            ]
        },
        "panels": [_panel(number, panel, source) for number, panel in enumerate(PANELS)],
    }


def _panel(number: int, panel: Panel, source: dict[str, str]) -> dict[str, Any]:
    row, column = divmod(number, _PER_ROW)
    targets = [
        {"datasource": source, "expr": query, "legendFormat": name, "refId": chr(ord("A") + i)}
        for i, (name, query) in enumerate(panel.queries.items())
    ]
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": source,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(text())


if __name__ == "__main__":
    main()
