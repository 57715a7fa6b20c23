"""Notices a runner that lives but is of no use: requests are being computed, yet no step ends; or its model is gone."""

from __future__ import annotations

import asyncio

from puna.errors import RunnerDied
from puna.llm.runner import REQUEST_TIMEOUT_S, Runner

_POLLS_PER_TIMEOUT = 4
_MAX_POLL_S = 5.0
_LEAST_ANSWER_S = 10.0  # on a machine with much to do, a process may need seconds to say how it is


async def until_stalled(runner: Runner, stall_timeout_s: float) -> str:
    """Wait until the runner is stuck, and say how; returns "" when its process ends first."""
    clock = asyncio.get_running_loop().time
    n_steps, since = -1, clock()
    answer_s = min(max(stall_timeout_s, _LEAST_ANSWER_S), REQUEST_TIMEOUT_S)
    while True:
        await asyncio.sleep(min(stall_timeout_s / _POLLS_PER_TIMEOUT, _MAX_POLL_S))
        try:
            health = await runner.health(answer_s)
        except RunnerDied as error:
            return str(error) if runner.is_alive else ""
        if health.status != "ready":
            return f"the runner has lost its model: it is {health.status}{f', {health.error}' if health.error else ''}"
        if not (health.active or health.waiting) or health.steps != n_steps:
            n_steps, since = health.steps, clock()
        elif clock() - since > stall_timeout_s:
            n_requests = f"{health.active} requests at work" + (f" and {health.waiting} waiting" if health.waiting else "")
            return f"the runner made no progress for {stall_timeout_s:g} s with {n_requests}"
