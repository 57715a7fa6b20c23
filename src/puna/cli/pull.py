"""``puna pull``: fetch a model into the store."""

from __future__ import annotations

import json as json_format
from typing import Annotated

import typer

from puna.cli.completion import pullable_models
from puna.cli.connect import connected
from puna.cli.options import Insecure
from puna.cli.progress import follow


def pull(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", autocompletion=pullable_models, show_default=False, help="Name of a model, or its source."
        ),
    ],
    name: Annotated[
        str, typer.Option("--as", metavar="NAME", show_default=False, help="What to call it here, instead of its usual name.")
    ] = "",
    insecure: Insecure = False,
    json: Annotated[bool, typer.Option("--json", help="Print the server's progress as lines of JSON.")] = False,
) -> None:
    """Fetch a model into the store."""
    with connected() as client:
        events = client.pull(model, insecure=insecure, name=name)
        if json:
            for event in events:
                print(json_format.dumps(event, ensure_ascii=False), flush=True)
        else:
            follow(events)
