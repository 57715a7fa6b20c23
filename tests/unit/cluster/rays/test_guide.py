"""The commands of docs/guides/cluster.md, as far as they go without machines: nothing that they say is refused."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys

import pytest

from puna.cluster.rays.membership import RESOURCE
from tests.documents import ROOT, blocks
from tests.patience import PATIENCE_S

GUIDE = "docs/guides/cluster.md"
# Reads the options of commands as the programs themselves do, and runs none of them.
READ = """
import json, sys
import click
{program}
for words in json.loads(sys.argv[1]):
    context = click.Context(group)
    name, command, rest = group.resolve_command(context, words)
    command.make_context(name, rest, parent=context)
"""
PROGRAMS = {
    "ray": "from ray.scripts.scripts import cli as group",
    "serve": "from ray.serve.scripts import cli as group",
    "puna": "import typer; from puna.cli.app import app; group = typer.main.get_command(app)",
}


def commands() -> list[list[str]]:
    """Those of blocks, and those in the text that name a program."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / GUIDE).read_text(), flags=re.MULTILINE | re.DOTALL)
    inline = [found.replace("\n", " ") for found in re.findall(r"`([^`]+)`", text)]
    written = [line for block in blocks(GUIDE) for line in block.text.splitlines() if line]
    found = [shlex.split(line, comments=True) for line in [*written, *inline]]
    named = [[word for word in words if not re.match(r"[A-Z_]+=", word)] for words in found]
    return [words for words in named if len(words) > 2 and words[0] in PROGRAMS]  # shorter ones only name a command


def test_the_commands_are_found() -> None:
    found = [" ".join(words) for words in commands()]
    assert "ray start --head --node-ip-address=10.0.0.1 --port=6379 --include-dashboard=false" in found
    assert "ray get-auth-token --generate" in found
    assert "serve run puna.cluster:app" in found
    assert "puna serve --ray" in found


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_programs_know_the_commands_and_their_options(program: str) -> None:
    given = [words[1:] for words in commands() if words[0] == program]
    given = [[*words[:-1], "--memory=1000000000"] if words[-1] == "--memory" else words for words in given]  # or another number
    read = READ.format(program=PROGRAMS[program])
    command = [sys.executable, "-c", read, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stderr.partition("Traceback")[2]) == (0, "")


def test_the_resource_that_chooses_machines_is_the_one_that_is_looked_for() -> None:
    assert f"`--resources '{{\"{RESOURCE}\": 1}}'`" in (ROOT / GUIDE).read_text()
