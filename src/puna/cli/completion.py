"""What the shell's Tab key is answered with: names of models, and bash's words put together again.

bash ends words at colons, which stand in the names of models. Completing starts no server.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable, MutableMapping
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from puna.cli.connect import connected, is_listening, settings
from puna.errors import PunaError

if TYPE_CHECKING:
    from puna.api.client import Client

VARIABLE = "_PUNA_COMPLETE"


def is_completing() -> bool:
    """Whether a shell asks, not a person."""
    return bool(os.environ.get(VARIABLE))


def installed_models(incomplete: str) -> list[str]:
    """Names of stored models: of the server that runs, else of this machine's folder."""
    if is_listening(settings().host):
        return _fitting(_asked(lambda client: client.tags().get("models")), incomplete)
    return _fitting(_stored() if settings().host.is_here else [], incomplete)


def pullable_models(incomplete: str) -> list[str]:
    """Those that can be pulled anew, and those with a name of their own here."""
    from puna.store.sources.packages.starters import STARTERS

    return list(dict.fromkeys([*installed_models(incomplete), *_fitting((item.name for item in STARTERS), incomplete)]))


def loaded_models(incomplete: str) -> list[str]:
    """Names of models that are in memory."""
    names = _asked(lambda client: client.ps().get("models")) if is_listening(settings().host) else []
    return _fitting(names, incomplete)


def _asked(list_of: Callable[[Client], Iterable[dict[str, object]] | None]) -> list[str]:
    try:
        with connected(private=False) as client:
            return [str(model.get("name", "")) for model in list_of(client) or []]
    except PunaError:
        return []


def _stored() -> list[str]:
    from puna.store.disk.manifests import Manifests

    try:
        return sorted(name.display for name in Manifests(settings().models / "manifests").names())
    except PunaError:
        return []


def _fitting(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.lower().startswith(incomplete.lower())]


def complete(answer: Callable[[], None]) -> None:
    """Have *answer* write completions; for bash, of whole words, without what stands before the last colon already."""
    before = join_words(os.environ) if os.environ.get(VARIABLE) == "complete_bash" else ""
    if not before:
        answer()
        return
    output = io.StringIO()
    try:
        with redirect_stdout(output):
            answer()
    finally:
        sys.stdout.write("".join(f"{line.removeprefix(before)}\n" for line in output.getvalue().splitlines()))


def join_words(environ: MutableMapping[str, str]) -> str:
    """Put words together that bash has cut at colons; returns what of the last one it does not ask for."""
    words = environ.get("COMP_WORDS", "").split("\n")
    number = environ.get("COMP_CWORD", "")
    if not number.isdigit() or ":" not in words:
        return ""
    joined: list[str] = []
    for word in words[: int(number) + 1]:
        is_cut = bool(joined) and (word == ":" or joined[-1].endswith(":"))
        joined = [*joined[:-1], joined[-1] + word] if is_cut else [*joined, word]
    environ["COMP_WORDS"], environ["COMP_CWORD"] = "\n".join(joined), str(len(joined) - 1)
    head, colon, _ = joined[-1].rpartition(":")
    return head + colon
