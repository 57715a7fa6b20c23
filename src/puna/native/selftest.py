"""Which kinds of weights the tensor library multiplies correctly on this processor.

A library that was compiled by a faulty compiler, or for another processor, crashes or computes nonsense for some
combinations of buffer type and tensor type. They are found here before a model meets them: puna.native.products tries
all of them in a process of its own. Where that process dies, the rest is tried in narrower ones, down to one tensor type
each, until the culprit has a name. The verdict is kept in the cache directory until the library or the processor changes, or
nobody has asked for a month.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from puna.errors import NativeLibraryError
from puna.host import usable_cores
from puna.native import cache, cpu
from puna.native.kernels.build import LIBRARY
from puna.native.kernels.library import FORCED
from puna.native.providers import Provider, chosen

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "puna.native.products")
PLAIN = "CPU"
TIMEOUT_S = 60.0
_FORMAT = 3  # of the cached file, and of what is tested
_UNFINISHED = ".unfinished"  # how the name of a file ends while it is written
_MOST_KEPT, _MOST_DAYS = 32, 30  # each setting and each build of the library makes another verdict
_SHOWN_STDERR_CHARS = 300

Status = Literal["ok", "unsupported", "broken"]
_STATUSES = ("ok", "unsupported", "broken")


@dataclass(frozen=True)
class Combination:
    """Weights of one tensor type in one kind of memory."""

    buffer_type: str
    tensor_type: str
    status: Status = "broken"
    reason: str = ""
    error: float | None = None  # the largest normalised error seen

    def __str__(self) -> str:
        return f"{self.tensor_type} in {self.buffer_type}: {self.reason or self.status}"


@dataclass(frozen=True)
class Verdict:
    version: str
    buffer_types: tuple[str, ...]
    combinations: tuple[Combination, ...]

    @property
    def broken(self) -> list[Combination]:
        return [c for c in self.combinations if c.status == "broken"]

    def allows(self, buffer_type: str, tensor_type: str) -> bool:
        """Whether weights of this type may be put there; what was not tested (a GPU's memory) is not forbidden."""
        return not any((c.buffer_type, c.tensor_type) == (buffer_type, tensor_type) for c in self.broken)

    def require_plain(self, tensor_types: Iterable[str]) -> None:
        """Errors: NativeLibraryError when even ordinary memory does not work for one of these types."""
        wanted = set(tensor_types)
        found = [c for c in self.broken if c.buffer_type == PLAIN and c.tensor_type in wanted]
        if found:
            names = "; ".join(map(str, found))
            raise NativeLibraryError(f"the tensor library is broken on this CPU ({names}); {chosen().remedy}")


@dataclass
class _Run:
    """What one throwaway process told before it ended."""

    version: str = ""
    buffer_types: tuple[str, ...] = ()
    tensor_types: tuple[str, ...] = ()
    combinations: list[Combination] = field(default_factory=list)
    trying: str = ""  # the tensor type it tried last
    is_finished: bool = False
    death: str = ""  # empty when it finished
    unfit: str = ""  # why the library cannot be used at all


def verdict(cache_dir: Path | None = None, command: Sequence[str] = COMMAND) -> Verdict:
    """The verdict on this library and processor, from the cache or made now (about a second).

    Logs one warning that names what is broken.
    Errors: NativeLibraryError when the library is missing or does not run at all.
    """
    file = (cache_dir or cache.home()) / f"selftest-{_key(chosen(), command)}.json"
    found = _read(file)
    if found is None:
        found = examine(command)
        _write(file, found)
        cache.tidy(file.parent, f"selftest-{'[0-9a-f]' * 20}.json", _MOST_KEPT, _MOST_DAYS)
        cache.tidy(file.parent, f"selftest-*{_UNFINISHED}", 0, 1)
    else:
        cache.use(file)
    if found.broken:
        log.warning("not used, because it does not work on this CPU: %s", "; ".join(map(str, found.broken)))
    return found


def _key(provider: Provider, command: Sequence[str]) -> str:
    parts = [str(_FORMAT), provider.package, cpu.model().key, *command, os.environ.get(FORCED, "")]
    for path in [*provider.files, *([LIBRARY] if LIBRARY.exists() else [])]:
        stat = path.stat()
        parts += [path.name, str(stat.st_size), str(stat.st_mtime_ns)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _read(file: Path) -> Verdict | None:
    """A cached verdict; None when there is none or it is not one."""
    try:
        data = json.loads(file.read_text("utf-8"))
        combinations = tuple(Combination(**item) for item in data["combinations"])
        found = Verdict(str(data["version"]), tuple(map(str, data["buffer_types"])), combinations)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return found if combinations and all(_is_sound(c) for c in combinations) else None


def _is_sound(combination: Combination) -> bool:
    texts = (combination.buffer_type, combination.tensor_type, combination.reason)
    return combination.status in _STATUSES and all(isinstance(text, str) for text in texts)


def _write(file: Path, found: Verdict) -> None:
    scratch = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=file.parent, prefix="selftest-", suffix=_UNFINISHED, delete=False
        ) as scratch:
            json.dump(asdict(found), scratch)
        os.replace(scratch.name, file)
    except OSError as error:
        log.debug("the self-test's verdict is not kept: %s", error)
        if scratch is not None:
            Path(scratch.name).unlink(missing_ok=True)


def examine(command: Sequence[str] = COMMAND) -> Verdict:
    """Try every combination, in as many processes as it takes.

    Errors: NativeLibraryError when the library cannot be tried at all.
    """
    first = _run(command)
    if not first.buffer_types or not first.tensor_types:
        if first.unfit:
            raise NativeLibraryError(first.unfit)
        raise NativeLibraryError(f"the tensor library does not run on this CPU: {first.death}; {chosen().remedy}")
    combinations = list(first.combinations)
    if first.death:
        combinations = [c for buffer_type in first.buffer_types for c in _examine_buffer_type(command, buffer_type)]
    order = {name: i for i, name in enumerate(first.buffer_types)}
    combinations.sort(key=lambda c: order.get(c.buffer_type, len(order)))
    return Verdict(first.version, first.buffer_types, tuple(combinations))


def _examine_buffer_type(command: Sequence[str], buffer_type: str) -> list[Combination]:
    together = _run(command, buffer_type)
    if not together.death:
        return together.combinations
    unsupported = [c for c in together.combinations if c.status == "unsupported"]
    remaining = [t for t in together.tensor_types if t not in {c.tensor_type for c in unsupported}]
    with ThreadPoolExecutor(max_workers=max(1, min(8, usable_cores()))) as pool:
        alone = list(pool.map(lambda t: _alone(_run(command, buffer_type, t), buffer_type, t), remaining))
    if not any(c.status == "broken" for c in alone):
        # Nothing dies alone, yet together they do: the one that was being tried is the best name there is.
        suspect = together.trying or (remaining[0] if remaining else "")
        alone = [c for c in alone if c.tensor_type != suspect]
        alone.append(Combination(buffer_type, suspect, "broken", f"{together.death} (together with other types)"))
    return [*alone, *unsupported]


def _alone(run: _Run, buffer_type: str, tensor_type: str) -> Combination:
    own = [c for c in run.combinations if c.tensor_type == tensor_type]
    if run.death or not own:
        return Combination(buffer_type, tensor_type, "broken", run.death or "no answer")
    return own[0]


def _run(command: Sequence[str], buffer_type: str | None = None, tensor_type: str | None = None) -> _Run:
    arguments = [*command]
    arguments += ["--buffer-type", buffer_type] if buffer_type else []
    arguments += ["--tensor-type", tensor_type] if tensor_type else []
    environ = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    try:
        done = subprocess.run(
            arguments, capture_output=True, stdin=subprocess.DEVNULL, env=environ, check=False, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired as timeout:
        run = _parse(timeout.stdout or b"")
        run.death = f"no answer within {TIMEOUT_S:.0f} s"
        return run
    except OSError as error:
        return _Run(death=str(error))
    run = _parse(done.stdout)
    if done.returncode != 0 or not run.is_finished:
        run.death = _cause(done.returncode, done.stderr.decode(errors="replace"))
    return run


def _parse(output: bytes) -> _Run:
    """The lines of puna.native.products; a last line cut in two by a crash is dropped."""
    run = _Run()
    for text in output.decode(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        match line:
            case {"library": {"version": str(version), "buffer_types": list(buffer_types), "tensor_types": list(tensor_types)}}:
                run.version = version
                run.buffer_types = tuple(map(str, buffer_types))
                run.tensor_types = tuple(map(str, tensor_types))
            case {"buffer_type": str(), "tensor_type": str(tensor_type), "status": "trying"}:
                run.trying = tensor_type
            case {"buffer_type": str(), "tensor_type": str(), "status": "ok" | "unsupported" | "broken"}:
                run.combinations.append(Combination(**line))
            case {"unfit": str(unfit)}:
                run.unfit = unfit
            case {"finished": True}:
                run.is_finished = True
    return run


def _cause(returncode: int, stderr: str) -> str:
    """How a process ended, with the assertion or error it printed last."""
    if returncode < 0:
        try:
            cause = f"crash ({signal.Signals(-returncode).name})"
        except ValueError:
            cause = f"crash (signal {-returncode})"
    else:
        cause = f"exit status {returncode}"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    telling = [line for line in lines if "GGML_ASSERT" in line or "Error" in line]
    return f"{cause}: {telling[-1][:_SHOWN_STDERR_CHARS]}" if telling else cause
