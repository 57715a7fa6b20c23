"""How the families write thinking and calls that a Modelfile's PARSER may name."""

from __future__ import annotations

from puna.prompt.families.registry import GEMMA4_TAGS
from puna.prompt.output_format import OutputFormat
from puna.prompt.thinking import Tags
from puna.prompt.tools.marks import Marks

_NONE: tuple[Marks, ...] = ()
_TAGGED = (Marks("<tool_call>", "</tool_call>"), Marks("<function=", "</function>"))
_MISTRAL = (Marks("[TOOL_CALLS]", is_control=True),)
_DEEPSEEK = (Marks("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", is_control=True),)
_OLMO = (Marks("<function_calls>", "</function_calls>"),)
_LFM = (Marks("<|tool_call_start|>", "<|tool_call_end|>", is_control=True),)
_GEMMA4 = (Marks("<|tool_call>", "<tool_call|>", is_control=True),)
_FUNCTIONGEMMA = (Marks("<start_function_call>", "<end_function_call>", is_control=True),)


def _format(marks: tuple[Marks, ...], *, thinks: bool = False, tags: Tags = Tags(), hides: bool = False) -> OutputFormat:  # noqa: B008
    return OutputFormat(tags, marks, has_tools=bool(marks), can_think=thinks, hides_thinking=hides)


PARSERS: dict[str, OutputFormat] = {
    "passthrough": OutputFormat(Tags(), _NONE, is_plain=True),
    "harmony": OutputFormat(Tags(), _NONE, is_harmony=True, has_tools=True, can_think=True),
    "qwen3": _format(_TAGGED, thinks=True),
    "qwen3-thinking": _format(_TAGGED, thinks=True),
    "qwen3.5": _format(_TAGGED, thinks=True),
    "qwen3-coder": _format(_TAGGED),
    "qwen3-vl-instruct": _format(_TAGGED),
    "qwen3-vl-thinking": _format(_TAGGED, thinks=True),
    "ministral": _format(_MISTRAL),
    "cogito": _format(_DEEPSEEK, thinks=True),
    "deepseek3": _format(_DEEPSEEK, thinks=True),
    "olmo3": _format(_OLMO),
    "olmo3-think": _format(_NONE, thinks=True),
    "nemotron-3-nano": _format(_TAGGED, thinks=True),
    "functiongemma": _format(_FUNCTIONGEMMA),
    "glm-4.7": _format(_TAGGED, thinks=True),
    "gemma4": _format(_GEMMA4, thinks=True, tags=GEMMA4_TAGS, hides=True),
    "gemma4-no-thinking": _format(_GEMMA4, tags=GEMMA4_TAGS, hides=True),
    "lfm2": _format(_LFM),
    "lfm2-thinking": _format(_LFM, thinks=True),
}
