"""``puna help``: the topics, and one of them: a command, or what no command's own help has room for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from puna.cli.environment import environment_tables
from puna.cli.table import table
from puna.errors import NotFound

FILES = (
    ("~/.ollama/models", "models: manifests and blobs, in Ollama's layout; OLLAMA_MODELS chooses another place"),
    ("~/.ollama/history", "what was entered in interactive sessions; OLLAMA_NOHISTORY=1 keeps none"),
    ("~/.cache/puna", "what was found out about this machine, and what was compiled for it; XDG_CACHE_HOME moves it"),
)
STATUS = (
    ("0", "all went well"),
    ("1", "an error, printed on standard error"),
    ("2", "a command line that cannot be understood"),
    ("130", "interrupted"),
)


def _environment() -> str:
    return "\n".join(f"{title}:\n{table(rows, indent='  ')}" for title, rows in environment_tables().items())


TOPICS: dict[str, tuple[str, Callable[[], str]]] = {
    "environment": ("every setting, as a variable of the environment", _environment),
    "files": ("what Puna keeps where", lambda: table(FILES)),
    "status": ("what the exit status of a command says", lambda: table(STATUS)),
}


def help_topic(
    context: typer.Context,
    topic: Annotated[
        str, typer.Argument(metavar="TOPIC", help="A command, or one of the listed topics.", show_default=False)
    ] = "",
) -> None:
    """Explain a command or a topic; without one, list them."""
    assert context.parent is not None
    group: Any = context.parent.command
    if topic in TOPICS:
        print(TOPICS[topic][1]().rstrip())
    elif topic in group.commands:
        command = group.commands[topic]
        print(command.get_help(typer.Context(command, info_name=topic, parent=context.parent)))
    elif topic:
        raise NotFound(f"no help on {topic!r}: `puna help` lists the topics")
    else:
        named = [(name, command.get_short_help_str(80)) for name, command in group.commands.items() if not command.hidden]
        listed = [(name, summary) for name, (summary, _) in TOPICS.items()]
        print(f"Commands:\n{table(named, indent='  ')}\nTopics:\n{table(listed, indent='  ')}".rstrip())
