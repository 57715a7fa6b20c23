"""How often a load reads the model's file: once, unless it changes."""

from __future__ import annotations

import gc
import os
from collections import Counter
from pathlib import Path
from typing import Literal

import psutil
import pytest

from puna.errors import FileFormatError, NotFound
from puna.gguf.reader import GGUFFile
from puna.native.vocabulary import Vocabulary
from puna.runner.engine import Engine
from puna.wire import LoadOptions, LoadRequest
from tests.tiny import write_llama


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often heads and vocabularies were read."""
    counts: Counter[str] = Counter()
    parse, read = GGUFFile.__init__, Vocabulary.load

    def counted_parse(file: GGUFFile, *given: object) -> None:
        counts["head"] += 1
        parse(file, *given)  # type: ignore[arg-type]

    def counted_read(path: str) -> Vocabulary | None:
        counts["vocabulary"] += 1
        return read(path)

    monkeypatch.setattr(GGUFFile, "__init__", counted_parse)
    monkeypatch.setattr(Vocabulary, "load", counted_read)
    return counts


def step(engine: Engine, operation: Literal["fit", "alloc", "commit", "close"], n_ctx: int = 128) -> int:
    """Bytes that the model takes."""
    reply = engine.load(LoadRequest(operation=operation, options=LoadOptions(n_ctx=n_ctx, n_threads=1)))
    assert reply.success, reply.error
    return 0 if reply.memory is None else sum(device.total for device in reply.memory.devices)


@pytest.mark.parametrize("new_engine", [True, False], ids=["puna", "libllama"])
def test_all_steps_of_a_load_read_the_file_once(tmp_path: Path, reads: Counter[str], new_engine: bool) -> None:
    """Whatever the options are that are tried; what is closed is read again."""
    path = write_llama(tmp_path / "model.gguf", n_layers=1, n_ctx=512)
    engine = Engine(path, new_engine)
    for _ in range(2):
        reads.clear()
        assert step(engine, "fit", 512) > step(engine, "fit", 128)
        step(engine, "alloc", 256)
        step(engine, "commit", 256)
        assert reads == {"head": 1, "vocabulary": 1}
        assert engine.detokenize(engine.tokenize("hello", add_special=False)) == "hello"
        step(engine, "close")
        gc.collect()  # of Puna's engine the mapped weights go with the objects that show them
        assert str(path) not in {mapped.path for mapped in psutil.Process().memory_maps()}


@pytest.mark.parametrize("in_place", [True, False])
def test_a_file_that_has_changed_is_read_again(tmp_path: Path, reads: Counter[str], in_place: bool) -> None:
    small, large = (write_llama(tmp_path / f"{n}.gguf", n_layers=n) for n in (1, 3))
    path = tmp_path / "model.gguf"
    path.write_bytes(small.read_bytes())
    engine = Engine(path)
    before = step(engine, "fit")
    step(engine, "alloc")
    if in_place:
        path.write_bytes(large.read_bytes())
    else:
        os.replace(large, path)
    assert step(engine, "commit") > 2 * before
    assert reads == {"head": 2, "vocabulary": 2}
    engine.close()


def test_a_file_that_says_that_it_has_not_changed_is_read_again(tmp_path: Path, reads: Counter[str]) -> None:
    """What changes it can put all of its times back, but for that of the change."""
    path = write_llama(tmp_path / "model.gguf", n_layers=1)
    engine, before, content = Engine(path), path.stat(), path.read_bytes()
    step(engine, "fit")
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        path.write_bytes(content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    step(engine, "commit")
    assert reads == {"head": 2, "vocabulary": 2}
    engine.close()


def test_a_file_that_is_gone_or_broken_is_not_loaded_from_memory(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "model.gguf", n_layers=1)
    engine, content = Engine(path), path.read_bytes()
    step(engine, "fit")
    path.unlink()
    with pytest.raises(NotFound):
        step(engine, "commit")
    path.write_bytes(content[:1000])
    with pytest.raises(FileFormatError):
        step(engine, "commit")
    path.write_bytes(content)
    step(engine, "commit")
    engine.close()
