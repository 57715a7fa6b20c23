"""Write what is installed beside the package for shells and for man, from the commands and the table of settings.

``python -m tools.manual`` writes everything under share/, which installers put under the same names below their prefix.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer._completion_shared import get_completion_script

from puna import __version__
from puna.cli.app import app
from puna.cli.environment import environment_tables
from puna.cli.help import FILES, STATUS
from puna.cli.main import MAY_NEED_A_SERVER

ROOT = Path(__file__).resolve().parent.parent
COMPLETE_VARIABLE = "_PUNA_COMPLETE"

# Completion asks the command itself. A function that zsh loads from a file has to complete at once, not only define itself.
ZSH_FIRST_CALL = '\n[ "$funcstack[1]" = "_puna" ] && _puna_completion "$@"\n'

DESCRIPTION = (
    "Puna runs large language models on this machine. It serves Ollama's REST API, OpenAI's and Anthropic's on one address, "
    "and computes with an engine of its own.",
    f"Without a running server, the commands {', '.join(sorted(MAY_NEED_A_SERVER - {'ls'}))} start one for themselves and take "
    "it down when they end. On a terminal, a bare puna is a menu of models to talk with.",
)


def roff(text: str) -> str:
    """Text as it is, whatever it contains."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga").replace("^", "\\(ha")
    return re.sub(r"^\.", r"\\&.", escaped.replace("~", "\\(ti").replace("…", "..."), flags=re.MULTILINE)


def _paragraph(text: str) -> str:
    return roff(re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(text.replace("\b\n", ""))).strip())


def _tagged(rows: Iterator[tuple[str, str]] | list[tuple[str, str]] | tuple[tuple[str, str], ...]) -> str:
    return "".join(f".TP\n.B {roff(name)}\n{roff(meaning)}\n" for name, meaning in rows)


def _flag(parameter: Any) -> str:
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    takes_value = not getattr(parameter, "is_flag", False)
    return f"{names} {parameter.metavar or 'VALUE'}" if takes_value else names


def _options(command: Any) -> Iterator[tuple[str, str]]:
    for parameter in command.params:
        if parameter.param_type_name == "option" and not parameter.hidden:
            yield _flag(parameter), parameter.help or ""


def _synopsis(command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    shown = [p.metavar if p.required else f"[{p.metavar}]" for p in arguments]
    return " ".join([*(["[OPTIONS]"] if any(_options(command)) else []), *shown])


def commands() -> dict[str, Any]:
    """Those that are shown to people, by name; of a group its members, by both names."""
    group: Any = typer.main.get_command(app)
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        members = getattr(command, "commands", {})
        found |= {f"{name} {member}": inner for member, inner in members.items() if not inner.hidden}
        if not command.hidden and not members:
            found[name] = command
    return found


def man_page() -> str:
    group: Any = typer.main.get_command(app)
    parts = [
        f'.TH PUNA 1 "" "Puna {__version__}" "User Commands"\n',
        ".SH NAME\npuna \\- run large language models on this machine\n",
        ".SH SYNOPSIS\n.B puna\n.I COMMAND\n[OPTIONS] [ARGUMENTS]\n",
        ".SH DESCRIPTION\n" + "\n.PP\n".join(map(_paragraph, DESCRIPTION)) + "\n",
        ".SH OPTIONS\n" + _tagged(_options(group)),
        ".SH COMMANDS\n",
    ]
    for name, command in commands().items():
        parts.append(f".SS {roff(f'puna {name} {_synopsis(command)}'.strip())}\n{_paragraph(command.help)}\n")
        parts.append(_tagged(_options(command)))
    parts.append(".SH ENVIRONMENT\n")
    for title, rows in environment_tables().items():
        parts.append(f".SS {roff(title)}\n{_tagged(rows)}")
    parts.append(".SH FILES\n" + _tagged(FILES))
    parts.append(".SH EXIT STATUS\n" + _tagged(STATUS))
    return "".join(parts)


def completion(shell: str) -> str:
    script = get_completion_script(prog_name="puna", complete_var=COMPLETE_VARIABLE, shell=shell)
    return script.strip() + (ZSH_FIRST_CALL if shell == "zsh" else "\n")


def files() -> dict[str, str]:
    """What belongs under share/, by its path from the root of the project."""
    return {
        "share/man/man1/puna.1": man_page(),
        "share/bash-completion/completions/puna": completion("bash"),
        "share/zsh/site-functions/_puna": completion("zsh"),
        "share/fish/vendor_completions.d/puna.fish": completion("fish"),
    }


if __name__ == "__main__":
    for name, text in files().items():
        (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / name).write_text(text)
