"""Which machines a download may reach: what a public host says must not lead into the network that the server stands in.

Whoever asks for a model names a host. From there on others name hosts: in redirects, in upload locations, in the realm of
a challenge. Those may be no nearer to this machine than the first one. Addresses are judged when they are connected to, so a
name that means something else a moment later gains nothing.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from enum import IntEnum

from puna.errors import SourceError

resolve = socket.getaddrinfo

IP = ipaddress.IPv4Address | ipaddress.IPv6Address

_SHARED = ipaddress.ip_network("100.64.0.0/10")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class Distance(IntEnum):
    """How near an address is; NOWHERE is never connected to."""

    PUBLIC = 0
    PRIVATE = 1
    LOOPBACK = 2
    NOWHERE = 3


def distance_of(address: IP) -> Distance:
    """An address that carries another one inside is as near as that."""
    inner = _inside(address)
    if inner is not None:
        return distance_of(inner)
    if address.is_loopback:
        return Distance.LOOPBACK
    if address.is_link_local or address.is_multicast or address.is_unspecified:
        return Distance.NOWHERE
    if address.is_private or (address.version == 4 and address in _SHARED):
        return Distance.PRIVATE
    return Distance.NOWHERE if address.is_reserved else Distance.PUBLIC


def _inside(address: IP) -> ipaddress.IPv4Address | None:
    if not isinstance(address, ipaddress.IPv6Address):
        return None
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)


class Reach:
    """The machines that may be reached for the sake of one host."""

    def __init__(self, host: str) -> None:
        self.host = host.lower()
        self._furthest: Distance | None = None  # how near to this machine others may be: as near as the host is

    def addresses(self, host: str, port: int) -> list[str]:
        """The addresses of a host that may be connected to.

        Errors: SourceError when none may; OSError when there are none.
        """
        found = resolve(host, port, type=socket.SOCK_STREAM)
        return [str(address) for address in self.allowed(host, [ipaddress.ip_address(_plain(item[4][0])) for item in found])]

    def check_literal(self, host: str) -> None:
        """For connections that a proxy makes, whose addresses only the proxy knows.

        Errors: SourceError when *host* is itself an address that may not be reached.
        """
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            if self._furthest is None and host.lower() == self.host:
                self._furthest = Distance.PUBLIC
            return
        self.allowed(host, [address])

    def allowed(self, host: str, addresses: Iterable[IP]) -> list[IP]:
        """Those of a host's addresses that may be connected to.

        Errors: SourceError when there are none.
        """
        found = list(dict.fromkeys(addresses))
        distances = {address: distance_of(address) for address in found}
        if host.lower() == self.host and self._furthest is None:
            self._furthest = min(distances.values(), default=Distance.PUBLIC)
        furthest = Distance.PUBLIC if self._furthest is None else min(self._furthest, Distance.LOOPBACK)
        allowed = [address for address in found if distances[address] <= furthest]
        if not allowed:
            where = ", ".join(str(address) for address in found)
            raise SourceError(f"{host} ({where}) is not connected to: {self.host} must not lead to machines nearer than itself")
        return allowed


def _plain(text: object) -> str:
    return str(text).partition("%")[0]  # a zone says which link a link-local address is on
