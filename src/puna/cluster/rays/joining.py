"""Joining a Ray cluster: the one that RAY_ADDRESS names or that was started on this machine, else one that is started now.

Who gets into a Ray cluster may run programs on all its machines. One that is started here listens on loopback and wants a token,
which Ray keeps in the user's home. Ray's reports of its use and its dashboard are off unless they are asked for.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from typing import Any

from puna.errors import PunaError

log = logging.getLogger(__name__)

NAMESPACE = "puna"
_OBJECT_STORE_BYTES = 80 << 20  # nothing of Puna's goes through it
_KNOCK_TIMEOUT_S = 10.0
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


def ray_module() -> Any:
    """Errors: PunaError when it is not installed."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)  # read when Ray is imported, here and by the processes that it starts
    try:
        import ray
    except ImportError as error:
        raise PunaError("a cluster needs Ray: pip install 'puna[cluster]'") from error
    return ray


def join() -> None:
    """Errors: PunaError when the cluster that was named cannot be reached or lets nobody in, or none can be started."""
    ray = ray_module()
    if ray.is_initialized():
        return
    common = {"namespace": NAMESPACE, "logging_level": logging.WARNING, "log_to_driver": False}
    address = _address()
    if address is None:
        _start(ray, common)
        return
    try:
        _knock(address)
        ray.init(address=address, **common)
    except ConnectionError as error:
        token = "" if _wants_token() else "; one that wants a token is reached with RAY_AUTH_MODE=token"
        raise PunaError(
            f"{address}: no cluster of Ray can be reached there (RAY_ADDRESS, or what ray start left here){token}"
        ) from error
    except ray.exceptions.AuthenticationError as error:
        raise PunaError(
            f"{address}: the cluster's token is not here: bring ~/.ray/auth_token from where ray get-auth-token made it"
        ) from error
    _warn(ray)


def _knock(address: str) -> None:
    """Ray itself tries for minutes where nobody listens.

    Errors: ConnectionError.
    """
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _KNOCK_TIMEOUT_S).close()
    except OSError as error:
        raise ConnectionError(str(error)) from error


def _wants_token() -> bool:
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def _address() -> str | None:
    """What was named, or what ``ray start`` left for this machine; None: there is nothing.

    Not ``auto``, which also takes whatever cluster of somebody else it finds among the processes.
    """
    from ray._private import services

    found: str | None = services.canonicalize_bootstrap_address(None)  # type: ignore[arg-type]  # as it says itself
    return found


def _start(ray: Any, common: dict[str, Any]) -> None:
    log.info("no cluster of Ray was found: one is started on this machine")
    _keep_to_loopback()
    try:
        ray.init(
            address="local",
            include_dashboard=False,
            num_cpus=1,
            object_store_memory=_OBJECT_STORE_BYTES,
            **common,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise PunaError(f"Ray cannot be started: {error}") from error


def _keep_to_loopback() -> None:
    """Ray takes 127.0.0.1 for the machine's other address wherever it is named. This is how it stays there on desktops."""
    from ray._private import ray_constants

    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # for the processes that it starts
    ray_constants.ENABLE_RAY_CLUSTER = False


def _warn(ray: Any) -> None:
    addresses = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    others = sorted(address for address in addresses if not ipaddress.ip_address(address).is_loopback)
    if others:
        log.warning(
            "neither Ray nor the lines between Puna's nodes are encrypted, and who is let in by Ray may run programs on its "
            "machines (%s): keep others out of that network%s",
            ", ".join(others),
            "" if _wants_token() else ", and have Ray ask for a token (RAY_AUTH_MODE=token)",
        )
