"""What survives a power cut: the order in which files are flushed, named, and removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from puna.store.recipe import Recipe
from puna.store.store import Store
from tests.unit.store.faults import watching
from tests.unit.store.gguf_files import write_model


@pytest.mark.parametrize("link", [False, True])
def test_nothing_is_named_before_it_is_flushed_nor_removed_before_it_is_replaced(
    store: Store, tmp_path: Path, link: bool
) -> None:
    old = store.blobs.import_file(write_model(tmp_path / "old.gguf")).digest
    store.create("deep/model:tag", Recipe(files={"m.gguf": old}))
    path = write_model(tmp_path / "new.gguf", seed=1)
    seen: list[tuple[str, str]] = []
    with watching(tmp_path, lambda name, path: seen.append((name, path))):
        new = store.blobs.import_file(path, link=link)
        store.create("deep/model:tag", Recipe(files={"m.gguf": new.digest}))
        store.create("other/model:tag", Recipe(files={"m.gguf": new.digest}))
    blobs, manifests = str(store.blobs.folder), str(store.manifests.folder)
    named = [index for index, (name, _) in enumerate(seen) if name in ("replace", "replace.over", "link")]
    for index in named:
        source = seen[index][1]
        if source.endswith("/tag") or source == str(path):  # second names that need not last
            continue
        assert ("fsync", source) in seen[:index], seen[index]
        folder = str(store.blobs.folder if source.startswith(blobs) else Path(source).parent)
        assert ("fsync", folder) in seen[index:], seen[index]
    (removed,) = [index for index, item in enumerate(seen) if item == ("unlink", str(store.blobs.path(old)))]
    replaced = next(index for index, (name, path) in enumerate(seen) if name == "replace.over" and path.startswith(manifests))
    assert replaced < seen.index(("fsync", f"{manifests}/registry.ollama.ai/deep/model")) < removed
    made = [path for name, path in seen if name == "mkdir" and path.startswith(manifests)]
    assert [Path(path).name for path in made] == ["other", "model"]
    for folder in made:
        assert ("fsync", str(Path(folder).parent)) in seen[seen.index(("mkdir", folder)) :]
