"""``puna create``: make a model from a Modelfile."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from puna.cli.connect import connected
from puna.cli.progress import display, follow
from puna.errors import InvalidName
from puna.gguf.quantise import kind_named
from puna.store.names import Name


def create(
    model: Annotated[str, typer.Argument(metavar="MODEL", show_default=False, help="Name of the new model.")],
    file: Annotated[str, typer.Option("--file", "-f", help="The Modelfile; - is standard input.")] = "Modelfile",
    quantize: Annotated[str, typer.Option("--quantize", "-q", help="Quantise the weights, as in q4_K_M.")] = "",
    draft_quantize: Annotated[str, typer.Option("--draft-quantize", help="Quantise the weights of the DRAFT.")] = "",
) -> None:
    """Make a model from a Modelfile."""
    from puna.cli import create_request

    _check(model, quantize, draft_quantize)
    parsed, folder = create_request.read(file)
    for name in parsed.deprecated:
        print(f"warning: parameter {name} is deprecated", file=sys.stderr)
    request, files, adapters, drafts = create_request.build(model, parsed, folder)
    for field, kind in (("quantize", quantize), ("draft_quantize", draft_quantize)):
        if kind:
            request[field] = kind
    with connected() as client:
        with display() as shown:
            for field, paths in (("files", files), ("adapters", adapters), ("draft_files", drafts)):
                if paths:
                    request[field] = create_request.upload(client, paths, shown)
        follow(client.create(request))


def _check(model: str, *kinds: str) -> None:
    """Refuse what the server would refuse once it has all files.

    Errors: InvalidName, or PunaError for a kind of weights that there is not.
    """
    try:
        Name.parse(model)
    except InvalidName as error:
        raise InvalidName(f"{error}: {model}") from error
    for kind in filter(None, kinds):
        kind_named(kind)
