"""What a model can do, judged from its file, its template and its configuration.

Reads templates only as far as to see which variables they use; rendering them is the prompt package's business.
"""

from __future__ import annotations

from puna.prompt.template_text import around_thinking, go_fields, jinja_words
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

_JINJA_THINKING = ("<think>", "<thinking>", "[THINK]", "<|START_THINKING|>", "<seed:think>", "<|channel|>analysis")


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
    if "Tools" in go_fields(template) or {"tools", "functions"} & jinja_words(jinja) or config.parser in TOOL_PARSERS:
        found.append("tools")
    if "Suffix" in go_fields(template):
        found.append("insert")
    if _shows_thinking(template, jinja) or config.parser in THINKING_PARSERS or config.model_family in THINKING_FAMILIES:
        found.append("thinking")
    found.extend(config.capabilities or [])
    return list(dict.fromkeys(found))


def _shows_thinking(template: str, jinja: str) -> bool:
    if any(mark in jinja for mark in _JINJA_THINKING):
        return True
    return "Messages" in go_fields(template) and around_thinking(template) is not None
