"""``puna native build``: have the tensor library compiled for this processor, by a process of its own.

Puna runs on a prebuilt library until then. What is compiled, and where it is kept, puna.native.build knows.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import typer

COMMAND = (sys.executable, "-P", "-m", "puna.native.build")

native = typer.Typer(help="The tensor library that computes: prebuilt, or compiled for this processor.", no_args_is_help=True)


@native.callback()
def _native() -> None:
    """The tensor library that computes: prebuilt, or compiled for this processor."""


@native.command("build")
def build(
    again: Annotated[bool, typer.Option("--again", help="Compile even if that was done before.")] = False,
    background: Annotated[bool, typer.Option("--background", help="Return at once; `puna doctor` tells how far it is.")] = False,
) -> None:
    """Compile the tensor library for this processor, once, in about four minutes; the next start uses it."""
    command = [*COMMAND, "--again"] if again else [*COMMAND]
    if not background:
        raise typer.Exit(subprocess.run(command, check=False).returncode)
    subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    print("Compiling in the background; `puna doctor` tells how far it is.")
