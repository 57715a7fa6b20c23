from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from puna.errors import FileFormatError
from puna.gguf.join import join
from puna.gguf.reader import GGUFFile
from tests.splitting import split
from tests.tiny import write_llama


def joined(paths: list[Path], target: Path) -> list[tuple[int, int]]:
    seen: list[tuple[int, int]] = []
    with ExitStack() as stack:
        join([stack.enter_context(GGUFFile.open(path)) for path in paths], target, lambda done, total: seen.append((done, total)))
    return seen


@pytest.mark.parametrize("n", [2, 5, 12])
def test_the_parts_make_the_whole_again_in_any_order(tmp_path: Path, n: int) -> None:
    whole = Path(write_llama(tmp_path / "tiny.gguf", n_ctx=256))
    parts = split(whole, n, tmp_path / "parts")
    seen = joined(parts[::-1], tmp_path / "joined.gguf")
    assert (tmp_path / "joined.gguf").read_bytes() == whole.read_bytes()
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]


def test_what_is_missing_or_foreign_is_named(tmp_path: Path) -> None:
    whole = Path(write_llama(tmp_path / "tiny.gguf", n_ctx=256))
    parts = split(whole, 4, tmp_path / "parts")
    others = split(whole, 3, tmp_path / "others")
    with pytest.raises(FileFormatError, match="cut into 4 files, and not all are there: 2, 4 missing"):
        joined([parts[0], parts[2]], tmp_path / "x")
    for paths in ([*parts, parts[1]], [*parts[:3], others[2]]):
        with pytest.raises(FileFormatError, match="is not a part of the same model as"):
            joined(paths, tmp_path / "x")
    four_other = split(Path(write_llama(tmp_path / "other.gguf", n_layers=3)), 4, tmp_path / "four")
    with pytest.raises(FileFormatError, match=r"the parts have \d+ tensors, \d+ by name, instead of"):
        joined([*parts[:3], four_other[3]], tmp_path / "x")
    assert not (tmp_path / "x").exists()
