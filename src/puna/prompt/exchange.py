"""What is asked of the process that renders prompts, and what it answers: plain data, without what renders.

A message is a length in four bytes, then MessagePack.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from puna.prompt.ending import Ending

LENGTH = struct.Struct(">I")
LIMIT_S = 10.0  # of a processor's time, for one prompt

Tool = dict[str, Any]
Think = bool | str | None


class Source(msgspec.Struct, frozen=True):
    """Where a model's prompts come from. *bos* and *eos* are the texts of those tokens, as templates print them."""

    go_template: str = ""
    jinja_template: str = ""
    renderer: str = ""  # counts more than the model's templates; a request's template counts more than it
    bos: str = ""
    eos: str = ""
    has_im_start: bool = False

    @property
    def is_own(self) -> bool:
        """Whether nobody else wrote how these prompts are made."""
        return bool(self.renderer) or not (self.go_template or self.jinja_template)


class PromptRequest(msgspec.Struct):
    """A conversation to be rendered; with *suffix* the text between *prefix* and it is wanted instead."""

    source: Source
    messages: list[dict[str, Any]] = []
    tools: list[Tool] = []
    think: Think = None
    ending: Ending = Ending.ANSWER
    prefix: str = ""
    suffix: str = ""


class Rendered(msgspec.Struct, frozen=True):
    """What the model completes, and what of the request it will not see."""

    text: str
    warnings: list[str] = []


class Failure(msgspec.Struct, frozen=True):
    """Why there is no prompt, in the words for the client."""

    text: str
    is_template: bool  # the template's fault, not the request's


class Reply(msgspec.Struct, frozen=True):
    prompt: Rendered | None = None
    failure: Failure | None = None
