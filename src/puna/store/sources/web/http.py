"""HTTP as models are fetched and sent: no redirect is followed unseen, no body read further than asked, no credential added.

Bodies come as they are, never decompressed. Proxies of the environment are used. Failures that may pass raise Passing,
which says when to try again; others raise SourceError.
"""

from __future__ import annotations

import platform
import socket
import ssl
import threading
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

import httpcore

from puna import __version__
from puna.errors import SourceError
from puna.store.sources.web.reach import Reach

CONNECT_S = 30.0
SILENCE_S = 30.0  # without a byte, whichever side should send
MAX_REDIRECTS = 10
READ_BYTES = 256 << 10
BLOCK_BYTES = 512 << 10  # of a large body
MAX_HEADER_CHARS = 16 << 10
REDIRECTS = frozenset((301, 302, 303, 307, 308))
PASSING = frozenset((408, 425, 429, 500, 502, 503, 504))
_SHOWN_CHARS = 300
_IN_URLS = "%!#$&'()*+,/:;=?@[]~-._"  # what stays as it is

_HEAD_END = b"\r\n\r\n"

Content = bytes | Iterator[bytes]
Buffer = bytes | memoryview


class Passing(Exception):
    """A failure that may pass; *after_s* is when the other side wants to be asked again, if it said so."""

    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.after_s = after_s


class Unreachable(Passing):
    """Nobody answers at that address."""


def origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port: credentials for one origin are for no other."""
    parts = urlsplit(url)
    return parts.scheme, (parts.hostname or "").lower(), parts.port or (443 if parts.scheme == "https" else 80)


class Answer:
    """What came back: the status, the headers, and a body that is read as far as somebody wants it."""

    def __init__(self, url: str, response: httpcore.Response) -> None:
        self.url = url
        self.status = response.status
        self.headers = {
            key.decode("latin-1").lower(): value.decode("latin-1")[:MAX_HEADER_CHARS] for key, value in response.headers
        }
        self._response = response

    def chunks(self) -> Iterator[bytes]:
        """The body. Errors: Passing when it breaks off."""
        with _passing(self.url):
            yield from self._response.iter_stream()

    def blocks(self) -> Iterator[Buffer]:
        """The body; each block is good until the next one is asked for. Errors: Passing when it breaks off."""
        length = self.headers.get("content-length", "")
        stream = self._response.extensions.get("network_stream")
        is_plain = length.isascii() and length.isdigit() and "transfer-encoding" not in self.headers
        taken = stream.take_over() if is_plain and isinstance(stream, _Wide) else None
        if taken is None:
            yield from self.chunks()
            return
        with _passing(self.url):
            yield from _received(*taken, int(length))

    def read(self, max_bytes: int) -> bytes:
        """The whole body.

        Errors: Passing; SourceError when it is longer.
        """
        content = bytearray()
        for chunk in self.chunks():
            content += chunk
            if len(content) > max_bytes:
                raise SourceError(f"{_host(self.url)} sent more than {max_bytes} bytes where a short answer was expected")
        return bytes(content)

    def says(self) -> str:
        """The status and the beginning of the body, for error messages."""
        try:
            start = next(self.chunks(), b"").decode("utf-8", "replace")
        except Passing:
            start = ""
        text = "".join(character if character.isprintable() else " " for character in start[:_SHOWN_CHARS]).strip()
        return f"{self.status}: {text}" if text else str(self.status)

    def location(self) -> str:
        """Where a redirect leads.

        Errors: SourceError when it says nowhere, or from a protected connection to one that is not.
        """
        target = self.headers.get("location", "")
        if not target:
            raise SourceError(f"{_host(self.url)} sent a redirect to nowhere")
        url = quote(urljoin(self.url, target), safe=_IN_URLS)
        scheme = urlsplit(url).scheme
        if scheme not in ("http", "https") or (scheme == "http" and urlsplit(self.url).scheme == "https"):
            raise SourceError(f"{_host(self.url)} redirects to {_host(url)} without protection ({scheme}); refused")
        return url

    def failure(self) -> Exception:
        """What to raise for a status that is not the one hoped for."""
        text = f"{_host(self.url)} answered {self.says()}"
        return Passing(text, _after(self.headers.get("retry-after", ""))) if self.status in PASSING else SourceError(text)

    def abort(self) -> None:
        """End the connection; whoever waits for its bytes in another thread is woken with an error."""
        stream: Any = self._response.extensions.get("network_stream")
        sock = stream.get_extra_info("socket") if stream is not None else None
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class Http:
    """Requests for the sake of one host; may be used from several threads, and is a context manager."""

    def __init__(self, host: str, n_connections: int = 4) -> None:
        self._reach = Reach(host)
        self._n_connections = n_connections
        self._lock = threading.Lock()
        self._pools: dict[tuple[str, str], httpcore.ConnectionPool] = {}
        self._tls: ssl.SSLContext | None = None

    def __enter__(self) -> Http:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for pool in self._pools.values():
            with suppress(RuntimeError):  # a thread that was given up still reads
                pool.close()

    @contextmanager
    def ask(
        self, method: str, url: str, headers: Mapping[str, str] | None = None, content: Content | None = None
    ) -> Iterator[Answer]:
        """One request, and its answer with the body still to be read.

        Errors: Unreachable; Passing; SourceError.
        """
        sent = {"Host": urlsplit(url).netloc.rpartition("@")[2], "User-Agent": user_agent(), "Accept-Encoding": "identity"}
        sent |= headers or {}
        if isinstance(content, bytes):
            sent["Content-Length"] = str(len(content))
        timeout = {"connect": CONNECT_S, "read": SILENCE_S, "write": SILENCE_S, "pool": None}
        with _passing(url):
            stream = self._pool(url).stream(
                method, url, headers=list(sent.items()), content=content, extensions={"timeout": timeout}
            )
            response = stream.__enter__()
        try:
            yield Answer(url, response)
        finally:
            with suppress(Exception):  # what was wanted of it has been read
                stream.__exit__(None, None, None)

    def _pool(self, url: str) -> httpcore.ConnectionPool:
        scheme, host, _ = origin(url)
        if scheme not in ("http", "https") or not host:
            raise SourceError(f"{url[:200]} is no address that models can come from")
        proxy = _proxy(scheme, host)
        if proxy:
            self._reach.check_literal(host)
        with self._lock:
            key = scheme, proxy
            if key not in self._pools:
                self._pools[key] = self._new_pool(proxy, is_protected=scheme == "https" or proxy.startswith("https:"))
            return self._pools[key]

    def _new_pool(self, proxy: str, *, is_protected: bool) -> httpcore.ConnectionPool:
        if self._tls is None and is_protected:  # reading the certificates takes a while
            import httpx  # for the certificates it would trust, and the variables that name others

            self._tls = httpx.create_ssl_context()
        n = self._n_connections
        if not proxy:
            near = _Near(self._reach)
            return httpcore.ConnectionPool(self._tls, max_connections=4 * n, max_keepalive_connections=n, network_backend=near)
        parts = urlsplit(proxy)
        auth = (parts.username or "", parts.password or "") if parts.username else None
        plain = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        limits = (4 * n, n)
        return httpcore.HTTPProxy(plain, auth, None, self._tls, None, *limits)


class _Near(httpcore.NetworkBackend):
    """Connects to what may be reached, and to the very address that was judged."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._backend = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        try:
            addresses = self._reach.addresses(host, port)
        except OSError as error:
            raise httpcore.ConnectError(f"{host}: {error.strerror or error}") from error
        for address in addresses[:-1]:
            with suppress(httpcore.ConnectError, httpcore.ConnectTimeout):
                return _Wide(self._backend.connect_tcp(address, port, timeout, local_address, socket_options))
        return _Wide(self._backend.connect_tcp(addresses[-1], port, timeout, local_address, socket_options))


class _Wide(httpcore.NetworkStream):
    """Reads more at once than it is asked to, and tells where the head of an answer ends.

    A large body need not go through the parser of HTTP, which copies it twice: it can be taken from the socket itself.
    """

    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream = stream
        self._begin()

    def _begin(self) -> None:
        """What is read next is the head of an answer."""
        self._is_head = True
        self._end = b""  # of the head so far
        self._rest = b""  # read, but not asked for yet
        self._is_body_whole = False  # nobody has read any of it

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if self._rest:
            data, self._rest = self._rest, b""
        else:
            data = self._stream.read(max(max_bytes, READ_BYTES), timeout)
        if not self._is_head:
            self._is_body_whole = False
            return data
        seen = self._end + data
        at = seen.find(_HEAD_END)
        if at < 0:
            self._end = seen[-len(_HEAD_END) + 1 :]
            return data
        self._is_head, self._is_body_whole = False, True
        n_head = at + len(_HEAD_END) - len(self._end)
        self._rest = data[n_head:]
        return data[:n_head]

    def take_over(self) -> tuple[bytes, socket.socket] | None:
        """What has come of the body, and the socket with the rest of it; None when the parser has seen some, or must see it.

        The parser is not told, so that the connection ends with this answer.
        """
        protected = self._stream.get_extra_info("ssl_object")
        found = protected if protected is not None else self._stream.get_extra_info("socket")
        if not self._is_body_whole or not isinstance(found, socket.socket):  # TLS within TLS has no socket of its own
            return None
        rest, self._rest, self._is_body_whole = self._rest, b"", False
        return rest, found

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._begin()
        self._stream.write(buffer, timeout)

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _Wide(self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _received(rest: bytes, source: socket.socket, n_bytes: int) -> Iterator[Buffer]:
    """A body of so many bytes, of which *rest* has come."""
    n_left = n_bytes - len(rest[:n_bytes])
    if rest:
        yield rest[:n_bytes]
    source.settimeout(SILENCE_S)
    block = memoryview(bytearray(BLOCK_BYTES))
    while n_left:
        n = source.recv_into(block[: min(n_left, BLOCK_BYTES)])
        if not n:
            raise httpcore.RemoteProtocolError(f"{n_left} of {n_bytes} bytes did not come")
        n_left -= n
        yield block[:n]


@contextmanager
def _passing(url: str) -> Iterator[None]:
    try:
        yield
    except (httpcore.ConnectError, httpcore.ConnectTimeout, httpcore.ProxyError) as error:
        raise Unreachable(f"{_host(url)} cannot be reached: {error}") from error
    except (httpcore.TimeoutException, TimeoutError) as error:
        raise Passing(f"{_host(url)} said nothing for {SILENCE_S:.0f} s") from error
    except (httpcore.NetworkError, httpcore.ProtocolError, ssl.SSLError, OSError) as error:
        raise Passing(f"the connection to {_host(url)} broke: {error}") from error
    except httpcore.UnsupportedProtocol as error:
        raise SourceError(f"{_host(url)}: {error}") from error


def user_agent() -> str:
    return f"puna/{__version__} ({platform.machine().lower()} {platform.system().lower()}) Python/{platform.python_version()}"


def _proxy(scheme: str, host: str) -> str:
    if urllib.request.proxy_bypass(host):
        return ""
    found = urllib.request.getproxies()
    proxy = found.get(scheme) or found.get("all") or ""
    return proxy if "://" in proxy or not proxy else f"http://{proxy}"


def _host(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[2][:100]


def _after(text: str) -> float:
    """Seconds; a date is not worth the trouble, the usual wait will do."""
    return float(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0.0
