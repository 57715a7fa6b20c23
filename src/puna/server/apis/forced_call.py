"""A native request whose answer must be a call of a tool, as the APIs of OpenAI and Anthropic let clients ask for one."""

from __future__ import annotations

from typing import Any

from puna.prompt.tools.forced import call_schema


def forcing(native: dict[str, Any], forced_tool: str | None) -> dict[str, Any]:
    """The request with the call as its format, where a tool is named (see puna.prompt.tools.forced).

    Errors: ValueError when there is no such tool.
    """
    return native if forced_tool is None else {**native, "format": call_schema(native["tools"], forced_tool)}
