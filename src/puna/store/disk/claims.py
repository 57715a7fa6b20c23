"""Who is at work in a store, in whatever process, and which blobs that work relies on before a manifest names them.

A piece of work has a file ``.work-<id>`` below the store's root, which it keeps locked; the operating system frees that
lock when the process ends, in whatever way. So what live work claims is kept however long it takes, and what dead work
left is known at once. The lines of the file are claims: a digest, until when, and whether the work brought the blob.
Everything here happens under the store's lock. Knows nothing of manifests, and removes no blob.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from puna.errors import StoreError
from puna.store.disk.files import names_in
from puna.store.disk.locks import NO_LOCKS, LocksMissing, StoreLock
from puna.store.disk.space import explained, storing

log = logging.getLogger(__name__)

FOREVER = 1 << 40  # seconds since 1970

_NAME = re.compile(r"\.work-([0-9a-f]{16})")
_LINE = re.compile(rb"(sha256:[0-9a-f]{64}) ([0-9]{1,13}) (new|found)")
_MAX_BYTES = 64 << 20
_COMPACT_FROM_BYTES = 64 << 10


@dataclass(frozen=True)
class Claim:
    """On one blob; *is_brought* when the work that claims it made it, and nobody else knows of it yet."""

    until: int  # seconds since 1970
    is_brought: bool

    def line(self, digest: str) -> bytes:
        return f"{digest} {self.until} {'new' if self.is_brought else 'found'}\n".encode()


class Work:
    """One piece of work: the blobs it claims stay. Made by Claims.begin, to be ended with ``end``.

    Where the file system has no locks it has no file: then nobody else can remove anything either.
    """

    def __init__(self, root: Path, lock: StoreLock, key: str, descriptor: int | None) -> None:
        self.root = root
        self.id = key  # empty where there is no file
        self._lock = lock
        self._descriptor = descriptor
        self._claims: dict[str, Claim] = {}
        self._n_bytes = 0

    @property
    def brought(self) -> tuple[str, ...]:
        """Blobs that are there because of this work and that no manifest names."""
        return tuple(digest for digest, claim in self._claims.items() if claim.is_brought)

    def claim(self, digests: Iterable[str]) -> None:
        """Rely on blobs from now on. They stay if they are seen to be there afterwards.

        Errors: as StoreLock.held.
        """
        with self._locked():
            self._add({digest: self._claims.get(digest, Claim(FOREVER, is_brought=False)) for digest in digests})

    def bring(self, digest: str, is_there: Callable[[], bool]) -> bool:
        """Claim a blob that is about to get its name; returns whether it is new.

        Errors: as StoreLock.held; what *is_there* raises.
        """
        with self._locked():
            is_new = not is_there()
            self._add({digest: Claim(FOREVER, is_brought=is_new or digest in self.brought)})
        return is_new

    def lend(self, digest: str, until: float) -> None:
        """Keep a blob for others until then, at least.

        Errors: as StoreLock.held.
        """
        known = self._claims.get(digest)
        left, wanted = (known.until if known else 0) - time.time(), until - time.time()
        if left < wanted / 2:  # asked for again and again, it need not be written each time
            with self._locked():
                self._add({digest: Claim(int(until), is_brought=False)})

    def settle(self, digests: Iterable[str]) -> None:
        """A manifest names these now, so they stay however the work ends."""
        for digest in digests:
            if digest in self._claims:
                self._claims[digest] = Claim(FOREVER, is_brought=False)

    def drop(self, digests: Iterable[str]) -> None:
        """Rely on blobs no longer.

        Errors: as StoreLock.held.
        """
        dropped = self._claims.keys() & set(digests)
        if dropped:
            with self._locked():
                self._rewrite({digest: claim for digest, claim in self._claims.items() if digest not in dropped})

    def end(self) -> None:
        """Give up all claims; where that cannot be noted now, the next prune finds the work dead."""
        if self._descriptor is None:
            return
        try:
            with self._lock.held(), storing(self.root):
                (self.root / f".work-{self.id}").unlink(missing_ok=True)
        except StoreError as error:
            log.warning("the end of a piece of work could not be noted: %s", error)
        finally:
            os.close(self._descriptor)
            self._descriptor = None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if self._descriptor is None:
            yield
            return
        with self._lock.held():
            yield

    def _add(self, claims: Mapping[str, Claim]) -> None:
        if self._n_bytes > _COMPACT_FROM_BYTES:
            now = time.time()
            self._rewrite({digest: claim for digest, claim in self._claims.items() if claim.until > now})
        lines = b"".join(claim.line(digest) for digest, claim in claims.items())
        if self._descriptor is not None:
            try:
                _write(self._descriptor, self._n_bytes, lines)
            except OSError as error:
                raise explained(error, self.root, len(lines)) from error
        self._n_bytes += len(lines)
        self._claims |= claims

    def _rewrite(self, claims: dict[str, Claim]) -> None:
        lines = b"".join(claim.line(digest) for digest, claim in claims.items())
        if self._descriptor is not None:
            with storing(self.root, len(lines)):
                _write(self._descriptor, 0, lines)  # over what is there, so there is room
        self._n_bytes, self._claims = len(lines), claims


class Lender:
    """Keeps the blobs that come through it for others, who have not said yet what they want them for."""

    def __init__(self, work: Work, for_s: float) -> None:
        self.id = work.id
        self._work = work
        self._for_s = for_s

    def bring(self, digest: str, is_there: Callable[[], bool]) -> bool:
        """As Work.bring, for a limited time; not the end of the work but that time decides when the blob may go."""
        self._work.lend(digest, time.time() + self._for_s)
        return not is_there()


class Keeper:
    """Claims the blobs that come through it, but leaves them where they are when the work ends without a model: the next try
    at it begins with them, and a start of the server removes them when none comes.
    """

    def __init__(self, work: Work) -> None:
        self.id = work.id
        self._work = work

    def bring(self, digest: str, is_there: Callable[[], bool]) -> bool:
        """As Work.bring, but the blob is nobody's."""
        self._work.claim([digest])
        return not is_there()


@dataclass
class Standing:
    """All work of a store at one moment: the claims of each by its id."""

    live: dict[str, dict[str, Claim]] = field(default_factory=dict)
    dead: dict[str, dict[str, Claim]] = field(default_factory=dict)

    def claimed(self, *, but_for: str = "") -> frozenset[str]:
        """Digests that live work relies on now, one piece of work aside."""
        now = time.time()
        return frozenset(
            digest for key, claims in self.live.items() if key != but_for for digest, claim in claims.items() if claim.until > now
        )

    @property
    def abandoned(self) -> frozenset[str]:
        """Blobs that dead work brought."""
        return frozenset(digest for claims in self.dead.values() for digest, claim in claims.items() if claim.is_brought)


class Claims:
    """All work of one store."""

    def __init__(self, root: Path, lock: StoreLock) -> None:
        self.root = root
        self._lock = lock

    def begin(self) -> Work:
        """Errors: DiskFull; StoreError."""
        try:
            with self._lock.held(), storing(self.root):
                key = secrets.token_hex(8)
                descriptor = _make(self.root / f".work-{key}")
        except LocksMissing as error:
            log.warning("%s; no model's blobs are ever removed here", error)
            return Work(self.root, self._lock, "", None)
        return Work(self.root, self._lock, key, descriptor)

    def look(self) -> Standing:
        """To be called under the store's lock.

        Errors: StoreError when it cannot be told who is at work on what.
        """
        standing = Standing()
        for name in names_in(self.root):
            match = _NAME.fullmatch(name)
            if match is None:
                continue
            try:
                is_live, claims = _read(self.root / name)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise StoreError(f"who works on the models in {self.root} cannot be told: {name}: {error.strerror}") from error
            (standing.live if is_live else standing.dead)[match[1]] = claims
        return standing

    def forget(self, keys: Iterable[str]) -> None:
        """Remove the files of dead work, after all that it left.

        Errors: StoreError.
        """
        with storing(self.root):
            for key in keys:
                (self.root / f".work-{key}").unlink(missing_ok=True)


def _make(path: Path) -> int:
    from filelock import lock_descriptor

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        lock_descriptor(descriptor, blocking=False)
    except OSError as error:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        if error.errno in NO_LOCKS:
            raise LocksMissing(f"the file system of {path.parent} has no locks: {error.strerror}") from error
        raise
    return descriptor


def _read(path: Path) -> tuple[bool, dict[str, Claim]]:
    """Whether the work is live, and what it claims; of two lines about one blob the later one counts."""
    from filelock import lock_descriptor, unlock_descriptor

    descriptor = os.open(path, os.O_RDWR)  # some network file systems lock only what may be written
    with os.fdopen(descriptor, "rb") as file:
        is_dead = lock_descriptor(descriptor, blocking=False)
        try:
            content = file.read(_MAX_BYTES)
        finally:
            if is_dead:
                unlock_descriptor(descriptor)
    found = (match for line in content.splitlines() if (match := _LINE.fullmatch(line)))
    return not is_dead, {match[1].decode(): Claim(int(match[2]), match[3] == b"new") for match in found}


def _write(descriptor: int, at: int, content: bytes) -> None:
    """Write the end of a file; one that cannot be written whole ends where it did, if that was here."""
    os.lseek(descriptor, at, os.SEEK_SET)
    try:
        left = memoryview(content)
        while left:
            left = left[os.write(descriptor, left) :]
        os.ftruncate(descriptor, at + len(content))
    except OSError:
        if at:
            os.ftruncate(descriptor, at)
        raise
