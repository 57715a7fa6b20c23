"""Ctrl-C while a command still imports: it ends, and says nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.patience import PATIENCE_S, wait_until

from puna.cli.main import main

# The interrupt comes as a module is looked for.
SCRIPT = """
import os, signal, sys
moment = sys.argv[1]
class Moment:
    def find_spec(self, name, path=None, target=None):
        if name == moment:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Moment())
sys.argv = ["puna", "run", "none", "hi"]
from puna.__main__ import main
main()
"""


@pytest.mark.parametrize("moment", ["puna.cli.main", "puna.settings", "puna.cli.app", "typer", "puna.cli.run", "httpx"])
def test_an_interrupt_while_a_command_is_imported(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_HOST", "127.0.0.1:1")
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("PUNA_EARLY", str(tmp_path))
    command = [sys.executable, "-c", SCRIPT, moment]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S / 2)
    assert done.returncode in (130, -signal.SIGINT)
    assert "Traceback" not in done.stderr
    assert "ignored" not in done.stderr
    wait_until(lambda: not any(_is_ours(process, tmp_path) for process in psutil.process_iter()))


def test_an_interrupt_while_the_commands_are_made(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.argv", ["puna", "--help"])
    monkeypatch.setattr("puna.cli.app.app", interrupted)
    with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
        main()
    assert getattr(ended.value, "code", "none") == 130
    assert capsys.readouterr() == ("", "")


def _is_ours(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.environ().get("PUNA_EARLY") == str(folder)
    except psutil.Error:
        return False
