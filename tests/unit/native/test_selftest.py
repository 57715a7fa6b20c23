from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from puna.errors import NativeLibraryError
from puna.native import cache, cpu, products, selftest
from puna.native.providers import Provider
from puna.native.selftest import Combination, Verdict
from tests.patience import PATIENCE_S, wait_until

# A throwaway process with two buffer types and three tensor types that misbehaves as its settings say.
CHILD = """
import argparse, json, os, pathlib, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("settings")
parser.add_argument("--buffer-type")
parser.add_argument("--tensor-type")
asked = parser.parse_args()
folder = pathlib.Path(asked.settings)
settings = json.loads((folder / "settings.json").read_text())
with (folder / "calls").open("a") as calls:
    calls.write(f"{asked.buffer_type} {asked.tensor_type} {os.environ['GGML_NO_BACKTRACE']}\\n")
if "text" in settings:
    sys.exit(settings["text"])
say = lambda **line: print(json.dumps(line), flush=True)
say(library={"version": "9.9", "buffer_types": ["CPU", "FAST"], "tensor_types": ["f32", "q4", "q8"]})
say(buffer_type="FAST", tensor_type="f32", status="unsupported")
for name in ("CPU f32", "CPU q4", "CPU q8", "FAST q4", "FAST q8"):
    buffer_type, tensor_type = name.split()
    if asked.buffer_type not in (None, buffer_type) or asked.tensor_type not in (None, tensor_type):
        continue
    say(buffer_type=buffer_type, tensor_type=tensor_type, status="trying")
    if name == settings.get("assert"):
        print("some.c:7: GGML_ASSERT(x > 0) failed", file=sys.stderr)
        os.abort()
    if name == settings.get("crash_together") and asked.tensor_type is None or name in settings.get("crash", ()):
        print('{"buffer_type": "CPU", "tens', end="", flush=True)
        os.kill(os.getpid(), settings["signal"])
    if name == settings.get("hang"):
        (folder / f"hangs-{os.getpid()}").touch()
        time.sleep(600)
    if name == settings.get("wrong"):
        say(buffer_type=buffer_type, tensor_type=tensor_type, status="broken", reason="wrong result")
    else:
        say(buffer_type=buffer_type, tensor_type=tensor_type, status="ok", error=0.01)
say(finished=True)
"""


class Fake:
    """The command for a fake child, and a record of how it was called."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.folder = folder
        script = folder / "child.py"
        script.write_text(CHILD)
        self.command = (sys.executable, "-S", str(script), str(folder))
        self.behave(**settings)

    def behave(self, **settings: object) -> None:
        (self.folder / "settings.json").write_text(json.dumps({"signal": signal.SIGSEGV, **settings}))

    @property
    def calls(self) -> list[str]:
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []


def _broken(verdict: Verdict) -> dict[str, str]:
    return {f"{c.buffer_type} {c.tensor_type}": c.reason for c in verdict.broken}


def _statuses(verdict: Verdict) -> dict[str, str]:
    return {f"{c.buffer_type} {c.tensor_type}": c.status for c in verdict.combinations}


ALL_OK = {"CPU f32": "ok", "CPU q4": "ok", "CPU q8": "ok", "FAST f32": "unsupported", "FAST q4": "ok", "FAST q8": "ok"}


def test_the_installed_library_passes_on_this_cpu(tmp_path: Path) -> None:
    verdict = selftest.verdict(tmp_path)
    assert verdict.broken == []
    tested = {(c.buffer_type, c.tensor_type) for c in verdict.combinations if c.status == "ok"}
    assert {("CPU", name) for name in ("f32", "f16", "bf16", "q4_0", "q8_0", "q4_K", "q6_K", "iq2_xs", "mxfp4")} <= tested
    assert all(c.error is not None and c.error < 0.01 for c in verdict.combinations if c.status == "ok")
    assert len({c.tensor_type for c in verdict.combinations}) == len(products.weight_types())


def test_one_process_is_enough_when_nothing_breaks(tmp_path: Path) -> None:
    fake = Fake(tmp_path)
    verdict = selftest.examine(fake.command)
    assert _statuses(verdict) == ALL_OK
    assert (verdict.version, verdict.buffer_types) == ("9.9", ("CPU", "FAST"))
    assert fake.calls == ["None None 1"]


def test_a_wrong_result_needs_no_further_process(tmp_path: Path) -> None:
    fake = Fake(tmp_path, wrong="FAST q4")
    assert _broken(selftest.examine(fake.command)) == {"FAST q4": "wrong result"}
    assert len(fake.calls) == 1


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGILL", "SIGBUS", "SIGFPE"])
def test_a_crash_is_narrowed_down_to_one_combination(tmp_path: Path, name: str) -> None:
    fake = Fake(tmp_path, crash=["FAST q4"], signal=signal.Signals[name])
    verdict = selftest.examine(fake.command)
    assert _broken(verdict) == {"FAST q4": f"crash ({name})"}
    assert _statuses(verdict) == {**ALL_OK, "FAST q4": "broken"}
    # everything, then each buffer type, then the types of the one that died; what is unsupported is not tried again
    assert fake.calls[:3] == ["None None 1", "CPU None 1", "FAST None 1"]
    assert sorted(fake.calls[3:]) == ["FAST q4 1", "FAST q8 1"]


def test_every_culprit_is_named(tmp_path: Path) -> None:
    fake = Fake(tmp_path, crash=["CPU q8", "FAST q4", "FAST q8"])
    assert set(_broken(selftest.examine(fake.command))) == {"CPU q8", "FAST q4", "FAST q8"}


def test_an_assertion_is_quoted(tmp_path: Path) -> None:
    fake = Fake(tmp_path, **{"assert": "FAST q8"})
    reason = _broken(selftest.examine(fake.command))["FAST q8"]
    assert "SIGABRT" in reason
    assert "GGML_ASSERT(x > 0) failed" in reason


def test_a_type_that_dies_only_together_with_others_is_still_named(tmp_path: Path) -> None:
    fake = Fake(tmp_path, crash_together="FAST q8")
    verdict = selftest.examine(fake.command)
    assert _broken(verdict) == {"FAST q8": "crash (SIGSEGV) (together with other types)"}
    assert _statuses(verdict) == {**ALL_OK, "FAST q8": "broken"}


def test_a_child_that_hangs_is_broken_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others end within that time, however long they take to start."""

    class Waited(subprocess.Popen[bytes]):
        """Time counts once it hangs."""

        def communicate(self, input: Any = None, timeout: float | None = None) -> Any:
            hangs = tmp_path / f"hangs-{self.pid}"
            wait_until(lambda: hangs.exists() or self.poll() is not None)
            return super().communicate(input, timeout if hangs.exists() else PATIENCE_S)

    monkeypatch.setattr(subprocess, "Popen", Waited)
    monkeypatch.setattr(selftest, "TIMEOUT_S", 1.0)
    fake = Fake(tmp_path, hang="FAST q4")
    assert _broken(selftest.examine(fake.command)) == {"FAST q4": "no answer within 1 s"}


def test_a_library_that_does_not_run_at_all_is_an_error_with_its_cause(tmp_path: Path) -> None:
    fake = Fake(tmp_path, text="OSError: undefined symbol: ggml_x")
    with pytest.raises(NativeLibraryError, match="undefined symbol: ggml_x"):
        selftest.examine(fake.command)
    with pytest.raises(NativeLibraryError, match="does not run"):
        selftest.examine([str(tmp_path / "no-such-program")])


def test_the_verdict_is_kept(tmp_path: Path) -> None:
    fake = Fake(tmp_path, wrong="FAST q4")
    cache = tmp_path / "cache"
    first = selftest.verdict(cache, fake.command)
    assert selftest.verdict(cache, fake.command) == first
    assert len(fake.calls) == 1
    assert [path.suffix for path in cache.iterdir()] == [".json"]


def _cached(*combinations: object) -> str:
    return json.dumps({"version": "9.9", "buffer_types": ["CPU"], "combinations": combinations})


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"version": 1}',
        "\x00",
        _cached(),
        _cached({"buffer_type": "CPU", "tensor_type": 4}),
        _cached({"buffer_type": "CPU", "tensor_type": "q4", "status": "x"}),
        _cached({"buffer_type": "CPU", "tensor_type": "q4", "unknown": 1}),
    ],
)
def test_a_damaged_cache_is_made_anew(tmp_path: Path, content: str) -> None:
    fake = Fake(tmp_path)
    cache = tmp_path / "cache"
    first = selftest.verdict(cache, fake.command)
    (file,) = cache.iterdir()
    file.write_text(content)
    assert selftest.verdict(cache, fake.command) == first
    assert len(fake.calls) == 2
    assert json.loads(file.read_text())["version"] == "9.9"


def test_another_cpu_gets_its_own_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(tmp_path)
    selftest.verdict(tmp_path / "cache", fake.command)
    monkeypatch.setattr(cpu, "model", lambda: cpu.Model("another", frozenset({"amx_tile"})))
    selftest.verdict(tmp_path / "cache", fake.command)
    assert len(fake.calls) == 2


@pytest.mark.parametrize("change", ["size", "time", "file"])
def test_another_library_gets_its_own_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    library = tmp_path / "lib"
    library.mkdir()
    (library / "libggml.so").write_text("a")
    provider = Provider("named", "ours", dict.fromkeys(("ggml", "llama"), library / "libllama.so") | {"x": library / "x"}, "")
    monkeypatch.setattr(selftest, "chosen", lambda: provider)
    fake = Fake(tmp_path)
    selftest.verdict(tmp_path / "cache", fake.command)
    stat = (library / "libggml.so").stat()
    match change:
        case "size":
            (library / "libggml.so").write_text("ab")
            os.utime(library / "libggml.so", ns=(stat.st_atime_ns, stat.st_mtime_ns))
        case "time":
            os.utime(library / "libggml.so", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000_000))
        case "file":
            (library / "libggml-cpu.so").write_text("")
    selftest.verdict(tmp_path / "cache", fake.command)
    assert len(fake.calls) == 2


def test_verdicts_that_nobody_asks_for_any_more_go(tmp_path: Path) -> None:
    """Each build of the library has its own; what a process that was killed has left goes as well."""
    fake, folder = Fake(tmp_path), tmp_path / "cache"
    folder.mkdir()
    ages = {f"selftest-{i:020x}.json": i for i in range(60)}
    ages |= {"selftest-abc.unfinished": 2, "selftest-def.unfinished": 0, "selftest-of mine.json": 99, "other.json": 99}
    for name, days in ages.items():
        (folder / name).touch()
        then = time.time() - days * cache.DAY_S
        os.utime(folder / name, (then, then))
    selftest.verdict(folder, fake.command)
    left = {path.name for path in folder.iterdir()}
    (own,) = left - {*ages}
    assert {"selftest-def.unfinished", "selftest-of mine.json", "other.json"} <= left
    assert "selftest-abc.unfinished" not in left
    assert left >= {name for name, days in ages.items() if days < 20 and name.endswith(".json")}
    assert not left & {name for name, days in ages.items() if 30 <= days < 60}
    os.utime(folder / own, (0, 0))
    selftest.verdict(folder, fake.command)
    assert len(fake.calls) == 1
    assert (folder / own).stat().st_mtime > 0


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    fake = Fake(tmp_path)
    (tmp_path / "file").write_text("")
    assert selftest.verdict(tmp_path / "file" / "below", fake.command).broken == []


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.home() == tmp_path / "puna"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.home() == tmp_path / ".cache" / "puna"


def test_what_is_not_used_is_named_in_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fake = Fake(tmp_path, crash=["FAST q4", "FAST q8"])
    with caplog.at_level(logging.WARNING):
        verdict = selftest.verdict(tmp_path / "cache", fake.command)
    (record,) = caplog.records
    assert "q4 in FAST: crash (SIGSEGV)" in record.getMessage()
    assert "q8 in FAST" in record.getMessage()
    assert not verdict.allows("FAST", "q4")
    assert verdict.allows("CPU", "q4")
    assert verdict.allows("CUDA0", "q4")
    verdict.require_plain(["f32", "q4", "q8"])


def test_broken_plain_memory_is_an_error_only_for_models_that_need_the_type() -> None:
    verdict = Verdict("9.9", ("CPU",), (Combination("CPU", "q4", "broken", "crash (SIGILL)"), Combination("CPU", "q8", "ok")))
    verdict.require_plain(["q8"])
    with pytest.raises(NativeLibraryError, match=r"q4 in CPU: crash \(SIGILL\)"):
        verdict.require_plain(["q8", "q4"])
