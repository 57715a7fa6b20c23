"""``puna stop``: unload a model now."""

from __future__ import annotations

from typing import Annotated

import typer

from puna.cli.completion import loaded_models
from puna.cli.connect import connected
from puna.cli.options import model_reference
from puna.errors import NotFound


def stop(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", autocompletion=loaded_models, show_default=False, help="Name of a model.")
    ],
) -> None:
    """Unload a model from memory."""
    with connected(private=False) as client:
        try:
            for _ in client.generate({"model": model_reference(model), "keep_alive": 0}):
                pass
        except NotFound as error:
            raise NotFound(f'couldn\'t find model "{model}" to stop') from error
