"""One server over many machines: each holds models of its own, and a request goes where its beginning was computed before.

``serve run puna.cluster:app`` starts it on Ray Serve, ``puna serve --ray`` as Puna's own server.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """``app`` is made when it is asked for: Ray is heavy, and an extra."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from puna.cluster.rays.head import application

    return application()
