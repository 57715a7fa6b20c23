"""Where ``puna`` begins and how errors end it.

A command that may need a server of its own gets it started before anything else: it comes up on another core while this
process imports the command line.
"""

from __future__ import annotations

import signal
import sys

from puna.cli import connect
from puna.cli.completion import complete, is_completing
from puna.cli.terminal import accept_all_text, on_terminal
from puna.errors import PunaError

_INTERRUPTED = 130
MAY_NEED_A_SERVER = frozenset({"run", "pull", "push", "signin", "signout", "list", "ls", "show", "create", "rm", "cp"})


def main() -> None:
    arguments = sys.argv[1:]
    accept_all_text()
    try:
        if _will_need_a_server(arguments):
            connect.start_early(expects_model=arguments[:1] in ([], ["run"]))
        from puna.cli.app import app

        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # until here an interrupt simply ends this process
            signal.signal(signal.SIGINT, signal.default_int_handler)
        complete(lambda: app(args=_written_out(arguments), prog_name="puna"))
    except KeyboardInterrupt:  # while typer makes its commands; in one it is typer's own
        sys.exit(_INTERRUPTED)
    except (PunaError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(1)
    finally:
        connect.discard_early()


def _will_need_a_server(arguments: list[str]) -> bool:
    """Without arguments, a person on a terminal is shown what models there are."""
    if is_completing():
        return False
    if not arguments:
        return on_terminal()
    return arguments[0] in MAY_NEED_A_SERVER and not {"-h", "--help"} & set(arguments)


def _written_out(arguments: list[str]) -> list[str]:
    """The arguments, with a bare ``--think`` of ``run`` written out: what follows it is never its value."""
    if arguments[:1] != ["run"]:
        return arguments
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return ["--think=true" if word == "--think" else word for word in arguments[:end]] + arguments[end:]
