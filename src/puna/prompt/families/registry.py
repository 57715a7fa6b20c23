"""The families that a Modelfile's RENDERER may name."""

from __future__ import annotations

from puna.prompt.families import deepseek, gemma, glm, lfm, nemotron, olmo, qwen
from puna.prompt.families.family import Family
from puna.prompt.thinking import Tags

GEMMA4_TAGS = Tags("<|channel>thought", "<channel|>")

FAMILIES: dict[str, Family] = {
    "qwen3-coder": Family(qwen.coder, "qwen3-coder"),
    "qwen3-vl-instruct": Family(qwen.vl_instruct, "qwen3-vl-instruct"),
    "qwen3-vl-thinking": Family(qwen.vl_thinking, "qwen3-vl-thinking", can_think=True),
    "qwen3.5": Family(qwen.qwen35, "qwen3.5", can_think=True),
    "cogito": Family(deepseek.cogito, "cogito", can_think=True),
    "deepseek3.1": Family(deepseek.v31, "deepseek3", can_think=True),
    "olmo3": Family(olmo.instruct, "olmo3"),
    "olmo3.1": Family(olmo.instruct_31, "olmo3"),
    "olmo3-think": Family(olmo.think, "olmo3-think", has_tools=False, can_think=True),
    "olmo3-32b-think": Family(olmo.think_32b, "olmo3-think", has_tools=False, can_think=True),
    "nemotron-3-nano": Family(nemotron.nano, "nemotron-3-nano", can_think=True),
    "gemma4": Family(gemma.gemma4, "gemma4", GEMMA4_TAGS, can_think=True),
    "functiongemma": Family(gemma.functiongemma, "functiongemma"),
    "glm-4.7": Family(glm.glm47, "glm-4.7", can_think=True),
    "lfm2": Family(lfm.instruct, "lfm2"),
    "lfm2-thinking": Family(lfm.thinking, "lfm2-thinking", can_think=True),
}
