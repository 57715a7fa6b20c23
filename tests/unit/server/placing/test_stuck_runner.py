"""A runner that lives but gets nowhere: its requests are told, it is replaced, other models do not notice."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE_S
from tests.unit.server.live import Live


def test_a_stuck_runner_is_replaced_and_others_do_not_notice(tmp_path: Path) -> None:
    live = Live(tmp_path, stall_timeout=0.4)
    script = live.add("stuck", hang_at_piece=1, piece_delay_s=0.01)
    live.add("fine", n_pieces=40, piece_delay_s=0.05)
    replies: list[dict[str, Any]] = []
    with live.running():
        other = threading.Thread(
            target=lambda: replies.append(live.post("/api/generate", {"model": "fine", "prompt": "x", "stream": False}).json())
        )
        other.start()
        answer = live.post("/api/generate", {"model": "stuck", "prompt": "x", "stream": False})
        assert answer.status_code == 500
        assert "made no progress for 0.4 s with 1 requests" in answer.json()["error"]
        script.write_text("{}")
        again = live.post("/api/generate", {"model": "stuck", "prompt": "x", "stream": False})
        assert again.json()["response"] == "Hello world"
        other.join(PATIENCE_S)
    assert replies[0]["response"] == "x " * 40
