"""What a model can do, judged from its file, its template and its configuration.

Reads templates only as far as to see which variables they use; rendering them is the prompt package's business.
"""

from __future__ import annotations

import re

from puna.store.config import ModelConfig
from puna.store.details import FileDetails

TOOL_PARSERS = frozenset(
    (
        "qwen3",
        "qwen3-thinking",
        "qwen3.5",
        "qwen3-coder",
        "qwen3-vl-instruct",
        "qwen3-vl-thinking",
        "ministral",
        "harmony",
        "cogito",
        "deepseek3",
        "olmo3",
        "olmo3-think",
        "nemotron-3-nano",
        "functiongemma",
        "glm-4.7",
        "gemma4",
        "gemma4-no-thinking",
        "lfm2",
        "lfm2-thinking",
        "laguna",
    )
)
THINKING_PARSERS = frozenset(
    (
        "qwen3",
        "qwen3-thinking",
        "qwen3.5",
        "qwen3-vl-thinking",
        "harmony",
        "cogito",
        "deepseek3",
        "olmo3-think",
        "nemotron-3-nano",
        "glm-4.7",
        "gemma4",
        "lfm2-thinking",
        "laguna",
    )
)
THINKING_FAMILIES = frozenset({"gptoss", "gpt-oss"})

_GO_COMMENT = re.compile(r"\{\{-?\s*/\*.*?\*/\s*-?\}\}", re.DOTALL)
_GO_ACTION = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
_GO_THINKING = re.compile(r"\}\}([^{}]*\S[^{}]*)\{\{-?\s*(?:\$?\w*)\.Thinking\s*-?\}\}([^{}]*\S[^{}]*)\{\{", re.DOTALL)
_JINJA_THINKING = ("<think>", "<thinking>", "[THINK]", "<|START_THINKING|>", "<seed:think>", "<|channel|>analysis")
_JINJA_TAG = re.compile(r"\{[{%](.*?)[%}]\}", re.DOTALL)
_STRING = re.compile(r"'[^'\n]*'|\"[^\"\n]*\"")


def capabilities(file: FileDetails | None, template: str, config: ModelConfig, *, has_projector: bool) -> list[str]:
    """Names in Ollama's order, each once; ``rerank``, which Ollama does not have, stands where ``embedding`` would."""
    found: list[str] = []
    if file is not None:
        found.append("rerank" if file.ranks else "embedding" if file.has_pooling else "completion")
        if file.has_vision or has_projector:
            found.append("vision")
        if file.has_audio:
            found.append("audio")
    jinja = file.chat_template if file is not None and not template else ""
    if _uses(template, "Tools") or _mentions_tools(jinja) or config.parser in TOOL_PARSERS:
        found.append("tools")
    if _uses(template, "Suffix"):
        found.append("insert")
    if _shows_thinking(template, jinja) or config.parser in THINKING_PARSERS or config.model_family in THINKING_FAMILIES:
        found.append("thinking")
    found.extend(config.capabilities or [])
    return list(dict.fromkeys(found))


def _uses(template: str, variable: str) -> bool:
    wanted = re.compile(rf"\.{variable}\b")
    actions = (_STRING.sub("", action) for action in _GO_ACTION.findall(_GO_COMMENT.sub("", template)))
    return any(wanted.search(action) for action in actions)


def _shows_thinking(template: str, jinja: str) -> bool:
    return any(mark in jinja for mark in _JINJA_THINKING) or bool(_GO_THINKING.search(template) and _uses(template, "Messages"))


def _mentions_tools(jinja: str) -> bool:
    return any(re.search(r"\btools\b", _STRING.sub("", tag)) for tag in _JINJA_TAG.findall(jinja))
