"""``puna show``: what is known about one model."""

from __future__ import annotations

import json as json_format
import sys
from typing import Annotated

import typer

from puna.cli.connect import connected
from puna.cli.model_card import model_card
from puna.cli.options import JsonFlag, Model, model_reference
from puna.cli.terminal import safe
from puna.errors import BadRequest


def show(
    model: Model,
    license: Annotated[bool, typer.Option("--license", help="Print the licence.")] = False,
    modelfile: Annotated[bool, typer.Option("--modelfile", help="Print the Modelfile.")] = False,
    parameters: Annotated[bool, typer.Option("--parameters", help="Print the parameters.")] = False,
    template: Annotated[bool, typer.Option("--template", help="Print the template.")] = False,
    system: Annotated[bool, typer.Option("--system", help="Print the system message.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print metadata and tensors as well.")] = False,
    json: JsonFlag = False,
) -> None:
    """Show what is known about a model."""
    flags = {"license": license, "modelfile": modelfile, "parameters": parameters, "template": template, "system": system}
    wanted = [name for name, given in flags.items() if given]
    if len(wanted) > 1:
        raise BadRequest("only one of '--license', '--modelfile', '--parameters', '--system', or '--template' can be specified")
    with connected() as client:
        reply = client.show(model_reference(model), verbose=verbose)
    if json:
        text = json_format.dumps(reply, indent=2, ensure_ascii=False)
    else:
        text = str(reply.get(wanted[0]) or "") if wanted else model_card(reply, verbose=verbose)
    print(safe(text, sys.stdout))
