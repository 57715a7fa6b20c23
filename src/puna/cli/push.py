"""``puna push``: send a model to the registry of its name."""

from __future__ import annotations

import json as json_format
from typing import Annotated

import typer

from puna.cli.connect import connected
from puna.cli.options import Insecure, Model
from puna.cli.progress import follow


def push(
    model: Model,
    insecure: Insecure = False,
    json: Annotated[bool, typer.Option("--json", help="Print the server's progress as lines of JSON.")] = False,
) -> None:
    """Send a model to the registry of its name."""
    with connected() as client:
        events = client.push(model, insecure=insecure)
        if json:
            for event in events:
                print(json_format.dumps(event, ensure_ascii=False), flush=True)
        else:
            follow(events)
