"""What each kind of process imports before it is of use: time is this machine's, the number of modules is the program's.

A budget is raised only by who says in the commit what the new modules are worth at every start.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# Before the first answer: modules in all, and those that must not be among them.
BUDGETS = {
    "puna --help": (
        "import puna.cli.main, puna.cli.app",
        205,
        ("numpy", "httpx", "rich", "prompt_toolkit", "pydantic", "puna.server"),
    ),
    "puna run": ("import puna.cli.main, puna.cli.app, puna.api.client", 205, ("numpy", "rich", "pydantic", "puna.server")),
    "a private server, before it starts others": (
        "import puna.server.process.private",
        250,
        ("numpy", "typer", "click", "pydantic", "starlette", "uvicorn", "puna.cli", "puna.store", "puna.server.app"),
    ),
    "puna serve": (
        "import puna.server.process.private, puna.server.process.serve",
        600,
        ("numpy", "jinja2", "rich", "httpcore", "puna.native", "puna.runner", "puna.api.openai", "puna.api.anthropic"),
    ),
    "puna runner": (
        "import puna.runner.process.main; from puna.runner.process.spare import prepare; prepare()",
        470,
        ("jinja2", "pydantic", "starlette", "uvicorn", "puna.server", "puna.store", "puna.native.build"),
    ),
    "puna render": ("import puna.prompt.worker", 215, ("numpy", "pydantic", "puna.server", "puna.native")),
    "puna decode": ("import puna.vision.images.worker", 175, ("numpy", "pydantic", "puna.server", "puna.native", "puna.gguf")),
    "puna discover": ("import puna.runner.process.discover", 175, ("numpy", "pydantic", "puna.server")),
}


@pytest.mark.parametrize("process", BUDGETS)
def test_a_process_imports_what_it_needs_and_no_more(process: str) -> None:
    program, budget, unwanted = BUDGETS[process]
    program += "\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    modules: list[str] = json.loads(done.stdout)
    assert [name for name in modules if name in unwanted or name.startswith(tuple(f"{one}." for one in unwanted))] == []
    assert len(modules) <= budget
