"""What a model can do, judged from its file, its template and its configuration.

Reads templates only as far as to see which variables they use; rendering them is the prompt package's business.
"""

from __future__ import annotations

from puna.prompt.families.registry import FAMILIES
from puna.prompt.parsers import PARSERS
from puna.prompt.template_text import around_thinking, go_fields, jinja_words
from puna.store.disk.config import ModelConfig
from puna.store.models.details import FileDetails

THINKING_FAMILIES = frozenset({"gptoss", "gpt-oss"})

_JINJA_THINKING = ("<think>", "<thinking>", "[THINK]", "<|START_THINKING|>", "<seed:think>", "<|channel|>analysis")


def capabilities(
    file: FileDetails | None, template: str, config: ModelConfig, *, has_projector: bool, projector: FileDetails | None = None
) -> list[str]:
    """Names in Ollama's order, each once; ``rerank``, which Ollama does not have, stands where ``embedding`` would.

    A *projector* that cannot be read now is believed to see, as nearly all do.
    """
    found: list[str] = []
    if file is not None:
        found.append("rerank" if file.ranks else "embedding" if file.has_pooling else "completion")
        hears = projector is not None and projector.has_audio
        if file.has_vision or (has_projector and (projector is None or projector.has_vision or not hears)):
            found.append("vision")
        if file.has_audio or hears:
            found.append("audio")
    jinja = file.chat_template if file is not None and not template else ""
    can = _of_renderer(config) if config.renderer else _of_template(template, jinja, config)
    found += [ability for ability in ("tools", "insert", "thinking") if ability in can]
    found.extend(config.capabilities or [])
    return list(dict.fromkeys(found))


def _of_renderer(config: ModelConfig) -> set[str]:
    """What both the prompts' writer and the answers' reader know; nothing where either is unknown."""
    family = FAMILIES.get(config.renderer)
    parser = PARSERS.get(config.parser or family.parser) if family else None
    if family is None or parser is None:
        return set()
    known = {"tools": family.has_tools and parser.has_tools, "thinking": family.can_think and parser.can_think}
    return {ability for ability, is_known in known.items() if is_known}


def _of_template(template: str, jinja: str, config: ModelConfig) -> set[str]:
    """A parser alone shows no tools to a model, and one that reads no calls makes none of a template that does."""
    parser = PARSERS.get(config.parser)
    mentions_tools = "Tools" in go_fields(template) or bool({"tools", "functions"} & jinja_words(jinja))
    known = {
        "tools": mentions_tools and (parser is None or parser.has_tools),
        "insert": "Suffix" in go_fields(template),
        "thinking": (parser is not None and parser.can_think)
        or _shows_thinking(template, jinja)
        or config.model_family in THINKING_FAMILIES,
    }
    return {ability for ability, is_known in known.items() if is_known}


def _shows_thinking(template: str, jinja: str) -> bool:
    if any(mark in jinja for mark in _JINJA_THINKING):
        return True
    return "Messages" in go_fields(template) and around_thinking(template) is not None
