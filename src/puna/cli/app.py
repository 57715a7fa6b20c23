"""The command ``puna`` as typer sees it: what its subcommands are called, and the help.

Heavy imports (HTTP, bars, line editing, the server) wait inside the commands until they are needed.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from puna import __version__
from puna.cli.account import signin, signout
from puna.cli.connect import connected
from puna.cli.cp import cp
from puna.cli.create import create
from puna.cli.environment import environment_help
from puna.cli.help import help_topic
from puna.cli.listing import list_models
from puna.cli.native import native
from puna.cli.options import JsonFlag
from puna.cli.ps import ps
from puna.cli.pull import pull
from puna.cli.push import push
from puna.cli.rm import rm
from puna.cli.rpc_worker import rpc_worker
from puna.cli.run import run
from puna.cli.search import search
from puna.cli.serve import serve
from puna.cli.show import show
from puna.cli.stop import stop
from puna.cli.terminal import on_terminal
from puna.cli.top import top
from puna.errors import ServerUnreachable

app = typer.Typer(
    name="puna",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog=environment_help(),
)


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        with connected(private=False) as client:
            version = client.version()
    except ServerUnreachable:
        print("Warning: could not connect to a running Puna instance", file=sys.stderr)
        print(f"puna version is {__version__}")
    else:
        print(f"puna version is {version}")
        if version != __version__:
            print(f"Warning: client version is {__version__}", file=sys.stderr)
    raise typer.Exit


@app.callback(invoke_without_command=True)
def _puna(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", "-v", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run large language models on this machine."""
    if context.invoked_subcommand is not None:
        return
    if not on_terminal():
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(2)
    from puna.cli.menu import menu

    menu(lambda: print(context.get_help()))


def doctor(json: JsonFlag = False) -> None:
    """Check this installation: libraries, processor, memory, GPUs, store."""
    from puna.cli.doctor import doctor as check

    check(json=json)


_SERVE_EPILOG = environment_help()
app.command("serve", epilog=_SERVE_EPILOG)(serve)
app.command("start", hidden=True, epilog=_SERVE_EPILOG)(serve)
app.command("run")(run)
app.command("pull")(pull)
app.command("push")(push)
app.command("search")(search)
app.command("signin")(signin)
app.command("login", hidden=True)(signin)
app.command("signout")(signout)
app.command("logout", hidden=True)(signout)
app.command("create")(create)
app.command("list")(list_models)
app.command("ls", hidden=True)(list_models)
app.command("ps")(ps)
app.command("top")(top)
app.command("show")(show)
app.command("stop")(stop)
app.command("cp")(cp)
app.command("rm")(rm)
app.command("doctor")(doctor)
app.command("rpc-worker")(rpc_worker)
app.command("help")(help_topic)
app.add_typer(native, name="native")
