"""A process that computes for one client of a worker, and the connection to it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from puna import environment
from puna.errors import LoadError, NativeLibraryError
from puna.rpc import protocol
from puna.rpc.protocol import ProtocolError

COMMAND = (sys.executable, "-P", "-m", "puna.native.rpc")
START_S = 60.0  # a machine whose cores are taken needs its time
_GREETING_S = 10.0
_POLL_S = 0.02
_ATTEMPTS = 3  # another program may take the port that was free a moment ago
_GRACE_S = 2.0


@dataclass(frozen=True)
class OfferedDevice:
    description: str
    is_cpu: bool


class Backend:
    """Errors: LoadError where it does not start; NativeLibraryError where the library cannot compute for others."""

    def __init__(self, n_threads: int, command: Sequence[str] = COMMAND) -> None:
        self.devices: list[OfferedDevice] = []
        for attempt in range(_ATTEMPTS):
            port = _free_port()
            self._process = subprocess.Popen(
                [*command, str(port), str(n_threads)],
                stdin=subprocess.PIPE,  # it ends when the other end is closed
                stdout=subprocess.PIPE,
                env={**environment.for_computing(), "GGML_NO_BACKTRACE": "1"},
                start_new_session=os.name == "posix",  # an interrupt at the terminal is the worker's to deal with
            )
            try:
                self.devices = self._announced()
                self.socket = self._connected(port)
                return
            except (OSError, ProtocolError) as error:
                self._end()
                if attempt == _ATTEMPTS - 1:
                    raise LoadError(f"a process that computes could not be started: {error}") from error
            except BaseException:
                self._end()
                raise

    def _announced(self) -> list[OfferedDevice]:
        assert self._process.stdout is not None
        killer = threading.Timer(START_S, self._process.kill)
        killer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            killer.cancel()
        try:
            said = json.loads(line)
        except ValueError:
            raise ConnectionError(f"it ended with status {self._process.wait()}") from None
        if "error" in said:
            raise NativeLibraryError(said["error"])
        return [OfferedDevice(**device) for device in said["devices"]]

    def _connected(self, port: int) -> socket.socket:
        deadline = time.monotonic() + START_S
        while True:
            try:
                sock = socket.create_connection(("127.0.0.1", port), timeout=_GREETING_S)
                break
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_S)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.version = protocol.greet(sock)
            if not protocol.is_spoken(self.version):
                raise NativeLibraryError(
                    f"the tensor library speaks version {'.'.join(map(str, self.version))} of the RPC protocol, "
                    f"which Puna does not know: it knows {'.'.join(map(str, protocol.VERSION))}"
                )
            sock.settimeout(None)
        except BaseException:
            sock.close()
            raise
        return sock

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """All that it has computed and holds is gone."""
        self.socket.close()
        self._end()

    def _end(self) -> None:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        process.stdout.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
