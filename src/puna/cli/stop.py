"""``puna stop``: unload a model now."""

from __future__ import annotations

from puna.cli.connect import connected
from puna.cli.options import Model, model_reference
from puna.errors import NotFound


def stop(model: Model) -> None:
    """Unload a model from memory."""
    with connected(private=False) as client:
        try:
            for _ in client.generate({"model": model_reference(model), "keep_alive": 0}):
                pass
        except NotFound as error:
            raise NotFound(f'couldn\'t find model "{model}" to stop') from error
