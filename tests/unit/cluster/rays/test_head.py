from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own: Ray changes much of the one that imports it.
PROGRAM = """
import asyncio, sys
from types import SimpleNamespace
import httpx
from puna.cluster.rays.joining import ray_module
ray_module()
from ray.serve import context
context._get_global_client = lambda: SimpleNamespace(http_config=SimpleNamespace(host=sys.argv[1], port=8000))
from puna.cluster.rays.head import head_app

async def ask():
    async with httpx.AsyncClient(transport=httpx.ASGITransport(head_app())) as client:
        for headers in ({}, {"authorization": "Bearer secret"}):
            print((await client.get("http://models.example:8000/api/version", headers=headers)).status_code)
asyncio.run(ask())
"""


def statuses(folder: Path, host: str, **environ: str) -> str:
    """Of requests that come from another machine to Ray's proxy: without a key, and with one. Or the error."""
    environ = {"OLLAMA_MODELS": str(folder), "HOME": str(folder), "PATH": "", **environ}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, host], capture_output=True, text=True, env=environ, timeout=120, check=False
    )
    return done.stdout if done.returncode == 0 else done.stderr.splitlines()[-1]


@pytest.mark.parametrize("ollama_host", ["127.0.0.1", "0.0.0.0"])
def test_a_proxy_that_other_machines_reach_wants_keys_whatever_the_server_would_listen_on(
    tmp_path: Path, ollama_host: str
) -> None:
    without = statuses(tmp_path, "0.0.0.0", OLLAMA_HOST=ollama_host)
    assert "Ray Serve's proxy, which listens on 0.0.0.0, would let other machines use this server without a key" in without
    assert statuses(tmp_path, "0.0.0.0", OLLAMA_HOST=ollama_host, PUNA_API_KEYS="secret").split() == ["401", "200"]


def test_a_proxy_on_loopback_is_for_this_machine_alone(tmp_path: Path) -> None:
    assert statuses(tmp_path, "127.0.0.1").split() == ["403", "403"]
