"""The way of one request through the rooms of the server, as its functions are called."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import puna.server
from tests.patience import PATIENCE_S
from tests.unit.server.apis.test_native import HI
from tests.unit.server.live import Live

ROOT = Path(puna.server.__file__).parent
STAGES = {"checking", "prompting", "placing", "answering"}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/api/chat", {"messages": HI}),
    "generate": ("/api/generate", {"prompt": "Hi"}),
    "chat completions": ("/v1/chat/completions", {"messages": HI}),
    "completions": ("/v1/completions", {"prompt": "Hi"}),
    "responses": ("/v1/responses", {"input": "Hi"}),
    "messages": ("/v1/messages", {"messages": HI, "max_tokens": 5}),
}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    server = Live(tmp_path_factory.mktemp("pipeline"))
    server.add("hello")
    with server.running():
        yield server


def rooms_entered(live: Live, ask: Callable[[], object]) -> list[str]:
    """The rooms whose functions the server's thread has called meanwhile, in order."""
    found: list[str] = []
    entered: dict[int, FrameType] = {}  # kept, so that no later one has the number of one that has gone

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event != "call" or id(frame) in entered or not path.is_relative_to(ROOT):
            return  # a coroutine that goes on is entered each time, and was visited once
        entered[id(frame)] = frame
        room, *module = path.relative_to(ROOT).parts
        if module:
            found.append(room)

    async def trace(function: Callable[..., None] | None) -> None:
        sys.setprofile(function)

    def in_server(function: Callable[..., None] | None) -> None:
        asyncio.run_coroutine_threadsafe(trace(function), live.loop).result(PATIENCE_S)

    in_server(note)
    try:
        ask()
    finally:
        in_server(None)
    return [room for room, _ in groupby(found)]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "body"), REQUESTS.values(), ids=REQUESTS)
def test_each_room_is_visited_once_and_in_order(live: Live, path: str, body: dict[str, Any], stream: bool) -> None:
    def ask() -> None:
        assert live.post(path, {"model": "hello", "stream": stream, **body}).status_code == 200

    ask()  # now the model is loaded, and the template's process runs
    entered = rooms_entered(live, ask)
    stages = [room for room, _ in groupby(room for room in entered if room in STAGES)]
    assert stages == ["checking", "prompting", "placing", "answering", "placing"], "at last the place is given back"
    first = entered.index("checking")
    last = len(entered) - entered[::-1].index("answering")
    assert set(entered[:first]) == {"process", "http", "apis"}
    assert entered.index("http") < entered.index("apis")
    assert {"apis", "http"} <= set(entered[last:]), "who has read the request shapes the answer"
