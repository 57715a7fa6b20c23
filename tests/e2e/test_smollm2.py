"""A real model through every door: it knows the capital of France, alone and in company."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ollama
import openai
import pytest

from puna.store.store import Store
from tests.conftest import STARTER
from tests.e2e.test_first_light import Server, serving
from tests.patience import PATIENCE_S

QUESTION = "What is the capital of France? Answer in one short sentence."
OTHERS = [
    "Write two sentences about a whale.",
    "Explain photosynthesis in one paragraph.",
    "List three planets.",
    "Who was Napoleon?",
    "How do birds fly?",
    "Tell me a joke.",
    "What is a prime number?",
]


@pytest.fixture(scope="module")
def server(starter_store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environ = {"OLLAMA_MODELS": str(starter_store.blobs.folder.parent), "OLLAMA_NUM_PARALLEL": "8"}
    with serving(tmp_path_factory.mktemp("server"), **environ) as running:
        yield running


def test_api_chat(server: Server) -> None:
    reply = server.chat(STARTER, QUESTION, options={"temperature": 0})
    assert "Paris" in reply["message"]["content"]
    assert reply["done_reason"] == "stop"


def test_ollama_client(server: Server) -> None:
    with ollama.Client(server.url) as client:
        reply = client.chat(STARTER, [{"role": "user", "content": QUESTION}], options={"temperature": 0})
    assert "Paris" in (reply.message.content or "")


def test_openai_client(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        reply = client.chat.completions.create(model=STARTER, messages=[{"role": "user", "content": QUESTION}], temperature=0)
    assert "Paris" in (reply.choices[0].message.content or "")


def test_command_line(starter_store: Store, tmp_path: Path) -> None:
    environ = {
        **os.environ,
        "OLLAMA_MODELS": str(starter_store.blobs.folder.parent),
        "OLLAMA_HOST": "127.0.0.1:1",
        "HOME": str(tmp_path),
    }
    command = [sys.executable, "-m", "puna", "run", STARTER, QUESTION]
    result = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL, check=True
    )
    assert "Paris" in result.stdout


def test_eight_chats_at_once_say_what_each_says_alone(server: Server) -> None:
    """Down to the last digit of every probability: no row's sums depend on what is computed with it."""

    def answer(question: str) -> list[dict[str, Any]]:
        wanted: Any = {"logprobs": True, "top_logprobs": 5}
        reply = server.chat(STARTER, question, options={"temperature": 0, "num_predict": 60}, **wanted)
        return list(reply["logprobs"])

    questions = [QUESTION, *OTHERS]
    alone = [answer(question) for question in questions]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(answer, questions))
    assert together == alone
