from __future__ import annotations

import mmap
import os
from pathlib import Path

import psutil
import pytest

from puna import host

MIB = 1 << 20


def group(root: Path, path: str, **files: str | int) -> None:
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def memory_of(tmp_path: Path, membership: str) -> host.Memory:
    (tmp_path / "membership").write_text(membership)
    return host.memory(tmp_path / "membership", tmp_path)


def test_without_a_control_group_it_is_the_machine_s(tmp_path: Path) -> None:
    found = host.memory(tmp_path / "none", tmp_path)
    assert found.total == psutil.virtual_memory().total
    assert 0 < found.free <= found.total


def test_a_limit_is_what_there_is(tmp_path: Path) -> None:
    group(tmp_path, "pod", memory__max=100 * MIB, memory__current=30 * MIB)
    assert memory_of(tmp_path, "0::/pod\n") == host.Memory(100 * MIB, 70 * MIB, psutil.swap_memory().free)


def test_pages_of_files_count_as_free_but_not_those_of_shared_memory(tmp_path: Path) -> None:
    stat = f"anon {10 * MIB}\nfile {60 * MIB}\nshmem {5 * MIB}\nslab_reclaimable {2 * MIB}"
    group(tmp_path, "pod", memory__max=100 * MIB, memory__current=80 * MIB, memory__stat=stat)
    assert memory_of(tmp_path, "0::/pod\n").free == 77 * MIB


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    """Even where the use is counted."""
    group(tmp_path, "pod", memory__max="max", memory__current=1 << 60)
    assert memory_of(tmp_path, "0::/pod\n").total == psutil.virtual_memory().total
    assert memory_of(tmp_path, "0::/pod\n").free > 0


def test_the_tightest_level_counts(tmp_path: Path) -> None:
    group(tmp_path, "a/b", memory__max=100 * MIB, memory__current=10 * MIB)
    group(tmp_path, "a", memory__max=200 * MIB, memory__current=180 * MIB)
    found = memory_of(tmp_path, "0::/a/b\n")
    assert (found.total, found.free) == (100 * MIB, 20 * MIB)


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    stat = f"total_inactive_file {20 * MIB}\ntotal_active_file {5 * MIB}"
    group(tmp_path, "memory/docker/x", memory__limit_in_bytes=100 * MIB, memory__usage_in_bytes=50 * MIB, memory__stat=stat)
    found = memory_of(tmp_path, "11:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n")
    assert (found.total, found.free) == (100 * MIB, 75 * MIB)


def test_more_used_than_granted_is_nothing_free(tmp_path: Path) -> None:
    group(tmp_path, "pod", memory__max=10 * MIB, memory__current=30 * MIB)
    assert memory_of(tmp_path, "0::/pod\n").free == 0


@pytest.mark.parametrize("text", ["", "nonsense", "0::", "0::/../../etc"])
def test_nonsense_is_no_limit(tmp_path: Path, text: str) -> None:
    assert memory_of(tmp_path, text).total == psutil.virtual_memory().total


def test_private_memory_of_a_process() -> None:
    before = host.private_bytes(os.getpid())
    # Pages of its own: what the allocator has left of earlier tests would hide the growth.
    with mmap.mmap(-1, 50 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
        assert 45 * MIB < host.private_bytes(os.getpid()) - before < 60 * MIB
    assert host.private_bytes(0x7FFFFFFF) == 0
