"""``puna serve``: run the server in the foreground."""

from __future__ import annotations

from typing import Annotated

import typer

from puna.settings import load


def serve(
    ray: Annotated[
        bool, typer.Option("--ray", help="Have models on all machines of a Ray cluster; one is started if there is none.")
    ] = False,
) -> None:
    """Start the server."""
    if ray:
        from puna.cluster.rays.head import serve as serve_cluster

        serve_cluster(load())
        return
    from puna.server.process.serve import serve as run_server

    run_server(load())
