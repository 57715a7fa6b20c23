from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE_S

PROGRAM = """
import time
from puna.cluster.rays.actor import NodeActor
actor = NodeActor("a node", "203.0.113.1", "1", 0, 1.0)
try:
    actor.place()
except OSError as error:
    print("said", flush=True)
time.sleep(60)
print("stays")
"""


def test_a_node_that_cannot_be_opened_says_why_and_makes_room_for_the_next(tmp_path: Path) -> None:
    """Ray keeps an actor that is there, and hands it out under its name, whatever it can do."""
    environ = {"OLLAMA_MODELS": str(tmp_path), "HOME": str(tmp_path), "PATH": "", "PUNA_WARM_SPARE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environ, timeout=PATIENCE_S + 60, check=False
    )
    assert done.stdout == "said\n"
    assert done.returncode == 1
    assert "the node cannot be opened" in done.stderr
