"""A server that is told to stop while it still starts: it stops in good order, whenever that is."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.patience import PATIENCE_S
from tests.ports import kept_free

# The signal comes at the very moment: as that is logged, or before or after the server's start-up.
SCRIPT = """
import logging, os, sys
moment, number = sys.argv[1], int(sys.argv[2])
def signal_if(is_due):
    if is_due:
        os.kill(os.getpid(), number)
    return True
logging.getLogger("puna.server.process.serve").addFilter(
    lambda record: signal_if(moment == "listening" and "Listening on" in record.getMessage())
)
import uvicorn
real = uvicorn.Server.startup
async def startup(self, sockets=None):
    signal_if(moment == "before")
    await real(self, sockets)
    signal_if(moment == "after")
uvicorn.Server.startup = startup
sys.argv = ["puna", "serve"]
from puna.cli.main import main
main()
"""


@pytest.mark.parametrize("moment", ["listening", "before", "after"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda item: item.name)
def test_a_signal_before_the_first_answer(
    moment: str, number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("PUNA_EARLY", str(tmp_path))
    command = [sys.executable, "-c", SCRIPT, moment, str(int(number))]
    with kept_free() as port:
        monkeypatch.setenv("OLLAMA_HOST", f"127.0.0.1:{port}")
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S / 2)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "was never" not in done.stderr
    mine = [p.pid for p in psutil.process_iter() if _environment(p).get("PUNA_EARLY") == str(tmp_path)]
    assert mine == []


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}
