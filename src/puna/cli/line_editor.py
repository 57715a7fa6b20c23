"""Line editing, keys and history of the interactive prompt, on prompt_toolkit.

The history file is Ollama's: one entry per line, oldest first, the last 100.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import create_app_session, get_app
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output.vt100 import Vt100_Output

from puna.cli.terminal import can_draw

_HISTORY_ENTRIES = 100
_TAB = " " * 8
_PLACEHOLDER, _PLACEHOLDER_MORE = "Send a message (/? for help)", 'Use """ to end multi-line input'


class LineHistory(History):
    """Entries in memory and, while *enabled*, in a file."""

    def __init__(self, path: Path, *, enabled: bool) -> None:
        super().__init__()
        self._path = path
        self.enabled = enabled

    def load_history_strings(self) -> Iterable[str]:
        return reversed(self._stored()) if self.enabled else []

    def append_string(self, string: str) -> None:
        if self.enabled:
            super().append_string(string)

    def store_string(self, string: str) -> None:
        lines = [*self._stored(), *(line for line in string.splitlines() if line.strip())]
        with suppress(OSError):  # a full disk or a read-only home must not end a conversation
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines[-_HISTORY_ENTRIES:]))

    def _stored(self) -> list[str]:
        try:
            return self._path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []


class _Plain(Vt100_Output):
    """A terminal that understands no escape sequences, not even those that most dumb ones ignore."""

    def show_cursor(self) -> None:
        pass

    def reset_cursor_key_mode(self) -> None:
        pass


class LineEditor:
    """Reads lines from the terminal.

    Errors: KeyboardInterrupt on Ctrl-C, EOFError on Ctrl-D at an empty line.
    """

    def __init__(self, history_path: Path, *, keep_history: bool) -> None:
        self._history = LineHistory(history_path, enabled=keep_history)
        if editor := os.environ.get("OLLAMA_EDITOR"):
            os.environ["VISUAL"] = editor  # where prompt_toolkit looks first
        plain = None if can_draw(sys.stdout) else _Plain.from_pty(sys.stdout, term="dumb")
        with create_app_session(output=plain):
            self._session: PromptSession[str] = PromptSession(
                history=self._history,
                key_bindings=_key_bindings(),
                enable_suspend=True,
                tempfile_suffix=".md",
            )

    @property
    def interrupted_text(self) -> str:
        """What stood in the line when Ctrl-C dropped it."""
        return self._session.default_buffer.text

    def set_history(self, enabled: bool) -> None:
        self._history.enabled = enabled

    def read_line(self, more: bool) -> str:
        """One line; *more* marks it as the continuation of an entry."""
        placeholder = _PLACEHOLDER_MORE if more else _PLACEHOLDER
        return self._session.prompt(
            "... " if more else ">>> ",
            placeholder=lambda: FormattedText([] if get_app().is_done else [("ansibrightblack", placeholder)]),
        )


def _key_bindings() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("c-j")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("tab")
    def _tab(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text(_TAB)

    @keys.add("c-g")
    def _editor(event: KeyPressEvent) -> None:
        event.current_buffer.open_in_editor()

    return keys
