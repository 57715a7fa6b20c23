"""Arguments and options that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from puna.cli.completion import installed_models
from puna.errors import NotFound

JsonFlag = Annotated[bool, typer.Option("--json", help="Print the server's reply as JSON.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Speak plain HTTP with the registry.")]
Prefix = Annotated[
    str,
    typer.Argument(
        metavar="PREFIX", autocompletion=installed_models, help="Only models whose names begin with this.", show_default=False
    ),
]


Model = Annotated[
    str, typer.Argument(metavar="MODEL", autocompletion=installed_models, show_default=False, help="Name of a model.")
]
Models = Annotated[
    list[str], typer.Argument(metavar="MODEL...", autocompletion=installed_models, show_default=False, help="Names of models.")
]


def model_reference(text: str) -> str:
    """What to send as the model's name: the absolute path when *text* is a file, else *text*.

    Errors: NotFound when it can only be a path and no file is there, or a folder.
    """
    path = Path(text).expanduser()
    must_be_path = text.startswith(("./", "../", "/", "~"))
    if not must_be_path and not text.lower().endswith(".gguf"):
        return text
    if path.is_file():
        return os.path.abspath(path)  # links stay: what they lead to need not be called .gguf
    if path.is_dir():
        raise NotFound(f"{text} is a folder: a Modelfile with FROM {text} and puna create make a model of it")
    if must_be_path:
        raise NotFound(f"no such file: {text}")
    return text
