"""The commands of the interactive session: lines that begin with a slash.

Each works on the session and the client it is given and prints what it has to say; none reads input.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from puna.api.client import Client
from puna.cli.listing import models_table
from puna.cli.model_card import model_card, parameter_rows
from puna.cli.options import model_reference
from puna.cli.progress import Spinner, display
from puna.cli.session import Session
from puna.cli.table import table
from puna.cli.terminal import printable
from puna.cli.think import LEVELS
from puna.errors import NotFound, PunaError
from puna.store.models import parameters

_HELP = """\
Available Commands:
  /set            Set session variables
  /show           Show model information
  /list           List models
  /load <model>   Load a model and start anew
  /save <model>   Save the model with this session's settings and messages
  /clear          Clear session context
  /bye            Exit
  /?, /help       Help for a command
  /? shortcuts    Help for keyboard shortcuts

Use \"\"\" to begin and end a message of several lines.
"""

_HELP_SET = """\
Available Commands:
  /set parameter ...     Set a parameter
  /set system <string>   Set system message
  /set history           Enable history
  /set nohistory         Disable history
  /set wordwrap          Enable wordwrap
  /set nowordwrap        Disable wordwrap
  /set format json       Enable JSON mode
  /set noformat          Disable formatting
  /set verbose           Show timings after each answer
  /set quiet             Show no timings
  /set think [level]     Enable thinking
  /set nothink           Disable thinking
"""

_HELP_SHOW = """\
Available Commands:
  /show info         Show details for this model
  /show license      Show model license
  /show modelfile    Show Modelfile for this model
  /show parameters   Show parameters for this model
  /show system       Show system message
  /show template     Show prompt template
"""

_HELP_SHORTCUTS = """\
Available keyboard shortcuts:
  Ctrl + a            Move to the beginning of the line (Home)
  Ctrl + e            Move to the end of the line (End)
   Alt + b            Move back (left) one word
   Alt + f            Move forward (right) one word
  Ctrl + k            Delete the text after the cursor
  Ctrl + u            Delete the text before the cursor
  Ctrl + w            Delete the word before the cursor
  Ctrl + p, Ctrl + n  Previous, next entry (Up, Down)
  Ctrl + j            Insert a new line
  Ctrl + g            Edit the message in an editor
  Ctrl + l            Clear the screen
  Ctrl + c            Stop the answer; twice: exit
  Ctrl + d            Exit (also /bye)
"""

_HELP_PARAMETERS = """\
Available Parameters:
  /set parameter seed <int>             Random number seed
  /set parameter num_predict <int>      Max number of tokens to predict
  /set parameter top_k <int>            Pick from top k num of tokens
  /set parameter top_p <float>          Pick token based on sum of probabilities
  /set parameter min_p <float>          Pick token based on top token probability * min_p
  /set parameter num_ctx <int>          Set the context size
  /set parameter temperature <float>    Set creativity level
  /set parameter repeat_penalty <float> How strongly to penalize repetitions
  /set parameter repeat_last_n <int>    Set how far back to look for repetitions
  /set parameter mirostat <int>         Keep surprise steady with version 1 or 2
  /set parameter num_gpu <int>          The number of layers to send to the GPU
  /set parameter stop <string> ...      Set the stop strings
"""


_WORD = re.compile(r'"([^"]+)"(?!\S)|(\S+)')


class LeaveSession(Exception):
    """The person wants to leave the session."""


class SlashCommands:
    """Carries out commands for one session."""

    def __init__(self, client: Client, session: Session, set_history: Callable[[bool], None]) -> None:
        self._client = client
        self._session = session
        self._set_history = set_history
        self._commands: dict[str, Callable[[str], None]] = {
            "/set": self._set,
            "/show": self._show,
            "/list": self._list,
            "/ls": self._list,
            "/load": self._load,
            "/save": self._save,
            "/clear": self._clear,
            "/bye": self._exit,
            "/exit": self._exit,
            "/?": self._help,
            "/help": self._help,
        }
        self._settings: dict[str, Callable[[str], None]] = {
            "parameter": self._set_parameter,
            "system": self._set_system,
            "history": lambda _: self._set_history(True),
            "nohistory": lambda _: self._set_history(False),
            "wordwrap": lambda _: self._set_flag("word_wrap", True, "wordwrap"),
            "nowordwrap": lambda _: self._set_flag("word_wrap", False, "nowordwrap"),
            "format": self._set_format,
            "noformat": self._set_no_format,
            "verbose": lambda _: self._set_flag("verbose", True, "verbose"),
            "quiet": lambda _: self._set_flag("verbose", False, "quiet"),
            "think": self._set_think,
            "nothink": lambda _: self._set_flag("think", False, "nothink"),
        }

    def run(self, line: str) -> None:
        """Carry out one command.

        Errors: LeaveSession when the session shall end; PunaError from the server.
        """
        name, _, rest = line.strip().partition(" ")
        command = self._commands.get(name)
        if command is None:
            print(f"Unknown command '{printable(name)}'. Type /? for help")
        else:
            command(rest.strip())

    def _exit(self, _: str) -> None:
        raise LeaveSession

    def _help(self, topic: str) -> None:
        topics = {"set": _HELP_SET, "/set": _HELP_SET, "show": _HELP_SHOW, "/show": _HELP_SHOW}
        print(topics.get(topic) or {"shortcut": _HELP_SHORTCUTS, "shortcuts": _HELP_SHORTCUTS}.get(topic, _HELP))

    def _clear(self, _: str) -> None:
        self._session.clear()
        print("Cleared session context")

    def _list(self, prefix: str) -> None:
        print(printable(models_table(self._client.tags().get("models") or [], datetime.now(UTC))), end="")

    def _load(self, name: str) -> None:
        model = model_reference(name)
        if not model or (" " in model and model == name):
            print("Usage:\n  /load <modelname>")
            return
        print(f"Loading model '{name}'")
        try:
            with Spinner():
                # What the last model saw with is not for another.
                request = {key: value for key, value in self._session.load_request().items() if key != "projector"}
                for _ in self._client.generate({**request, "model": model}):
                    pass
        except NotFound:
            print(f"Couldn't find model '{name}'")
            return
        self._session.load(model)

    def _save(self, name: str) -> None:
        if not name or " " in name:
            print("Usage:\n  /save <modelname>")
            return
        try:
            with Spinner():
                for _ in self._client.create(self._save_request(name)):
                    pass
        except PunaError as error:
            is_name = "invalid model name" in str(error)
            print(f"error: The model name '{name}' is invalid" if is_name else f"error: {error}")
            return
        print(f"Created new model '{name}'")

    def _save_request(self, name: str) -> dict[str, Any]:
        """The session's, with the files themselves where it runs from one."""
        request = self._session.save_request(name)
        if not self._session.model_is_file:
            return request
        from puna.cli import create_request

        named = filter(None, (self._session.model, self._session.projector))
        with display() as shown:
            files = create_request.upload(self._client, create_request.files_of(map(Path, named)), shown)
        return {**request, "files": files}

    def _set(self, arguments: str) -> None:
        name, _, rest = arguments.partition(" ")
        setting = self._settings.get(name)
        if setting is not None:
            setting(rest.strip())
        elif name:
            print(f"Unknown command '/set {printable(name)}'. Type /? for help")
        else:
            print(_HELP_SET)

    def _set_flag(self, attribute: str, value: bool, mode: str) -> None:
        setattr(self._session, attribute, value)
        print(f"Set '{mode}' mode.")

    def _set_parameter(self, arguments: str) -> None:
        name, _, text = arguments.partition(" ")
        values = _words(text) if name in parameters.LISTS else text.split()
        if not values:
            print(_HELP_PARAMETERS)
            return
        try:
            if name in parameters.LISTS:
                self._session.options[name] = [parameters.parse(name, value) for value in values]
            else:
                self._session.options[name] = parameters.parse(name, " ".join(values))
        except PunaError as error:
            print(f'Couldn\'t set parameter: "{error}"')
            return
        print(f"Set parameter '{name}' to '{', '.join(values)}'")

    def _set_system(self, text: str) -> None:
        if not text:
            print(_HELP_SET)
            return
        self._session.set_system(text)
        print("Set system message.")

    def _set_format(self, text: str) -> None:
        if text != "json":
            print("Invalid or missing format. For 'json' mode use '/set format json'")
            return
        self._session.format = "json"
        print("Set format to 'json' mode.")

    def _set_no_format(self, _: str) -> None:
        self._session.format = None
        print("Disabled format.")

    def _set_think(self, level: str) -> None:
        if level and level not in LEVELS:
            print(f"Unknown level '{printable(level)}': one of {', '.join(LEVELS)}")
            return
        if "thinking" not in (self._client.show(self._session.model).get("capabilities") or []):
            print(f'warning: model "{self._session.model}" does not support thinking output', file=sys.stderr)
            return
        self._session.think = level or True
        print(f"Set 'think' mode to '{level}'." if level else "Set 'think' mode.")

    def _show(self, topic: str) -> None:
        if topic not in ("info", "license", "modelfile", "parameters", "system", "template"):
            print(_HELP_SHOW)
            return
        reply = self._client.show(self._session.model)
        if topic == "info":
            text = model_card(reply)
        elif topic == "parameters":
            text = self._parameters(str(reply.get("parameters") or ""))
        elif topic == "system":
            text = self._session.system or reply.get("system") or "No system message was specified for this model."
        else:
            what = {"license": "license", "modelfile": "Modelfile", "template": "prompt template"}[topic]
            text = reply.get(topic) or f"No {what} was specified for this model."
        print(printable(str(text)))

    def _parameters(self, defined: str) -> str:
        own = [(name, _shown(value)) for name, value in self._session.options.items()]
        parts = []
        if defined:
            parts.append("Model defined parameters:\n" + table(parameter_rows(defined), indent="  "))
        if own:
            parts.append("User defined parameters:\n" + table(own, indent="  "))
        return "\n".join(parts) or "No parameters were specified for this model."


def _words(text: str) -> list[str]:
    """The words of a text; one in double quotes, as a Modelfile has it, may hold spaces."""
    return [quoted or word for quoted, word in _WORD.findall(text)]


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
