"""What packed weights are made of, and whether that is still what it was.

A blob of a folder of models has the name of its content, so there is nothing to ask. Any other file is known by its state: which
inode it is, its size, and when it was last changed, by the clock that no program can set for a file. Whoever loads it in the same
state gets what was packed of it; one that was touched, moved or written to is packed again. Its content is never hashed: what
would be remembered of it would be believed for as long as the state is the same and no longer, and finding it out anew takes as
long as packing.

That holds only where each change is stamped. So it is asked which file system the file lies on: one of those of this machine
whose kernel stamps all writes, also those made through mappings; no other machine's, and none without such a clock. And a file
that changed a moment ago is packed without being kept, since what changes in the same moment would have the same stamp.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from puna import packed_files
from puna.gguf.reader import GGUFFile

MOUNTS = Path("/proc/self/mountinfo")
DESCRIPTORS = Path("/proc/self/fdinfo")
_STAMPING = frozenset(("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "bcachefs"))
# What is written through a mapping is stamped when a page is first written to, and again when it has been written back: by
# default after 35 seconds at most. Clocks of file systems are finer.
SETTLED_NS = 60 * 10**9

State = tuple[int, ...]


@dataclass(frozen=True)
class Origin:
    """*root*: the folder of models; *name*: how the names begin under which packed weights are kept there.

    *path* and *state* are those of a file that is no blob.
    """

    root: Path
    name: str
    path: str = ""
    state: State = ()

    @classmethod
    def of(cls, file: GGUFFile, models: Path | None) -> Origin | None:
        """None where nobody could tell later whether packed weights are the file's."""
        path = Path(file.path)
        root = packed_files.root_of(path)
        if root is not None:
            return cls(root, path.name)
        if models is None:
            return None
        return cls._of_other(os.path.realpath(path), _state(file.status), models)

    @classmethod
    def _of_other(cls, path: str, state: State, models: Path) -> Origin | None:
        origin = cls(models, packed_files.name_of_file(path, state), path, state)
        is_settled = time.time_ns() - state[-1] >= SETTLED_NS
        return origin if is_settled and stamps_changes(path) and origin.is_as_it_was() else None

    def is_open_at(self, descriptor: int) -> bool:
        """Whether it is what was opened there."""
        return not self.state or _state(os.fstat(descriptor)) == self.state

    def is_as_it_was(self) -> bool:
        try:
            return not self.state or _state(os.stat(self.path)) == self.state
        except OSError:
            return False


def _state(status: os.stat_result) -> State:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def stamps_changes(path: str) -> bool:
    """Whether the file system is known to stamp every change of a file that lies at *path*, and to keep the stamps."""
    if sys.platform != "linux":
        return False
    try:
        descriptor = os.open(path, os.O_PATH)
    except OSError:
        return False
    try:
        kind, options = _mount_of((DESCRIPTORS / str(descriptor)).read_text(), MOUNTS.read_text(errors="replace"))
    except (OSError, ValueError):
        return False
    finally:
        os.close(descriptor)
    return kind in _STAMPING and "lazytime" not in options  # those are lost when the machine stops, unlike what was written


def _mount_of(descriptor: str, mounts: str) -> tuple[str, list[str]]:
    """The type of a file system and its options, of what the kernel says of an open file and of all mounts.

    Errors: ValueError when it says nothing of that one.
    """
    facts = dict(line.split(":", 1) for line in descriptor.splitlines() if ":" in line)
    number = facts.get("mnt_id", "").strip()
    for line in mounts.splitlines():
        fields = line.split(" ")
        if fields[0] == number and "-" in fields[6:]:
            kind, _device, options = fields[fields.index("-", 6) + 1 :][:3]
            return kind, [*fields[5].split(","), *options.split(",")]
    raise ValueError("the mount is not listed")
