from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from puna.native import cache

DAYS = cache.DAY_S


def unused(file: Path, days: float) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    then = time.time() - days * DAYS
    os.utime(file, (then, then), follow_symlinks=False)
    return file


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_not_used_for_long_goes(tmp_path: Path) -> None:
    for days in (0, 2, 29, 31, 400):
        unused(tmp_path / f"{days}.json", days)
    cache.tidy(tmp_path, "*.json", most=10, days=30)
    assert names(tmp_path) == ["0.json", "2.json", "29.json"]


def test_no_more_stay_than_are_wanted_but_those_of_today(tmp_path: Path) -> None:
    for days in (0, 0.5, 2, 3, 4):
        unused(tmp_path / f"{days}.json", days)
    cache.tidy(tmp_path, "*.json", most=3, days=30)
    assert names(tmp_path) == ["0.5.json", "0.json", "2.json"]
    cache.tidy(tmp_path, "*.json", most=1, days=30)
    assert names(tmp_path) == ["0.5.json", "0.json"]


def test_what_is_used_again_stays(tmp_path: Path) -> None:
    old = unused(tmp_path / "a.json", 100)
    cache.use(old)
    cache.tidy(tmp_path, "*.json", most=10, days=30)
    assert names(tmp_path) == ["a.json"]


def test_nothing_else_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    precious = unused(tmp_path / "precious", 100)
    unused(folder / "other.txt", 100)
    (folder / "link.json").symlink_to(precious)
    os.utime(folder / "link.json", (0, 0), follow_symlinks=False)
    unused(folder / "folder.json" / "inside", 100)
    os.utime(folder / "folder.json", (0, 0))
    cache.tidy(folder, "*.json", most=0, days=30)
    assert names(folder) == ["folder.json", "link.json", "other.txt"]
    assert precious.exists()
    unused(folder / "another's.json", 100)
    monkeypatch.setattr(os, "getuid", lambda: precious.stat().st_uid + 1)
    cache.tidy(folder, "*.json", most=0, days=30)
    assert (folder / "another's.json").exists()


def test_what_cannot_be_read_or_changed_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.tidy(tmp_path / "nowhere", "*", most=0, days=0)
    cache.use(tmp_path / "nowhere")
    old = unused(tmp_path / "a.json", 100)

    def refused(_file: Path, missing_ok: bool = False) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(Path, "unlink", refused)
    cache.tidy(tmp_path, "*.json", most=0, days=30)
    assert old.exists()
