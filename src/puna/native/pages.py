"""Pages of memory: huge ones for what the tensor library has taken, and fresh ones from the system.

A processor remembers the places of some thousand pages. Weights are read from end to end at each step, and with pages
of 4 KiB it looks up a new one every few rows; with pages of 2 MiB hardly ever. Linux gives those to who asks, where
its setting ``/sys/kernel/mm/transparent_hugepage/enabled`` is not ``never``; pages of files are rarely among them.
"""

from __future__ import annotations

import ctypes
import mmap
from ctypes import c_size_t, c_void_p
from functools import cache
from pathlib import Path

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")

_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


def can_be_huge(setting: Path = SETTING) -> bool:
    """Whether the system gives huge pages to who asks for them."""
    if _ADVICE is None:
        return False
    try:
        return "[never]" not in setting.read_text()
    except OSError:
        return False


def ask_for_huge(address: int, n_bytes: int) -> bool:
    """Before anything was written there. The answer says whether the system took the advice; it need not follow it."""
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + n_bytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    if _ADVICE is None or length <= 0:
        return False
    return bool(_system().madvise(c_void_p(begin), c_size_t(length), _ADVICE) == 0)


def zero_pages(n_bytes: int) -> mmap.mmap:
    """Zeros that take no memory until they are used; they go back to the system with the last reference.

    Errors: OSError.
    """
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return mmap.mmap(-1, max(n_bytes, 1))
    return mmap.mmap(-1, max(n_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


@cache
def _system() -> ctypes.CDLL:
    return ctypes.CDLL(None)
