"""Model files for the fake runner, and what it noted while it ran."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE_S

FAKE_RUNNER = Path(__file__).with_name("fake_runner.py")


def write_script(folder: Path, name: str = "model", **script: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps(script))
    return path


def fake_command(model_path: Path) -> list[str]:
    return [sys.executable, "-S", "-E", str(FAKE_RUNNER), "--channel", "--model", str(model_path)]


def events(model_path: Path) -> list[list[Any]]:
    path = Path(f"{model_path}.events")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def requests_to(model_path: Path, endpoint: str) -> list[dict[str, Any]]:
    return [event[1] for event in events(model_path) if event[0] == endpoint]


async def wait_for_event(model_path: Path, kind: str, *, count: int = 1) -> list[Any]:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        found = [event for event in events(model_path) if event[0] == kind]
        if len(found) >= count:
            return found[count - 1]
        await asyncio.sleep(0.01)
    raise AssertionError(f"no {kind!r} among {events(model_path)}")
