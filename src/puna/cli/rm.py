"""``puna rm``: delete models from the store."""

from __future__ import annotations

import sys

from puna.api.client import Client
from puna.cli.connect import connected
from puna.cli.options import Models
from puna.errors import NotFound, PunaError


def rm(models: Models) -> None:
    """Delete models from the store."""
    with connected() as client:
        for model in models:
            _unload(client, model)
            client.delete(model)
            print(f"deleted '{model}'", flush=True)


def _unload(client: Client, model: str) -> None:
    try:
        for _ in client.generate({"model": model, "keep_alive": 0}):
            pass
    except NotFound:
        pass  # deleting will say so
    except PunaError:
        print(f"Warning: unable to stop model '{model}'", file=sys.stderr)
