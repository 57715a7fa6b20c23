from __future__ import annotations

import math
import socket

import pytest

from puna.keepalive import probe


@pytest.mark.parametrize(("unacknowledged_s", "set_ms"), [(60.0, 60_000), (math.inf, 0), (1e9, 0), (0.0, 1)])
def test_the_system_is_to_ask_and_to_give_up(unacknowledged_s: float, set_ms: int) -> None:
    with socket.socket() as sock:
        probe(sock, unacknowledged_s)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, interval, n = (
            sock.getsockopt(socket.IPPROTO_TCP, name) for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + interval * n <= 90
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == set_ms


def test_what_leads_to_no_other_machine_is_left_alone() -> None:
    one, other = socket.socketpair()
    with one, other:
        probe(one, 60.0)
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0


def test_one_that_is_closed_already_is_no_failure() -> None:
    class Closed(socket.socket):
        def setsockopt(self, *_: object) -> None:
            raise OSError(22, "Invalid argument")

    with Closed() as sock:
        probe(sock, 60.0)
