"""The interactive session of ``puna run``: read an entry, answer it, again."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, cast

from puna.api.client import Client
from puna.cli.answer import AnswerWriter, timings, write_events
from puna.cli.entry import read_entry
from puna.cli.image_paths import entered_for
from puna.cli.progress import Spinner
from puna.cli.session import Message, Session
from puna.cli.slash_commands import LeaveSession, SlashCommands
from puna.cli.terminal import printable
from puna.errors import PunaError

_LEAVE_HINT = "\nUse Ctrl + d or /bye to exit."


def converse(client: Client, session: Session, *, history: list[Message], keep_history: bool) -> None:
    """Talk until the person leaves, also by two Ctrl-C with nothing between them.

    *history* is the conversation that the model brings along.
    """
    from puna.cli.line_editor import LineEditor

    for message in history:
        _show_message(message)
    editor = LineEditor(Path.home() / ".ollama" / "history", keep_history=keep_history)
    commands = SlashCommands(client, session, editor.set_history)
    was_interrupted = False
    while True:
        try:
            entry = read_entry(editor.read_line)
            was_interrupted = False
            if entry.is_command:
                commands.run(entry.text)
            elif entry.text:
                was_interrupted = _answer(client, session, entry.text)
        except KeyboardInterrupt:
            if was_interrupted and not editor.interrupted_text:
                return
            was_interrupted = True
            print(_LEAVE_HINT)
        except (EOFError, LeaveSession):
            return
        except PunaError as error:
            print(f"Error: {error}", file=sys.stderr)


def _show_message(message: Message) -> None:
    text = printable(str(message.get("content", "")))
    print(f">>> {text}" if message.get("role") == "user" else f"{text}\n")


def _answer(client: Client, session: Session, text: str) -> bool:
    """Send the conversation with *text* at its end and write the answer; an error takes *text* back.

    Returns whether the answer was interrupted.
    """
    entered = entered_for(client, session.model, text, session.projector)
    session.messages.append({"role": "user", "content": entered.text} | ({"images": entered.images} if entered.images else {}))
    writer = AnswerWriter(sys.stdout, word_wrap=session.word_wrap, hide_thinking=session.hide_thinking)
    content: list[str] = []
    final: Mapping[str, Any] = {}
    is_interrupted = False
    try:
        # a closed stream cancels the work on the server
        with Spinner() as spinner, closing(cast("Any", client.chat(session.chat_request()))) as events:
            final = write_events(events, writer, spinner, content.append)
    except KeyboardInterrupt:
        is_interrupted = True  # what has been said stays part of the conversation
    except PunaError:
        session.messages.pop()
        raise
    writer.finish()
    if content:
        session.messages.append({"role": "assistant", "content": "".join(content)})
    if session.verbose and final:
        print(timings(final), file=sys.stderr, end="", flush=True)
    return is_interrupted
