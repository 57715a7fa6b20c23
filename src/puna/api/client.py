"""The HTTP client of the native API that the command line uses: one method per endpoint, replies as plain dictionaries.

It checks no field and builds no types, so that ``puna run`` sends its first request a few milliseconds after it starts;
what the fields mean is the caller's business. Knows nothing of terminals and of how a server comes to run.

Source: Ollama's REST API.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from puna import __version__
from puna.errors import BadRequest, NotFound, Overloaded, PunaError, ServerUnreachable
from puna.settings import Address

if TYPE_CHECKING:
    from types import ModuleType, TracebackType

    import httpx

Reply = dict[str, Any]

_STATUS_ERRORS: dict[int, type[PunaError]] = {400: BadRequest, 404: NotFound, 503: Overloaded}
_CONNECT_TIMEOUT_S = 10.0
_UPLOAD_CHUNK_BYTES = 1 << 20
_SHOWN_BODY_CHARS = 500


def _import_httpx() -> ModuleType:
    """Import httpx without its own command line, which would pull in rich and pygments and double the time."""
    name = "httpx._main"
    known = name in sys.modules
    if not known:
        sys.modules[name] = None  # type: ignore[assignment]  # makes the import fail, which httpx provides for
    try:
        import httpx
    finally:
        if not known:
            sys.modules.pop(name, None)
    return httpx


class Client:
    """A connection to one server; use it as a context manager.

    Errors of every method: BadRequest, NotFound, Overloaded or PunaError with the server's own text, also when the
    server reports them in the middle of a stream; ServerUnreachable when there is no server or it went away.
    A stream that is closed early cancels what the server is doing for it.
    """

    def __init__(self, address: Address, api_key: str = "") -> None:
        self._httpx = _import_httpx()
        self.url = address.client_url
        self.is_here = address.is_here
        self._http: httpx.Client = self._httpx.Client(
            base_url=self.url,
            headers={"User-Agent": f"puna/{__version__}"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
            timeout=self._httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),  # answers take as long as they take
            trust_env=not address.is_here,  # a proxy cannot reach this machine's loopback
            verify=address.scheme == "https",  # reading the certificates takes time that plain HTTP need not spend
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def version(self) -> str:
        return str(self._call("GET", "/api/version").get("version", ""))

    def tags(self) -> Reply:
        return self._call("GET", "/api/tags")

    def ps(self) -> Reply:
        return self._call("GET", "/api/ps")

    def metrics(self) -> str:
        """What Prometheus reads.

        Errors: NotFound, of a server that is not Puna.
        """
        with self._translated_errors():
            return self._check(self._http.get("/metrics")).text

    def show(self, model: str, *, verbose: bool = False) -> Reply:
        return self._call("POST", "/api/show", {"model": model, "verbose": verbose})

    def embed(self, request: Mapping[str, Any]) -> Reply:
        return self._call("POST", "/api/embed", request)

    def copy(self, source: str, destination: str) -> None:
        self._call("POST", "/api/copy", {"source": source, "destination": destination})

    def delete(self, model: str) -> None:
        self._call("DELETE", "/api/delete", {"model": model})

    def generate(self, request: Mapping[str, Any]) -> Iterator[Reply]:
        return self._stream("/api/generate", request)

    def chat(self, request: Mapping[str, Any]) -> Iterator[Reply]:
        return self._stream("/api/chat", request)

    def pull(self, model: str, *, insecure: bool = False, name: str = "") -> Iterator[Reply]:
        """Fetch a model, and have it called *name* if that is given."""
        return self._stream("/api/pull", {"model": model, "insecure": insecure, **({"as": name} if name else {})})

    def push(self, model: str, *, insecure: bool = False) -> Iterator[Reply]:
        """Send a model to the registry of its name."""
        return self._stream("/api/push", {"model": model, "insecure": insecure})

    def me(self) -> Reply:
        """The account, or where to sign in to one."""
        with self._translated_errors():
            reply = self._http.post("/api/me")
        return self._parse((reply if reply.status_code == 401 else self._check(reply)).text)

    def sign_out(self) -> bool:
        """Returns whether there was an account to sign out of."""
        with self._translated_errors():
            reply = self._http.post("/api/signout")
        return reply.status_code != 401 and bool(self._check(reply))

    def create(self, request: Mapping[str, Any]) -> Iterator[Reply]:
        return self._stream("/api/create", request)

    def has_blob(self, digest: str) -> bool:
        try:
            self._call("HEAD", f"/api/blobs/{digest}")
        except NotFound:
            return False
        return True

    def take_file(self, path: Path) -> Iterator[Reply]:
        """Have a server on this machine make a blob of a file where it lies; the last event has its digest.

        Errors: also when it cannot, and the file is to be uploaded.
        """
        return self._stream("/api/blobs", {"file": str(path)})

    def upload_blob(self, digest: str, path: Path, sent: Callable[[int], None]) -> None:
        """Send a file's bytes; *sent* is told how many have gone out so far."""
        with path.open("rb") as file:

            def chunks() -> Iterator[bytes]:
                n_sent = 0
                while chunk := file.read(_UPLOAD_CHUNK_BYTES):
                    yield chunk
                    n_sent += len(chunk)
                    sent(n_sent)

            with self._translated_errors():
                length = {"Content-Length": str(path.stat().st_size)}  # so that a server without room need not wait for the end
                self._check(self._http.post(f"/api/blobs/{digest}", content=chunks(), headers=length))

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Reply:
        with self._translated_errors():
            reply = self._check(self._http.request(method, path, json=body))
        return self._parse(reply.text) if reply.content else {}

    def _stream(self, path: str, body: Mapping[str, Any]) -> Iterator[Reply]:
        with self._translated_errors(), self._http.stream("POST", path, json=body) as reply:
            if reply.status_code >= 400:
                reply.read()
            self._check(reply)
            for line in _lines(reply.iter_text()):
                if line.strip():
                    yield self._checked_line(line)

    def _checked_line(self, line: str) -> Reply:
        event = self._parse(line)
        if "error" in event:
            raise PunaError(str(event["error"]))
        return event

    def _check(self, reply: httpx.Response) -> httpx.Response:
        if reply.status_code >= 400:
            raise _STATUS_ERRORS.get(reply.status_code, PunaError)(_error_text(reply))
        return reply

    def _parse(self, text: str) -> Reply:
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise PunaError(f"{self.url} answered with something other than a JSON object: {text[:_SHOWN_BODY_CHARS]!r}")
        return value

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except (self._httpx.ConnectError, self._httpx.ConnectTimeout) as error:
            raise ServerUnreachable(f'could not connect to a Puna server at {self.url}, start one with "puna serve"') from error
        except self._httpx.TransportError as error:
            raise ServerUnreachable(f"lost the connection to the server at {self.url}: {error}") from error
        except (self._httpx.InvalidURL, self._httpx.DecodingError) as error:
            raise PunaError(f"{self.url}: {error}") from error


def _error_text(reply: httpx.Response) -> str:
    try:
        error = json.loads(reply.text)["error"]
    except (ValueError, KeyError, TypeError):
        error = reply.text.strip()[:_SHOWN_BODY_CHARS]
    return str(error) if error else f"the server answered {reply.status_code} {reply.reason_phrase}"


def _lines(chunks: Iterator[str]) -> Iterator[str]:
    """Unlike httpx, which ends lines wherever Unicode does: in JSON such characters may stand in strings."""
    rest = ""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split("\n")
        yield from whole
    yield rest
