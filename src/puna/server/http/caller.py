"""Who sends a request: from where, since when, and what its key is good for."""

from __future__ import annotations

import ipaddress
import time
from dataclasses import dataclass

from starlette.requests import HTTPConnection

from puna.server.http import request_id
from puna.server.http.access import may_manage, salt_of


@dataclass(frozen=True)
class Caller:
    is_local: bool
    may_manage: bool
    salt: str  # of its key, if prompts of different keys are kept apart
    request_id: str
    began_ns: int

    @classmethod
    def of(cls, request: HTTPConnection) -> Caller:
        return cls(_is_loopback(request), may_manage(request), salt_of(request), request_id.current(), time.monotonic_ns())


def _is_loopback(request: HTTPConnection) -> bool:
    if request.client is None:  # a Unix socket
        return True
    try:
        return ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False
