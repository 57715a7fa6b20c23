"""Memory in huge pages, as the system tells it."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest

from puna.native.pages import SETTING, ask_for_huge, can_be_huge
from tests.smaps import flags_of

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="huge pages on request are Linux's")
MIB = 1 << 20


@LINUX
@pytest.mark.parametrize(
    ("setting", "can"),
    [
        ("[always] madvise never\n", True),
        ("always [madvise] never\n", True),
        ("always madvise [never]\n", False),
    ],
)
def test_the_systems_setting_is_followed(tmp_path: Path, setting: str, can: bool) -> None:
    path = tmp_path / "enabled"
    path.write_text(setting)
    assert can_be_huge(path) is can


def test_a_system_without_the_setting_has_none(tmp_path: Path) -> None:
    assert not can_be_huge(tmp_path / "enabled")


@LINUX
def test_memory_that_was_asked_for_is_marked_and_works() -> None:
    block = mmap.mmap(-1, 16 * MIB)
    pages = np.frombuffer(block, np.uint8)
    address = pages.ctypes.data
    # Neither end at the border of a page, as the library's buffers are.
    assert ask_for_huge(address + 100, 12 * MIB) is SETTING.exists()
    assert ("hg" in flags_of(address + 8192)) is SETTING.exists()
    pages[:] = 7
    assert int(pages.sum()) == 7 * 16 * MIB


def test_less_than_a_page_is_not_asked_for() -> None:
    assert not ask_for_huge(4096 * 1000 + 1, 4096)
