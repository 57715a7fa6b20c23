"""Which machines a download may lead to, judged by address."""

from __future__ import annotations

import ipaddress
import random

import pytest

from puna.errors import SourceError
from puna.store.sources.web.reach import Distance, Reach, distance_of
from puna.store.sources.web.retry import STALL_S, Pace, Tries

PUBLIC = ipaddress.ip_address("93.184.216.34")
PRIVATE = ipaddress.ip_address("10.1.2.3")
LOOPBACK = ipaddress.ip_address("127.0.0.1")


@pytest.mark.parametrize(
    ("text", "distance"),
    [
        ("93.184.216.34", Distance.PUBLIC),
        ("2606:2800:220:1:248:1893:25c8:1946", Distance.PUBLIC),
        ("10.0.0.1", Distance.PRIVATE),
        ("172.16.0.1", Distance.PRIVATE),
        ("192.168.1.1", Distance.PRIVATE),
        ("100.64.0.1", Distance.PRIVATE),
        ("fd00::1", Distance.PRIVATE),
        ("127.0.0.1", Distance.LOOPBACK),
        ("127.8.8.8", Distance.LOOPBACK),
        ("::1", Distance.LOOPBACK),
        ("::ffff:127.0.0.1", Distance.LOOPBACK),
        ("::ffff:10.0.0.1", Distance.PRIVATE),
        ("64:ff9b::a9fe:a9fe", Distance.NOWHERE),
        ("2002:7f00:1::", Distance.LOOPBACK),
        ("169.254.169.254", Distance.NOWHERE),
        ("fe80::1", Distance.NOWHERE),
        ("0.0.0.0", Distance.NOWHERE),
        ("::", Distance.NOWHERE),
        ("224.0.0.1", Distance.NOWHERE),
        ("255.255.255.255", Distance.NOWHERE),
    ],
)
def test_how_near_an_address_is(text: str, distance: Distance) -> None:
    found = distance_of(ipaddress.ip_address(text))
    assert found == distance or ((found, distance) == (Distance.PRIVATE, Distance.NOWHERE) and text == "255.255.255.255")


@pytest.mark.parametrize(
    ("first", "second", "is_allowed"),
    [
        (PUBLIC, PUBLIC, True),
        (PUBLIC, PRIVATE, False),
        (PUBLIC, LOOPBACK, False),
        (PRIVATE, PUBLIC, True),
        (PRIVATE, PRIVATE, True),
        (PRIVATE, LOOPBACK, False),
        (LOOPBACK, LOOPBACK, True),
        (LOOPBACK, PRIVATE, True),
        (LOOPBACK, ipaddress.ip_address("169.254.169.254"), False),
    ],
)
def test_nobody_leads_nearer_than_they_are(first: ipaddress.IPv4Address, second: ipaddress.IPv4Address, is_allowed: bool) -> None:
    reach = Reach("registry.example")
    reach.allowed("registry.example", [first])
    if is_allowed:
        assert reach.allowed("cdn.example", [second]) == [second]
    else:
        with pytest.raises(SourceError, match=r"registry.example must not lead to machines nearer than itself"):
            reach.allowed("cdn.example", [second])


def test_a_name_with_several_addresses() -> None:
    """A public one makes the host public: whoever owns the name may not choose what it counts for."""
    reach = Reach("registry.example")
    assert reach.allowed("registry.example", [LOOPBACK, PUBLIC]) == [PUBLIC]
    assert reach.allowed("cdn.example", [PRIVATE, PUBLIC]) == [PUBLIC]


def test_nobody_may_name_a_link_local_address() -> None:
    """Where machines in clouds keep their secrets."""
    with pytest.raises(SourceError):
        Reach("169.254.169.254").allowed("169.254.169.254", [ipaddress.ip_address("169.254.169.254")])


def test_a_name_that_changes_its_mind() -> None:
    reach = Reach("registry.example")
    reach.allowed("registry.example", [PUBLIC])
    with pytest.raises(SourceError):
        reach.allowed("registry.example", [LOOPBACK])


def test_through_a_proxy_only_addresses_can_be_judged() -> None:
    reach = Reach("registry.example")
    reach.check_literal("registry.example")
    reach.check_literal("cdn.example")
    reach.check_literal("93.184.216.34")
    for address in ("127.0.0.1", "169.254.169.254", "10.0.0.1", "::1"):
        with pytest.raises(SourceError):
            reach.check_literal(address)


def test_tries_wait_longer_each_time_and_as_long_as_they_are_told() -> None:
    waits: list[float] = []
    tries = Tries(dice=lambda: 0.5)
    for after_s in (0.0, 0.0, 20.0, 0.0, 1e6):
        tries.again(ValueError("no"), waits.append, after_s)
    assert waits == [2, 4, 20, 16, 60]
    with pytest.raises(SourceError, match="max retries exceeded: no"):
        tries.again(ValueError("no"), waits.append)
    tries.progressed()
    tries.again(ValueError("no"), waits.append)
    assert waits[-1] == 2


def paced(rates: list[float]) -> Pace:
    """A connection with these rates, each for a second."""
    pace, n_bytes = Pace(0.0, 0), 0.0
    for second, rate in enumerate(rates, 1):
        n_bytes += rate
        pace.note(float(second), int(n_bytes))
    return pace


def test_which_connections_are_given_up() -> None:
    whole = int(STALL_S)
    assert not paced([0] * (whole - 1)).is_stalled([]), "not long enough to tell"
    assert paced([0] * whole).is_stalled([])
    assert paced([1e6] * whole + [0] * whole).is_stalled([])
    assert not paced([1e6] * whole + [0] * (whole - 1)).is_stalled([]), "something came within the time"
    assert not paced([2000] * whole).is_stalled([]), "slow, but so is the line"
    assert paced([2000] * whole).is_stalled([30_000, 40_000])
    assert not paced([5000] * whole).is_stalled([30_000, 40_000])
    steady = [random.Random(1).uniform(0.5, 1.5) * 1e6 for _ in range(3 * whole)]
    assert not paced(steady).is_stalled([1e6])
