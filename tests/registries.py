"""A model registry on loopback, and an object store beside it that has the blobs: they behave as the real ones do, or worse.

The registry asks for tokens, checks who signed for them, and redirects to the object store with links that end. Faults are
given by name; each spoils as many answers as it says, then all is well again. The object store notes every credential that
reaches it, which should be none.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import socketserver
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from puna.store.disk.manifests import MANIFEST_TYPE
from puna.store.folder import ModelFolder
from puna.store.names import Name

CHUNK_BYTES = 16 << 10
MANIFEST_FAULTS = tuple(f"manifest {what}" for what in ("429", "500", "dropped", "garbage", "too large", "moved"))
BLOB_FAULTS = ("blob 404", "blob 500", "redirect loop", "redirect to nowhere", "redirect inwards", "blob direct")
DATA_FAULTS = (
    *("429", "500", "503", "short", "dropped", "stalled", "trickle", "silent", "no ranges", "another part", "longer"),
    *("another size", "damaged", "not HTTP", "compressed"),
)


class Handler(BaseHTTPRequestHandler):
    """One request; whoever runs the server answers it."""

    protocol_version = "HTTP/1.1"
    server: Host

    def setup(self) -> None:
        super().setup()
        with self.server.lock:
            self.server.sockets.add(self.connection)

    def finish(self) -> None:
        with self.server.lock:
            self.server.sockets.discard(self.connection)
        with suppress(OSError):
            super().finish()

    def handle_one_request(self) -> None:
        with suppress(OSError):
            super().handle_one_request()
            return
        self.close_connection = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):
            return self._do
        raise AttributeError(name)

    def _do(self) -> None:
        if self.command == "CONNECT":
            self._tunnel()
            return
        with self.server.lock:
            self.server.seen.append((self.command, self.path))
            if "Authorization" in self.headers:
                self.server.credentials.append(self.headers["Authorization"])
        self.server.answer(self)

    def _tunnel(self) -> None:
        """Be the proxy and what it leads to in one: from here on, the connection is the other host's, with its certificate."""
        assert self.server.tls is not None
        self.send_response(200)
        self.end_headers()
        self.wfile.flush()
        self.connection = self.server.tls.wrap_socket(self.connection, server_side=True)
        self.rfile = self.connection.makefile("rb", self.rbufsize)
        self.wfile = socketserver._SocketWriter(self.connection)  # type: ignore[attr-defined]
        self.close_connection = False
        try:
            while not self.close_connection:
                self.handle_one_request()
        finally:
            self.connection.close()

    def reply(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for key, value in {"content-length": str(len(content)), **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def drop(self) -> None:
        """End the connection with a reset."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Host(ThreadingHTTPServer):
    """A server on a free port of loopback, for the time of a block."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, answer: Callable[[Handler], None]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.lock = threading.Lock()
        self.seen: list[tuple[str, str]] = []
        self.credentials: list[str] = []
        self.sockets: set[socket.socket] = set()
        self.tls: ssl.SSLContext | None = None

    @property
    def netloc(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # connections that break are what this is for

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.shutdown()
            with self.lock:
                for sock in self.sockets:
                    with suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)
            self.server_close()
            thread.join()


@dataclass
class Fault:
    """Spoils the next *n_left* answers of one kind, after *n_good* good ones."""

    name: str
    n_left: int = 1
    n_good: int = 0


@dataclass
class Upload:
    content: bytearray = field(default_factory=bytearray)


class Registry:
    """A registry and its object store; use ``running``."""

    def __init__(self, *, needs_token: bool = True, host_name: str = "", certificate: Path | None = None) -> None:
        self.host = Host(self._answer)
        self.base = f"https://{host_name}" if host_name else f"http://{self.host.netloc}"
        if certificate is not None:
            self.host.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.host.tls.load_cert_chain(certificate)
        self.storage = Host(self._serve_blob)
        self.needs_token = needs_token
        self.manifests: dict[tuple[str, str], bytes] = {}
        self.types: dict[tuple[str, str], str] = {}
        self.blobs: dict[str, bytes] = {}
        self.uploads: dict[str, Upload] = {}
        self.searches: list[dict[str, str]] = []
        self.lists = True  # what it has, to whoever asks
        self.redirects_uploads = False
        self.knows_signatures = True
        self.faults: list[Fault] = []
        self.tokens: set[str] = set()
        self.links: set[str] = set()
        self.keys: set[str] = set()  # public keys that signed for a token
        self.n_bytes_sent = 0  # of blobs
        self.seconds_per_chunk = 0.0
        self.gate = threading.Event()  # blobs go out while it is set
        self.gate.set()
        self._lock = threading.RLock()
        self._n = Counter[str]()

    @property
    def netloc(self) -> str:
        return self.host.netloc

    @contextmanager
    def running(self) -> Iterator[Registry]:
        with self.host.running(), self.storage.running():
            try:
                yield self
            finally:
                self.gate.set()

    def add(self, store: ModelFolder, model: str, reference: str) -> bytes:
        """Have a stored model here under ``namespace/model:tag``; returns its manifest."""
        content = store.manifests.content(store.manifests.find(Name.parse(model)))
        for layer in store.manifests.read(store.manifests.find(Name.parse(model))).manifest.blobs:
            self.blobs[layer.digest] = store.blobs.path(layer.digest).read_bytes()
        repository, _, tag = reference.partition(":")
        self.manifests[repository, tag or "latest"] = content
        self.types[repository, tag or "latest"] = MANIFEST_TYPE
        return content

    def spoil(self, name: str, n: int = 1, *, after: int = 0) -> None:
        self.faults.append(Fault(name, n, after))

    def _hits(self, *names: str) -> str:
        """The name of a fault that is due."""
        with self._lock:
            for fault in self.faults:
                if fault.name in names and fault.n_left > 0:
                    if fault.n_good > 0:
                        fault.n_good -= 1
                        continue
                    fault.n_left -= 1
                    return fault.name
        return ""

    def _answer(self, request: Handler) -> None:
        path = urlsplit(request.path).path
        if path == "/token":
            self._token(request)
            return
        if path == "/api/models":
            self._hub_search(request)
            return
        if path == "/v2/_catalog":
            self._catalog(request)
            return
        match = re.fullmatch(r"/v2/([^/]+/[^/]+)/(manifests|blobs)/(.+)", path)
        if match is None:
            request.reply(404)
            return
        if not self._is_known(request):
            challenge = f'Bearer realm="{self.base}/token",service="registry",scope="repository:{match[1]}:pull,push"'
            if self._hits("realm elsewhere"):
                challenge = f'Bearer realm="http://{self.storage.netloc}/token",service="registry",scope="x"'
            if self._hits("no challenge"):
                challenge = "Basic"
            request.body()
            request.reply(401, b'{"errors":[{"code":"UNAUTHORIZED"}]}', www_authenticate=challenge)
            return
        if match[2] == "manifests":
            self._manifest(request, match[1], match[3])
        elif match[3].startswith("uploads/"):
            self._upload(request, match[1], match[3].removeprefix("uploads/"))
        else:
            self._blob(request, match[3])

    def _hub_search(self, request: Handler) -> None:
        """As the hub answers a search."""
        asked = {key: values[0] for key, values in parse_qs(urlsplit(request.path).query).items()}
        self.searches.append(asked)
        names = [repository for repository, _ in self.manifests if asked["search"].lower() in repository.lower()]
        found = [
            {
                "_id": "0",
                "id": name,
                "modelId": name,
                "likes": 3,
                "downloads": 1234567 - i,
                "lastModified": "2026-08-22T12:00:00.000Z",
            }
            for i, name in enumerate(names)
        ]
        request.reply(200, json.dumps(found[: int(asked["limit"])]).encode(), content_type="application/json")

    def _catalog(self, request: Handler) -> None:
        """The repositories, two at a time."""
        if not self.lists:
            request.reply(404)
            return
        if self.needs_token and not self._is_known(request):
            challenge = f'Bearer realm="{self.base}/token",service="registry",scope="registry:catalog:*"'
            request.reply(401, www_authenticate=challenge)
            return
        last = parse_qs(urlsplit(request.path).query).get("last", [""])[0]
        names = [name for name in sorted({repository for repository, _ in self.manifests}) if name > last]
        more = {"link": f'</v2/_catalog?n=2&last={names[1]}>; rel="next"'} if len(names) > 2 else {}
        request.reply(200, json.dumps({"repositories": names[:2]}).encode(), **more)

    def _is_known(self, request: Handler) -> bool:
        if not self.needs_token:
            return True
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self._hits("token expires"):
            self.tokens.clear()
        return token in self.tokens

    def _token(self, request: Handler) -> None:
        key, _, signature = request.headers.get("Authorization", "").partition(":")
        if not self.knows_signatures and not key:
            self.tokens.add("anybodys")
            request.reply(200, b'{"token": "anybodys"}')
            return
        if not key or not self.knows_signatures:
            request.reply(401)
            return
        public = load_ssh_public_key(f"ssh-ed25519 {key}".encode())
        assert isinstance(public, Ed25519PublicKey)
        empty = base64.b64encode(hashlib.sha256(b"").hexdigest().encode()).decode()
        public.verify(base64.b64decode(signature), f"GET,{self.base}{request.path},{empty}".encode())
        query = parse_qs(urlsplit(request.path).query)
        assert abs(time.time() - int(query["ts"][0])) < 600
        assert len(base64.urlsafe_b64decode(query["nonce"][0] + "==")) == 16
        assert query["service"] == ["registry"]
        if self._hits("token refused"):
            request.reply(403)
            return
        with self._lock:
            self._n["token"] += 1
            token = f"token-{self._n['token']}"
            self.tokens.add(token)
            self.keys.add(key)
        request.reply(200, json.dumps({"token": token}).encode(), content_type="application/json")

    def _manifest(self, request: Handler, repository: str, tag: str) -> None:
        if request.command == "PUT":
            self._take_manifest(request, repository, tag)
            return
        match self._hits(*MANIFEST_FAULTS):
            case "manifest 429":
                request.reply(429, b"slow down", retry_after="1")
            case "manifest 500":
                request.reply(500, b"oh no")
            case "manifest dropped":
                request.drop()
            case "manifest garbage":
                request.reply(200, b"<html>welcome to the hotel</html>")
            case "manifest too large":
                request.reply(200, b" " * (5 << 20))
            case "manifest moved":
                request.reply(302, location=f"/v2/{repository}/manifests/{tag}")
            case _:
                by_digest = {_digest(content): content for content in self.manifests.values()}
                content = self.manifests.get((repository, tag)) or by_digest.get(tag, b"")
                kind = self.types.get((repository, tag), MANIFEST_TYPE)
                request.reply(200 if content else 404, content, content_type=kind)

    def _take_manifest(self, request: Handler, repository: str, tag: str) -> None:
        content = request.body()
        named = json.loads(content)
        if any(layer["digest"] not in self.blobs for layer in (*named["layers"], named["config"])):
            request.reply(400, json.dumps({"errors": [{"code": "BLOB_UNKNOWN"}]}).encode())
            return
        self.manifests[repository, tag] = content
        self.types[repository, tag] = request.headers["Content-Type"]
        request.reply(201)

    def _blob(self, request: Handler, digest: str) -> None:
        content = self.blobs.get(digest)
        if request.command == "HEAD":
            request.reply(404 if content is None else 200, content or b"")
            return
        if content is None:
            request.reply(404)
            return
        match self._hits(*BLOB_FAULTS):
            case "blob 404":
                request.reply(404)
            case "blob 500":
                request.reply(500)
            case "redirect loop":
                request.reply(307, location=request.path)
            case "redirect to nowhere":
                request.reply(307)
            case "redirect inwards":
                request.reply(307, location="http://169.254.169.254/latest/meta-data/")
            case "blob direct":
                self._send(request, content)
            case _ if self.host.tls is not None:  # which a redirect to the object store would leave
                self._send(request, content)
            case _:
                with self._lock:
                    self._n["link"] += 1
                    link = f"link-{self._n['link']}"
                    self.links.add(link)
                request.reply(307, location=f"http://{self.storage.netloc}/{digest}?{link}")

    def _serve_blob(self, request: Handler) -> None:
        """The object store's side."""
        parts = urlsplit(request.path)
        if parts.path == "/token":
            request.reply(200, b'{"access_token": "anonymous"}')
            return
        if request.command == "PUT":
            self.uploads[parts.query].content += request.body()
            request.reply(200)
            return
        content = self.blobs[parts.path.strip("/")]
        if self._hits("link expired"):
            self.links.discard(parts.query)
        if parts.query not in self.links:
            request.reply(403, b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>")
            return
        self._send(request, content)

    def _send(self, request: Handler, content: bytes) -> None:
        match fault := self._hits(*DATA_FAULTS):
            case "429" | "503":
                request.reply(int(fault), b"later", retry_after="1")
            case "500":
                request.reply(500)
            case "silent":
                self._wait(request)
            case "not HTTP":
                request.wfile.write(b"220 ready for mail\r\n")
                request.close_connection = True
            case _:
                self._send_range(request, content, fault)

    def _send_range(self, request: Handler, content: bytes, fault: str) -> None:
        wanted = "" if fault == "no ranges" else request.headers.get("Range", "")
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted)
        begin, end = (int(found[1]), min(int(found[2]) + 1, len(content))) if found else (0, len(content))
        begin += 1 if fault == "another part" else 0
        total = len(content) + (1 if fault == "another size" else 0)
        part = content[begin:end]
        if fault == "damaged":
            part = part[:-1] + bytes([part[-1] ^ 1])
        if fault == "longer":
            part += b"more than was asked for"
        request.send_response(206 if found else 200)
        request.send_header("content-length", str(len(part) if found else total))
        if found:
            request.send_header("content-range", f"bytes {begin}-{end - 1}/{total}")
        if fault == "compressed":
            request.send_header("content-encoding", "gzip")
        request.end_headers()
        self._send_part(request, part, fault)

    def _send_part(self, request: Handler, part: bytes, fault: str) -> None:
        half, n_sent = len(part) // 2, 0
        for at in range(0, len(part), CHUNK_BYTES):
            self.gate.wait()  # it is open when the registry closes
            if fault in ("short", "dropped", "stalled", "trickle") and at >= half:
                break
            chunk = part[at : at + CHUNK_BYTES]
            self._count(len(chunk))  # first: who has received all of it may look at once
            try:
                request.wfile.write(chunk)
            except OSError:
                self._count(-len(chunk))
                raise
            n_sent += len(chunk)
            if self.seconds_per_chunk:
                time.sleep(self.seconds_per_chunk)
        match fault:
            case "short":
                request.close_connection = True
            case "dropped":
                request.drop()
            case "stalled":
                self._wait(request)
            case "trickle":
                for at in range(n_sent, len(part)):
                    request.wfile.write(part[at : at + 1])
                    time.sleep(0.02)

    def _count(self, n_bytes: int) -> None:
        with self._lock:
            self.n_bytes_sent += n_bytes

    def _wait(self, request: Handler) -> None:
        """Say nothing until the other side has had enough."""
        with suppress(OSError):
            request.connection.settimeout(60)
            request.connection.recv(1)
        request.close_connection = True

    def _upload(self, request: Handler, repository: str, key: str) -> None:
        query = parse_qs(urlsplit(request.path).query)
        if request.command == "POST":
            mounted = query.get("mount", [""])[0]
            request.body()
            if mounted in self.blobs:
                request.reply(201, location=f"/v2/{repository}/blobs/{mounted}")
                return
            with self._lock:
                self._n["upload"] += 1
                key = f"u{self._n['upload']}"
                self.uploads[key] = Upload()
            request.reply(202, location=f"/v2/{repository}/blobs/uploads/{key}?state=1")
            return
        upload = self.uploads.get(key)
        if upload is None:
            request.body()
            request.reply(404)
            return
        here = f"/v2/{repository}/blobs/uploads/{key}?state={len(upload.content)}"
        match request.command:
            case "GET":
                request.reply(204, location=here, range=f"0-{max(0, len(upload.content) - 1)}")
            case "PATCH" if self.redirects_uploads:
                assert request.headers["X-Redirect-Uploads"] == "1"
                request.body()
                request.reply(307, location=f"http://{self.storage.netloc}/put?{key}", docker_upload_location=here)
            case "PATCH":
                self._take_piece(request, upload, here)
            case "PUT":
                content, digest = bytes(upload.content), query["digest"][0]
                assert re.fullmatch(r"[0-9a-f]{32}-\d+", query["etag"][0])
                if self._hits("commit 500"):
                    request.reply(500)
                elif _digest(content) == digest:
                    self.blobs[digest] = content
                    request.reply(201)
                else:
                    request.reply(400, b'{"errors":[{"code":"DIGEST_INVALID"}]}')

    def _take_piece(self, request: Handler, upload: Upload, here: str) -> None:
        begin = int(request.headers["Content-Range"].partition("-")[0])
        length = int(request.headers["Content-Length"])
        match self._hits("upload dropped", "upload 500", "upload forgotten"):
            case "upload dropped":
                upload.content += request.rfile.read(length // 2)
                request.drop()
                return
            case "upload 500":
                request.rfile.read(length)
                request.reply(500)
                return
            case "upload forgotten":
                request.rfile.read(length)
                self.uploads.clear()
                request.drop()
                return
        content = request.rfile.read(length)
        if begin != len(upload.content):
            request.reply(416)
            return
        upload.content += content
        request.reply(202, location=here.rpartition("=")[0] + f"={len(upload.content)}", range=f"0-{len(upload.content) - 1}")


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
