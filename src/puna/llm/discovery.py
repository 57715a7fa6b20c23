"""What models can be loaded on: the devices of this machine, found by a process that may crash or hang without harm.

``Machine`` remembers them. Where there are GPUs their free memory is asked for again before each load, and so is that of
workers on other machines, which come and go; the memory of the host is read here. A driver that ends every process that opens
the tensor library would end runners, too: where the search fails, and succeeds with drivers told to show nothing, runners are
started that way.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from puna import environment, host, wire
from puna.errors import BadRequest
from puna.llm.process import end, start

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "puna", "discover")
TIMEOUT_S = 30.0  # drivers that start a GPU from sleep take seconds
REFRESH_TIMEOUT_S = 10.0
RETRY_S = 300.0  # a machine that could not be looked at is not looked at again for so long
# The environment in which CUDA and HIP show no GPU, and ggml does not open Vulkan.
WITHOUT_DRIVERS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), "-1"),
        "GGML_DISABLE_VULKAN": "1",
    }
)
_SHOWN_STDERR_CHARS = 500
_GENERAL_LIBRARIES = ("Vulkan",)  # drive hardware that others drive better
_GIB = 1 << 30

Ask = Callable[[], Awaitable[wire.Discovery | None]]
"""None: it cannot be told."""


def parse(status: int, stdout: bytes, stderr: bytes) -> wire.Discovery:
    """What the process found, or as ``error`` why there is nothing."""
    lines = stdout.split(b"\n")
    line = next((line for line in reversed(lines) if line.strip()), b"")
    try:
        found = wire.decode(wire.Discovery, line if status == 0 else b"?")
    except BadRequest:
        said = stderr.decode("utf-8", "replace").strip()[-_SHOWN_STDERR_CHARS:]
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return wire.Discovery(devices=[], error=f"the search for devices ended with {how}{': ' if said else ''}{said}")
    return cleaned(found)


def cleaned(found: wire.Discovery) -> wire.Discovery:
    return msgspec.structs.replace(found, devices=without_doubles(found.devices))


def without_doubles(devices: Sequence[wire.Device]) -> list[wire.Device]:
    """Hardware that several libraries drive is listed once, under the library made for it."""
    special = {d.id for d in devices if d.id and d.library not in _GENERAL_LIBRARIES}
    kept: list[wire.Device] = []
    for device in devices:
        is_general = device.library in _GENERAL_LIBRARIES
        if not (device.id and (device.id in {k.id for k in kept} or (is_general and device.id in special))):
            kept.append(device)
    return kept


def look_once(command: Sequence[str] = COMMAND, timeout_s: float = TIMEOUT_S) -> wire.Discovery:
    """For a caller without an event loop."""
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return _hung(timeout_s)
    except OSError as error:
        return _not_started(error)
    return parse(done.returncode, done.stdout, done.stderr)


async def look(
    command: Sequence[str] = COMMAND, timeout_s: float = TIMEOUT_S, environ: Mapping[str, str] = MappingProxyType({})
) -> wire.Discovery:
    """With *environ* over what computing needs of ours. Never raises but for a cancellation, and leaves no process behind."""
    pipe = asyncio.subprocess.PIPE
    try:
        process = await start(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
            env={**environment.for_computing(), **environ, "GGML_NO_BACKTRACE": "1"},
        )
    except OSError as error:
        return _not_started(error)
    try:
        async with asyncio.timeout(timeout_s):
            stdout, stderr = await process.communicate()
    except TimeoutError:
        return _hung(timeout_s)
    finally:
        await end(process)
    return parse(process.returncode or 0, stdout, stderr)


def _hung(timeout_s: float) -> wire.Discovery:
    return wire.Discovery(devices=[], error=f"the search for devices gave no answer within {timeout_s:g} s")


def _not_started(error: OSError) -> wire.Discovery:
    return wire.Discovery(devices=[], error=f"the search for devices could not be started: {error}")


class Machine:
    """The devices of this machine; one search at a time.

    *environ* is for runners, over the server's own: what keeps them from drivers that end processes, if any do. *ask* is a
    process that runs anyway and may be lost: only where it cannot tell is another started for the first look.
    """

    environ: Mapping[str, str] = MappingProxyType({})

    def __init__(self, command: Sequence[str] = COMMAND, ask: Ask | None = None) -> None:
        self._command = command
        self._ask = ask
        self._lock = asyncio.Lock()
        self._found: wire.Discovery | None = None
        self._looked_at = 0.0

    @property
    def gpus(self) -> list[wire.Device] | None:
        """As last seen, those of workers on other machines included; None before the first look."""
        return None if self._found is None else [d for d in self._found.devices if d.kind in ("gpu", "igpu", "rpc")]

    @property
    def lost(self) -> list[str]:
        """Why workers on other machines are not used, as last seen."""
        return self._found.lost if self._found else []

    async def look(self) -> wire.Discovery:
        """The devices, searched for once."""
        async with self._lock:
            now = asyncio.get_running_loop().time()
            if self._found is None or (self._found.error and now - self._looked_at >= RETRY_S):
                self._found = await self._search()
                self._looked_at = asyncio.get_running_loop().time()
                log.info("%s", described(self._found, self.memory()))
                _warn(self._found.lost)
                if self._found.error:
                    what = "GPUs of CUDA, ROCm and Vulkan are not used" if self.environ else "no GPU will be used"
                    log.warning("%s: %s", what, self._found.error)
            return self._found

    async def _search(self) -> wire.Discovery:
        self.environ = MappingProxyType({})
        told, self._ask = await self._ask() if self._ask else None, None
        if told is not None and not told.error:
            return cleaned(told)
        found = await look(self._command)
        if not found.error:
            return found
        rest = await look(self._command, environ=WITHOUT_DRIVERS)
        if rest.error:
            return found
        self.environ = WITHOUT_DRIVERS
        own_filters = {name: os.environ[name] for name in rest.filters if name in os.environ}
        return msgspec.structs.replace(rest, error=found.error, filters=own_filters)

    async def refresh(self) -> bool:
        """Ask GPUs anew for their free memory, and look who of the workers is there; False when they did not tell."""
        known = await self.look()
        if not self.gpus and not known.workers:
            return True
        async with self._lock:
            found = await look(self._command, REFRESH_TIMEOUT_S, self.environ)
            if found.error:
                log.warning("the free memory of GPUs is not known: %s", found.error)
                return False
            _warn([why for why in found.lost if why not in known.lost])
            self._found = msgspec.structs.replace(found, error=known.error, filters=known.filters)
            return True

    def forget(self) -> None:
        """What was found may no longer be true: the next look is a new search."""
        self._found = None

    def memory(self) -> host.Memory:
        return host.memory()


def _warn(lost: Sequence[str]) -> None:
    for why in lost:
        log.warning("%s", why)


def described(found: wire.Discovery, memory: host.Memory) -> str:
    """One line for the log."""
    parts = [f"{found.physical_cores} cores, {found.threads} threads, {_gib(memory.free)} of {_gib(memory.total)} GiB free"]
    for device in found.devices:
        if device.kind != "cpu":
            kind = " (integrated)" if device.kind == "igpu" else ""
            memory_text = f", {_gib(device.free)} of {_gib(device.total)} GiB free" if device.total else ""
            code = f", compute {device.capability}" if device.capability else ""
            driver = f", driver {device.driver}" if device.driver else ""
            parts.append(f"{device.name}{kind}: {device.description} by {device.library}{code}{driver}{memory_text}")
    if found.filters:
        parts.append(f"chosen by {json.dumps(found.filters)}")
    return "; ".join(parts)


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / _GIB:.1f}"
