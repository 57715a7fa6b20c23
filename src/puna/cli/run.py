"""``puna run``: one answer to a prompt from the arguments or a pipe, or a conversation on a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import typer

from puna.api.client import Client
from puna.cli.answer import AnswerWriter, timings, write_events
from puna.cli.completion import installed_models
from puna.cli.connect import connected, settings
from puna.cli.options import Insecure, model_reference
from puna.cli.progress import Spinner, follow
from puna.cli.session import Session
from puna.cli.terminal import is_terminal, on_terminal
from puna.cli.think import parse_think
from puna.errors import BadRequest, NotFound
from puna.settings import parse_duration

STARTER_MODEL = "smollm2:135m"

T = TypeVar("T")


@dataclass(frozen=True)
class RunOptions:
    """The flags, checked."""

    verbose: bool = False
    insecure: bool = False
    word_wrap: bool = True
    hide_thinking: bool = False
    think: bool | str | None = None
    format: Any = None
    keep_alive: str | int | None = None
    truncate: bool | None = None
    dimensions: int = 0
    projector: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def common(self) -> dict[str, Any]:
        """The fields that every request carries if they were given."""
        given: dict[str, Any] = {
            "think": self.think,
            "keep_alive": self.keep_alive,
            "projector": self.projector or None,
            "options": dict(self.options) or None,
        }
        return {key: value for key, value in given.items() if value is not None}


def run(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", autocompletion=installed_models, help="Name of a model, or a GGUF file.")
    ] = STARTER_MODEL,
    prompt: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="What to answer.", show_default=False)] = None,
    keepalive: Annotated[str, typer.Option(help="How long the model stays loaded afterwards, as in 5m.")] = "",
    verbose: Annotated[bool, typer.Option("--verbose", help="Print timings after each answer.")] = False,
    insecure: Insecure = False,
    nowordwrap: Annotated[bool, typer.Option("--nowordwrap", help="Do not wrap words on a terminal.")] = False,
    format: Annotated[str, typer.Option(help="json, or a JSON schema.")] = "",
    think: Annotated[str | None, typer.Option(help="true, false, high, medium, low or max; bare it means true.")] = None,
    hidethinking: Annotated[bool, typer.Option("--hidethinking", help="Do not print what the model thinks.")] = False,
    truncate: Annotated[
        bool | None, typer.Option(help="Embedding models: cut input that is too long.", show_default=False)
    ] = None,
    dimensions: Annotated[int, typer.Option(help="Embedding models: numbers per vector.", show_default=False)] = 0,
    mmproj: Annotated[
        str, typer.Option(metavar="FILE", help="What a GGUF file sees with, where that is a file of its own.", show_default=False)
    ] = "",
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option", "-o", metavar="NAME=VALUE", show_default=False, help="An option as of PARAMETER; may be repeated."
        ),
    ] = None,
) -> None:
    """Run a model: answer PROMPT and what is piped in, or talk."""
    options = RunOptions(
        verbose=verbose,
        insecure=insecure,
        word_wrap=not nowordwrap,
        hide_thinking=hidethinking,
        think=None if think is None else parse_think(think),
        format=_parse_format(format),
        keep_alive=_parse_keep_alive(keepalive),
        truncate=truncate,
        dimensions=dimensions,
        projector=_projector(mmproj),
        options=parse_options(option or []),
    )
    name = model_reference(model)
    words = [_valid_text(word) for word in prompt or []]
    if prompt is None and on_terminal():
        from puna.cli.quiet_input import quiet_input

        with quiet_input(), connected() as client:  # what is typed while a server starts is for the prompt
            talk(client, name, options)
        return
    with connected() as client:
        text = " ".join([*_piped(), *words])
        _with_model(client, name, insecure, lambda: _answer_or_embed(client, name, text, options))


def parse_options(texts: Iterable[str]) -> dict[str, Any]:
    """Options as ``NAME=VALUE``; those that are lists take one value each time.

    Errors: BadRequest for an unknown name or a value of the wrong type.
    """
    from puna.store.models import parameters

    found: dict[str, Any] = {}
    for text in texts:
        name, is_set, value = text.partition("=")
        if not is_set:
            raise BadRequest(f"--option {text}: NAME=VALUE is wanted, as in num_predict=100")
        try:
            parsed = parameters.parse(name, value)
        except BadRequest as error:
            raise BadRequest(f"--option {text}: {error}") from error
        found[name] = [*found.get(name, ()), parsed] if name in parameters.LISTS else parsed
    return found


def _parse_format(text: str) -> Any:
    """A JSON schema as what it means, anything else as it is: the server judges it."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def _parse_keep_alive(text: str) -> str | int | None:
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        pass
    try:
        parse_duration(text)
    except ValueError as error:
        raise BadRequest(str(error)) from error
    return text


def _projector(path: str) -> str:
    if not path:
        return ""
    found = Path(path).expanduser()
    if not found.is_file():
        raise NotFound(f"no such file: {path}")
    return str(found.resolve())


def _valid_text(argument: str) -> str:
    """An argument whose bytes were not UTF-8, made fit to be sent."""
    return argument.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _piped() -> list[str]:
    if sys.stdin is None or is_terminal(sys.stdin):
        return []
    text = sys.stdin.buffer.read().decode("utf-8", "replace")
    return [text] if text else []


def _with_model(client: Client, model: str, insecure: bool, action: Callable[[], T]) -> T:
    """Do *action*; when the model is not there, pull it and do it again."""
    try:
        return action()
    except NotFound:
        if model.startswith("/"):
            raise
    follow(client.pull(model, insecure=insecure))
    return action()


def _answer_or_embed(client: Client, model: str, text: str, options: RunOptions) -> None:
    try:
        _answer_once(client, model, text, options)
    except BadRequest as error:
        if "does not support generate" not in str(error):
            raise
        _embed(client, model, text, options)


def _answer_once(client: Client, model: str, text: str, options: RunOptions) -> None:
    from puna.cli.image_paths import entered_for

    entered = entered_for(client, model, text, options.projector)
    # Nothing but an image is asked about all the same: an empty prompt would only load the model.
    prompt = entered.text or "[img]" * bool(entered.images)
    request: dict[str, Any] = {"model": model, "prompt": prompt, **options.common()}
    if entered.images:
        request["images"] = entered.images
    if options.format:
        request["format"] = options.format
    writer = AnswerWriter(sys.stdout, word_wrap=options.word_wrap, hide_thinking=options.hide_thinking)
    with Spinner() as spinner, closing(cast("Any", client.generate(request))) as events:
        final = write_events(events, writer, spinner)
    if text:
        writer.finish()
    if options.verbose:
        print(timings(final), file=sys.stderr, end="", flush=True)


def _input_required(model: str) -> BadRequest:
    return BadRequest(f'embedding models require input text. Usage: puna run {model} "your text here"')


def _embed(client: Client, model: str, text: str, options: RunOptions) -> None:
    if not text:
        raise _input_required(model)
    request: dict[str, Any] = {"model": model, "input": text}
    if options.truncate is not None:
        request["truncate"] = options.truncate
    if options.dimensions:
        request["dimensions"] = options.dimensions
    if options.keep_alive is not None:
        request["keep_alive"] = options.keep_alive
    print(json.dumps((client.embed(request).get("embeddings") or [[]])[0]))


def talk(client: Client, model: str, options: RunOptions) -> None:
    """A conversation on the terminal; a model that is not there is pulled first."""
    from puna.cli.quiet_input import quiet_input
    from puna.cli.repl import converse

    session = Session(
        model,
        options=dict(options.options),
        format=options.format or None,
        think=options.think,
        hide_thinking=options.hide_thinking,
        verbose=options.verbose,
        word_wrap=options.word_wrap,
        keep_alive=options.keep_alive,
        projector=options.projector,
    )
    with quiet_input():
        shown = _with_model(client, model, options.insecure, lambda: client.show(model))
        capabilities = shown.get("capabilities") or []
        if "embedding" in capabilities and "completion" not in capabilities:
            raise _input_required(model)
        with Spinner():
            for _ in client.generate(session.load_request()):
                pass
        converse(client, session, history=shown.get("messages") or [], keep_history=not settings().no_history)
