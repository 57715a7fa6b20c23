"""``puna cp``: give a model a second name."""

from __future__ import annotations

from typing import Annotated

import typer

from puna.cli.connect import connected
from puna.cli.options import Model


def cp(
    source: Model,
    destination: Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="The new name.")],
) -> None:
    """Copy a model under a new name; its files are shared."""
    with connected() as client:
        client.copy(source, destination)
    print(f"copied '{source}' to '{destination}'")
