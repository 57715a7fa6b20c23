"""What each kind of process imports before it is of use: time is this machine's, the number of modules is the program's.

A budget is raised only by who says in the commit what the new modules are worth at every start.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from puna.__main__ import _OBJECTS_PER_COLLECTION
from tests.tiny import write_llama

# Before the first answer: modules in all, and those that must not be among them.
BUDGETS = {
    "puna --help": (
        "import puna.cli.main, puna.cli.app",
        205,
        ("numpy", "httpx", "rich", "prompt_toolkit", "pydantic", "puna.server"),
    ),
    "puna help, its arguments read": (
        "import contextlib, io; from puna.cli.app import app\n"
        "with contextlib.redirect_stdout(io.StringIO()): app(['help', 'environment'], standalone_mode=False)",
        210,
        ("numpy", "httpx", "rich", "prompt_toolkit", "pydantic", "puna.server"),
    ),
    "puna run": ("import puna.cli.main, puna.cli.app, puna.api.client", 205, ("numpy", "rich", "pydantic", "puna.server")),
    "a private server, before it starts others": (
        "import puna.server.process.private",
        118,
        ("asyncio", "argparse", "msgspec", "psutil", "uvloop", "typer", "click", "puna.cli", "puna.store", "puna.wire"),
    ),
    "puna serve": (
        "import puna.server.process.private, puna.server.process.serve",
        570,
        (
            "numpy",
            "jinja2",
            "rich",
            "httpcore",
            "prometheus_client",
            "puna.native",
            "puna.runner",
            "puna.api.openai",
            "puna.api.anthropic",
        ),
    ),
    "puna runner": (
        "import puna.runner.process.main; from puna.runner.process.spare import prepare; prepare()",
        470,
        ("numpy.random", "jinja2", "pydantic", "starlette", "uvicorn", "puna.server", "puna.store", "puna.native.build"),
    ),
    "puna render": ("import puna.prompt.worker", 215, ("numpy", "pydantic", "puna.server", "puna.native")),
    "puna decode": ("import puna.vision.images.worker", 175, ("numpy", "pydantic", "puna.server", "puna.native", "puna.gguf")),
    "puna discover": ("import puna.runner.process.discover", 182, ("numpy", "pydantic", "puna.server")),
}


# What a server does with the first request until it needs a runner.
_FIRST_REQUEST = """
import asyncio, sys
from puna.api.generate import GenerateRequest
from puna.server.checking.check import check
from puna.server.checking.request import InferenceRequest
from puna.server.http.caller import Caller
from puna.server.prompting.plan import plan
from puna.settings import load
from puna.store.store import Store
async def first():
    caller = Caller(is_local=True, may_manage=True, salt="", request_id="", began_ns=0)
    native = GenerateRequest(model=sys.argv[1], prompt="hi")
    planned = await plan(await check(InferenceRequest(caller, native), Store(sys.argv[2]), load()))
    assert planned.has_foreign_template
asyncio.run(first())
"""


def modules_of(program: str, *arguments: object) -> list[str]:
    program += "\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found: list[str] = json.loads(done.stdout)
    return found


def among(modules: list[str], unwanted: tuple[str, ...]) -> list[str]:
    return [name for name in modules if name in unwanted or name.startswith(tuple(f"{one}." for one in unwanted))]


@pytest.mark.parametrize("process", BUDGETS)
def test_a_process_imports_what_it_needs_and_no_more(process: str) -> None:
    program, budget, unwanted = BUDGETS[process]
    modules = modules_of(program)
    assert among(modules, unwanted) == []
    assert len(modules) <= budget


@pytest.mark.parametrize("process", BUDGETS)
def test_nothing_is_looked_for_among_what_is_imported(process: str) -> None:
    """Garbage: there is none, and to look for it takes milliseconds of every start."""
    program = f"""
import gc
gc.set_threshold({_OBJECTS_PER_COLLECTION})
before = [found["collections"] for found in gc.get_stats()]
{BUDGETS[process][0]}
assert [found["collections"] for found in gc.get_stats()] == before
"""
    modules_of(program)


def test_what_a_server_reads_of_a_model_needs_no_arrays(tmp_path: Path) -> None:
    """Facts of a file with a small vocabulary are found sooner than numpy is imported."""
    modules = modules_of(_FIRST_REQUEST, write_llama(tmp_path / "m.gguf"), tmp_path / "models")
    assert among(modules, ("numpy", "jinja2", "puna.native")) == []
