"""Bare ``puna`` on a terminal: the models there are to talk with, and what else a person may want to do first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from puna.api.client import Client
from puna.cli.connect import connected
from puna.cli.format import human_bytes
from puna.cli.listing import modified
from puna.cli.options import model_reference
from puna.cli.picker import pick
from puna.cli.run import STARTER_MODEL, RunOptions, talk
from puna.cli.table import table
from puna.errors import NotFound

_TITLE = "What shall it be? (arrows and Enter; q leaves)"

Action = Callable[[], None]


def menu(show_help: Action) -> None:
    """Have a person choose, and do it."""
    with connected() as client:
        models = [model for model in client.tags().get("models") or [] if _talks(model)]
        offered = [(*_described(model), _chat(client, str(model.get("name", "")))) for model in models]
        if all(name != STARTER_MODEL for name, *_ in offered):
            offered.append((STARTER_MODEL, "", "fetched first, a small one to begin with", _chat(client, STARTER_MODEL)))
        labels = table([(f"Chat with {name}", size, when) for name, size, when, _ in offered]).splitlines()
        actions = [action for *_, action in offered]
        labels += ["Chat with another model", "Show the commands", "Leave"]
        actions += [lambda: _chat_with_another(client), show_help, lambda: None]
        picked = pick(_TITLE, labels)
        if picked is not None:
            actions[picked]()


def _talks(model: Mapping[str, Any]) -> bool:
    """Whether a model makes conversation; servers that do not say are believed."""
    capabilities = model.get("capabilities")
    return not capabilities or "completion" in capabilities


def _described(model: Mapping[str, Any]) -> tuple[str, str, str]:
    size = "" if model.get("remote_model") else human_bytes(int(model.get("size") or 0))
    return str(model.get("name", "")), size, modified(str(model.get("modified_at", "")), datetime.now(UTC))


def _chat(client: Client, name: str) -> Action:
    return lambda: talk(client, name, RunOptions())


def _chat_with_another(client: Client) -> None:
    try:
        name = input("Name of a model, or its source: ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return
    if not name:
        raise NotFound("no name was given")
    talk(client, model_reference(name), RunOptions())
