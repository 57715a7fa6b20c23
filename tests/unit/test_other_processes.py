"""Tests that look at processes are not surprised by their end (tests/processes.py)."""

from __future__ import annotations

import subprocess
import sys

import psutil

from tests.patience import wait_until
from tests.processes import children, command_of, is_alive


def test_what_has_ended_is_not_alive_has_no_command_and_no_children() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        seen = psutil.Process(child.pid)
        assert is_alive(seen)
        wait_until(lambda: command_of(seen)[1:] == ["-c", "input()"])
        assert child.pid in {process.pid for process in children(psutil.Process())}
        child.kill()
        wait_until(lambda: seen.status() == psutil.STATUS_ZOMBIE)
        assert (is_alive(seen), command_of(seen), children(seen)) == (False, [], [])
    assert (is_alive(seen), command_of(seen), children(seen)) == (False, [], [])
