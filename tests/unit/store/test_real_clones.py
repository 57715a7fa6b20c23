"""Copies that take no room, on file systems that have them.

Mounting is for the administrator: elsewhere this test is not collected (conftest.py), and a stand-in clones (test_blobs.py).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from puna.store.store import Store
from tests.mounting import free_bytes, mountable, mounted

CLONING = mountable(("btrfs", "xfs"))
N_CLONED = 8 << 20

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("kind", CLONING)
def test_a_local_file_shares_its_blocks_with_the_blob(kind: str, tmp_path: Path) -> None:
    """It takes no room, and stays as it is when the file is changed afterwards."""
    with mounted(kind, tmp_path) as disk:
        content = os.urandom(N_CLONED)
        source = disk / "model.gguf"
        source.write_bytes(content)
        blobs = Store(disk / "models").blobs
        os.sync()
        n_before = free_bytes(disk)
        blob = blobs.import_file(source, link=True)
        os.sync()
        assert n_before - free_bytes(disk) < N_CLONED // 4
        assert not blobs.path(blob.digest).samefile(source)
        with source.open("r+b") as file:
            file.write(bytes(1000))
        assert blobs.read(blob.digest, N_CLONED) == content
