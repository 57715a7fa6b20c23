"""A server of one's own for as long as a command runs, when none listens at OLLAMA_HOST.

The command binds the socket and the server inherits it: the first request waits in the socket's queue while the server
starts, so nothing polls and no port can be lost to someone else. The server's standard input is a pipe that only this
process holds open; when it ends in whatever way, the server reads end-of-file and stops (see puna.server.process.private).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import IO

from puna.settings import Address

_BACKLOG = 64
_STOP_TIMEOUT_S = 12.0
_DEATH_TIMEOUT_S = 10.0  # between the end of its sockets and that of the process, on a machine that is busy with other things
_TAIL_BYTES = 4000
_TAIL_LINES = 12

# -P and PYTHONSAFEPATH, which runners inherit: a folder named puna in the current directory is not this package
SERVE_COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "puna", "private-server")


class PrivateServer:
    """The child process, its address and its log."""

    def __init__(self, *, show_log: bool = False, expects_model: bool = False) -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG) as listener:
            self.address = Address(host="127.0.0.1", port=listener.getsockname()[1])
            self._log: IO[bytes] | None = None if show_log else tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
            self._process = subprocess.Popen(
                [*SERVE_COMMAND, str(listener.fileno()), *(["--expect-model"] if expects_model else [])],
                stdin=subprocess.PIPE,
                stdout=self._log if self._log else 2,
                stderr=self._log,
                pass_fds=[listener.fileno()],
                env={**os.environ, "OLLAMA_HOST": f"127.0.0.1:{self.address.port}", "PYTHONSAFEPATH": "1"},
                start_new_session=True,  # Ctrl-C in the terminal is for the command alone
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def death_note(self) -> str | None:
        """Why the server ended, with the last lines of its log; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_DEATH_TIMEOUT_S)
        if self._process.poll() is None:
            return None
        note = f"the private server ended with status {self._process.returncode}"
        tail = self._log_tail()
        return f"{note}:\n{tail}" if tail else note

    def _log_tail(self) -> str:
        if self._log is None:
            return ""
        end = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, end - _TAIL_BYTES))
        lines = self._log.read().decode("utf-8", "replace").splitlines()
        return "\n".join(line for line in lines[-_TAIL_LINES:] if line.strip())

    def stop(self) -> None:
        """Let the server end what it does in good order, and wait for that; kill it when it takes too long."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            self._process.wait(timeout=_STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """End the server now, and what it has started with it: runners watch it as it watches us."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._log is not None:
            self._log.close()
