"""The two ways to start a head: as Puna's own server (``puna serve --ray``), and as an application of Ray Serve.

Both are the same routes over the same pipeline, and only what finds places for requests differs from the server of one machine.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import replace
from typing import Any

from starlette.applications import Starlette

from puna.cluster.head.nodes import Nodes
from puna.cluster.head.scheduler import ClusterScheduler
from puna.cluster.rays.joining import join, ray_module
from puna.cluster.rays.membership import RayMembership
from puna.cluster.routing.router import ROUTES
from puna.server.app import create_app
from puna.server.http.access import check_exposure
from puna.server.process.log import log_to_stderr
from puna.settings import Address, Settings, load
from puna.store.sources.elsewhere import Elsewhere
from puna.store.store import Store

log = logging.getLogger(__name__)

_MAX_REQUESTS = 1 << 16  # of one head of Ray Serve: what may wait is for Puna to say, where it has a place for it


def cluster_scheduler(settings: Settings) -> ClusterScheduler:
    head = f"head-{secrets.token_hex(4)}"
    return ClusterScheduler(Nodes(RayMembership(head), head), route=ROUTES[settings.cluster_route])


def serve(settings: Settings) -> None:
    """As puna.server.process.serve.serve, with the models on all machines of a Ray cluster.

    Errors: PunaError when there is no Ray.
    """
    from puna.server.process.serve import serve as serve_here

    join()
    try:
        serve_here(settings, scheduler=cluster_scheduler(settings))
    finally:
        ray_module().shutdown()


def head_app() -> Starlette:
    """The server's application, for a process that Ray Serve has started."""
    proxy = _proxy()
    settings = replace(load(), host=proxy)
    log_to_stderr(settings)
    check_exposure(settings, f"Ray Serve's proxy, which listens on {proxy.host},")
    store = Store(settings.models, keep_unused=settings.no_prune, elsewhere=Elsewhere.of(settings))
    return create_app(settings, store, cluster_scheduler(settings))


def _proxy() -> Address:
    """Where Ray listens for clients in our place: OLLAMA_HOST says nothing of that."""
    from ray.serve import context

    client: Any = context._get_global_client()
    options = client.http_config
    return Address(host=options.host or "127.0.0.1", port=options.port)  # without a host nobody listens


def application() -> Any:
    """What ``serve run puna.cluster:app`` runs.

    Errors: PunaError when Ray is not installed.
    """
    ray_module()
    from ray import serve as ray_serve

    deployment: Any = ray_serve.deployment(
        ray_serve.ingress(head_app)(),
        name="puna",
        max_ongoing_requests=_MAX_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=600.0,
    )
    return deployment.bind()
