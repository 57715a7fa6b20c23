from __future__ import annotations

import os
import time
from pathlib import Path

from puna.store.store import Store

LONG_AGO = time.time() - 7200
DAYS_AGO = time.time() - 48 * 3600
UNUSED = "sha256-" + "1" * 64


def put(path: Path, *, is_old: bool, when: float = LONG_AGO) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")
    if is_old:
        os.utime(path, (when, when))
    return path


def test_what_is_old_and_unused_goes(store: Store, base: str) -> None:
    used = set(os.listdir(store.blobs.folder))
    for name in used:
        os.utime(store.blobs.folder / name, (LONG_AGO, LONG_AGO))
    folder = store.blobs.folder
    old = [put(folder / name, is_old=True) for name in (UNUSED, "sha256-123abc")]
    young = put(folder / ("sha256-" + "2" * 64), is_old=False)
    foreign = put(folder / "README", is_old=True)
    stale = put(store.root / "tmp" / "pull-1" / "x.whl", is_old=True)
    os.utime(stale.parent, (LONG_AGO, LONG_AGO))
    (store.root / "manifests" / "host" / "empty").mkdir(parents=True)
    store.prune()
    assert not any(path.exists() for path in (*old, stale.parent))
    assert young.exists()
    assert foreign.exists()
    assert used <= set(os.listdir(folder))
    assert not (store.root / "manifests" / "host").exists()
    assert store.get(base)


def test_what_was_fetched_waits_a_day_for_the_next_try(store: Store, base: str) -> None:
    """All parts of it together: one that was finished long ago belongs to one that is being written."""
    names = [f"sha256-{digit * 64}-partial{part}" for digit in "34" for part in ("", "-0", "-1")]
    paths = [put(store.blobs.folder / name, is_old=True, when=DAYS_AGO) for name in names]
    os.utime(paths[1], (LONG_AGO, LONG_AGO))
    store.prune()
    assert [path.exists() for path in paths] == [True] * 3 + [False] * 3
    with store.work() as work:
        os.utime(paths[1], (DAYS_AGO, DAYS_AGO))
        work.claim(["sha256:" + "3" * 64])
        store.prune()
        assert all(path.exists() for path in paths[:3])
    store.prune()
    assert not any(path.exists() for path in paths)


def test_a_damaged_manifest_stops_it(store: Store, base: str) -> None:
    """What the manifest would have named is not known, so nothing may go."""
    unused = put(store.blobs.folder / UNUSED, is_old=True)
    put(store.root / "manifests" / "registry.ollama.ai" / "library" / "bad" / "latest", is_old=True)
    store.prune()
    assert unused.exists()


def test_it_can_be_forbidden(store: Store, base: str) -> None:
    unused = put(store.blobs.folder / UNUSED, is_old=True)
    Store(store.root, keep_unused=True).prune()
    assert unused.exists()


def test_old_spellings_are_renamed(store: Store, base: str) -> None:
    path = store.get(base).model_path
    path.rename(path.with_name(path.name.replace("-", ":", 1)))
    store.prune()
    assert path.exists()


def test_an_empty_store(store: Store) -> None:
    store.prune()
    assert not store.root.exists()
