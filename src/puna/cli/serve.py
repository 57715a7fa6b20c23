"""``puna serve``: run the server in the foreground."""

from __future__ import annotations

from puna.settings import load


def serve() -> None:
    """Start the server."""
    from puna.server.process.serve import serve as run_server

    run_server(load())
