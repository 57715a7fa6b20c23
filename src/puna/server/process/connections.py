"""Which connections may stay: how many there may be, in all and of one peer, and how long each may keep us waiting.

Whoever has sent a whole request is served, however long that takes. Who has not can be made to leave: when places are
short the one that has waited longest goes first, so that no number of silent connections keeps anybody out.
Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from puna.settings import Settings

log = logging.getLogger(__name__)

AUTO_CONNECTIONS = 4096
PEERS_SHARE = 0.75  # of all connections, for one peer
LINGER_S = 5.0  # to read an answer that came before its request was complete, or why the connection is closed
_OTHER_FILES = 256  # of the process: runners, models, libraries
_TARGET_FILES = 1 << 16
_POLLS_PER_TIMEOUT, _LONGEST_POLL_S = 4, 1.0


@dataclass(frozen=True)
class Limits:
    n_connections: int = AUTO_CONNECTIONS
    n_per_peer: int = int(AUTO_CONNECTIONS * PEERS_SHARE)
    patience_s: float = 60.0  # for a request's head, for some more of its body, for some of the answer to be read


def limits_of(settings: Settings) -> Limits:
    """Those of the settings; where they leave it open, as many as this process may have files."""
    n_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    fitting = min(AUTO_CONNECTIONS, max(n_files - _OTHER_FILES, n_files // 2))
    n_connections = settings.max_connections or fitting
    n_per_peer = settings.max_connections_per_peer or max(1, int(n_connections * PEERS_SHARE))
    return Limits(n_connections, n_per_peer, settings.client_timeout)


def allow_many_files() -> None:
    """Every connection is a file to the system, which grants few of them unless it is asked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _TARGET_FILES if hard == resource.RLIM_INFINITY else min(hard, _TARGET_FILES)
    if soft != resource.RLIM_INFINITY and soft < target:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        except (OSError, ValueError) as error:
            log.debug("the number of open files stays at %d: %s", soft, error)


class Connection(Protocol):
    peer: str

    def check(self, now: float) -> None:
        """Leave if the other side has kept us waiting for too long."""

    def leave(self) -> None:
        """At once: the place is needed."""


class Connections:
    """All of one server. Belongs to one event loop. *clock* tells the seconds that patience is measured in."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.clock = clock
        self._all: set[Connection] = set()
        self._n_of_peer: Counter[str] = Counter()
        # Those that may be made to leave, first come first: without a whole head, and without a whole body.
        self._headless: dict[Connection, None] = {}
        self._bodiless: dict[Connection, None] = {}
        self._sweep: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._all)

    def admit(self, connection: Connection) -> bool:
        """Whether there is a place for it, if need be that of another."""
        if self._n_of_peer[connection.peer] >= self.limits.n_per_peer and not self._make_room(connection.peer):
            return False
        if len(self._all) >= self.limits.n_connections and not self._make_room(None):
            return False
        self._all.add(connection)
        self._n_of_peer[connection.peer] += 1
        self.wait_for_head(connection)
        if self._sweep is None:
            self._schedule()
        return True

    def wait_for_head(self, connection: Connection) -> None:
        self._bodiless.pop(connection, None)
        if connection in self._all:
            self._headless.setdefault(connection)

    def wait_for_body(self, connection: Connection) -> None:
        self._headless.pop(connection, None)
        if connection in self._all:
            self._bodiless.setdefault(connection)

    def keep(self, connection: Connection) -> None:
        """It has sent a whole request: it stays until that is answered."""
        self._headless.pop(connection, None)
        self._bodiless.pop(connection, None)

    def forget(self, connection: Connection) -> None:
        self.keep(connection)
        if connection in self._all:
            self._all.remove(connection)
            self._n_of_peer[connection.peer] -= 1
            if not self._n_of_peer[connection.peer]:
                del self._n_of_peer[connection.peer]

    def _make_room(self, peer: str | None) -> bool:
        for waiting in (self._headless, self._bodiless):
            found = next((connection for connection in waiting if peer is None or connection.peer == peer), None)
            if found is not None:
                self.forget(found)
                found.leave()
                return True
        return False

    def _schedule(self) -> None:
        pause_s = min(self.limits.patience_s / _POLLS_PER_TIMEOUT, _LONGEST_POLL_S)
        self._sweep = asyncio.get_running_loop().call_later(pause_s, self._check_regularly)

    def _check_regularly(self) -> None:
        self._sweep = None
        self.check()
        if self._all:
            self._schedule()

    def check(self) -> None:
        """Whoever has kept us waiting for too long leaves."""
        now = self.clock()
        for connection in list(self._all):
            connection.check(now)
