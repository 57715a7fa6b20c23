"""How a model's prompts are made and its output is written: by which template, renderer and parser.

How templates work is puna.prompt's business. Opens the model's file for the few facts about its vocabulary.

Source: product description, "Prompt construction".
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from puna.gguf.reader import GGUFFile
from puna.prompt.exchange import Source
from puna.prompt.families.registry import FAMILIES
from puna.prompt.output_format import OutputFormat
from puna.prompt.parsers import PARSERS
from puna.store.models.model import StoredModel

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


def continues_texts(model: StoredModel) -> bool:
    """Whether an instruction is best given to the model as it is: nothing at all tells how turns are marked."""
    assert model.model_path is not None
    found = model.model_path.stat()
    return not model.has_template and not _vocabulary(model.model_path, found.st_size, found.st_mtime_ns).has_im_start


def output_format(model: StoredModel, template: str = "") -> OutputFormat:
    """How the model writes; *template* is a request's own."""
    family = FAMILIES.get(model.config.renderer)
    known = PARSERS.get(model.config.parser or (family.parser if family and not template else ""))
    if known is not None:
        return known
    return OutputFormat.of(template or model.template, model.chat_template, model.family)


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

        return Vocabulary(text_of("bos"), text_of("eos"), has_im_start=tokens.holds(_IM_START))
