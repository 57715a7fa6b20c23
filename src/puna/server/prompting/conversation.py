"""From a stored model and a conversation to the text the model completes.

Chooses the template and puts the model's own messages in front; how templates work is puna.prompt's business.

Source: product description, "Prompt construction".
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from puna.api.generate import Message
from puna.gguf.reader import GGUFFile
from puna.prompt.ending import Ending
from puna.prompt.families.registry import FAMILIES
from puna.prompt.output_format import OutputFormat
from puna.prompt.parsers import PARSERS
from puna.prompt.render import PromptRequest, Source, Think
from puna.server.answering.generation import Prompt, Room, fit
from puna.server.answering.rendering import Renderers
from puna.store.models.model import StoredModel

Turn = dict[str, Any]  # a message as templates see it

_IM_START = b"<|im_start|>"


@dataclass(frozen=True)
class Vocabulary:
    """The few facts about a model's vocabulary that its prompts depend on."""

    bos: str
    eos: str
    has_im_start: bool


def source_of(model: StoredModel, template: str = "") -> Source:
    """*template*, from a request, counts more than the model's renderer, and that more than its templates."""
    assert model.model_path is not None
    found = model.model_path.stat()
    vocabulary = _vocabulary(model.model_path, found.st_size, found.st_mtime_ns)
    if model.config.renderer and not template:
        return Source(renderer=model.config.renderer)
    go_template = template or model.template
    jinja_template = "" if go_template else model.chat_template
    return Source(go_template, jinja_template, "", vocabulary.bos, vocabulary.eos, vocabulary.has_im_start)


def has_template(model: StoredModel) -> bool:
    """Without one a model was not made for conversations, or nobody says how: it continues texts."""
    return bool(model.config.renderer or model.template or model.chat_template)


def has_foreign_template(model: StoredModel, template: str) -> bool:
    """Whether its prompts are made by what others wrote, as far as is known without opening the file."""
    return bool(template or (not model.config.renderer and (model.template or model.chat_template)))


def output_format(model: StoredModel, template: str = "") -> OutputFormat:
    """How the model writes; *template* is a request's own."""
    family = FAMILIES.get(model.config.renderer)
    known = PARSERS.get(model.config.parser or (family.parser if family and not template else ""))
    if known is not None:
        return known
    return OutputFormat.of(template or model.template, model.chat_template, model.family)


def continues_texts(model: StoredModel) -> bool:
    """Whether an instruction is best given to the model as it is: nothing at all tells how turns are marked."""
    assert model.model_path is not None
    found = model.model_path.stat()
    return not has_template(model) and not _vocabulary(model.model_path, found.st_size, found.st_mtime_ns).has_im_start


@functools.lru_cache(maxsize=64)
def _vocabulary(path: Path, _size: int, _mtime_ns: int) -> Vocabulary:
    with GGUFFile.open(path) as file:
        meta = file.metadata
        if not meta.has("tokenizer.ggml.tokens"):
            return Vocabulary("", "", has_im_start=False)
        tokens = meta.array("tokenizer.ggml.tokens")

        def text_of(role: str) -> str:
            token = meta.integer(f"tokenizer.ggml.{role}_token_id", -1)
            return tokens.bytes_at(token).decode("utf-8", "replace") if 0 <= token < len(tokens) else ""

        return Vocabulary(text_of("bos"), text_of("eos"), has_im_start=_IM_START in tokens.iter_bytes())


@dataclass(frozen=True)
class Conversation:
    """What is to be answered, before it is known how much of it fits."""

    renderers: Renderers
    model: StoredModel
    turns: list[Turn]
    tools: list[dict[str, Any]]
    think: Think
    truncate: bool
    ending: Ending = Ending.ANSWER
    template: str = ""

    async def prompt(self, room: Room) -> Prompt:
        """Render it, cut to the context unless that is not wanted."""
        source = await asyncio.to_thread(source_of, self.model, self.template)
        warnings: dict[str, None] = {}

        async def render(turns: list[Turn]) -> str:
            request = PromptRequest(source, turns, self.tools, self.think, self.ending)
            rendered = await self.renderers.render(request)
            warnings.update(dict.fromkeys(rendered.warnings))
            return rendered.text

        if not self.truncate or not self.turns:
            text = await render(self.turns)
            return Prompt(text, warnings=list(warnings))
        fitting = await fit(self.turns, _is_system, render, room)
        return replace(fitting, warnings=list(warnings))


def _is_system(turn: Turn) -> bool:
    return bool(turn["role"] == "system")


def assemble(model: StoredModel, turns: Sequence[Turn], system: str = "", *, with_messages: bool = True) -> list[Turn]:
    """The model's messages, then *turns*; in front of all the system text, unless the first turn brings one."""
    before: list[Turn] = [dict(message) for message in model.messages] if with_messages else []
    text = system or model.system
    if text and not (turns and _is_system(turns[0])):
        before.insert(0, {"role": "system", "content": text})
    assembled = [*before, *turns]
    return _without_old_thoughts(assembled) if _repeats_thoughts(model) else assembled


def _repeats_thoughts(model: StoredModel) -> bool:
    return model.family == "qwen3" or model.name.partition(":")[0].rpartition("/")[2] == "deepseek-r1"


def _without_old_thoughts(turns: list[Turn]) -> list[Turn]:
    last_user = max((number for number, turn in enumerate(turns) if turn["role"] == "user"), default=-1)
    return [
        {**turn, "content": _without_thought(turn["content"])} if turn["role"] == "assistant" and number < last_user else turn
        for number, turn in enumerate(turns)
    ]


def _without_thought(text: str) -> str:
    if not text.lstrip().startswith("<think>"):
        return text
    _, tag, rest = text.partition("</think>")
    return rest.lstrip() if tag else text


def turn_of(message: Message) -> Turn:
    """A message of a request; empty fields are left out."""
    turn: Turn = {"role": message.role, "content": message.content}
    for name in ("thinking", "tool_name", "tool_call_id"):
        if value := getattr(message, name):
            turn[name] = value
    if message.tool_calls:
        turn["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    return turn
