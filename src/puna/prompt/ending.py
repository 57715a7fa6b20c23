"""How a prompt ends: where an answer begins, within the last message, or after it."""

from __future__ import annotations

import enum
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from puna.errors import BadRequest, TemplateError
from puna.prompt.thinking import Tags

Message = Mapping[str, Any]


class Ending(enum.Enum):
    ANSWER = "answer"  # the beginning of a new answer
    CONTINUE = "continue"  # the last message's text, which the model goes on with
    NOTHING = "nothing"  # the end of the last message


def ending_of(
    messages: Sequence[Message], *, add_generation_prompt: bool | None = None, continue_final_message: bool | None = None
) -> Ending:
    """What a client asks for, in the terms of Hugging Face's chat templates; who asks for nothing has answers continued.

    Errors: BadRequest for both at once, and for nothing to continue.
    """
    if continue_final_message and add_generation_prompt:
        raise BadRequest("continue_final_message and add_generation_prompt exclude each other")
    if continue_final_message:
        if not messages or messages[-1].get("tool_calls"):
            raise BadRequest("continue_final_message: there is no message whose text could be continued")
        return Ending.CONTINUE
    if add_generation_prompt is not None:
        return Ending.ANSWER if add_generation_prompt else Ending.NOTHING
    is_prefilled = bool(messages) and messages[-1].get("role") == "assistant" and not messages[-1].get("tool_calls")
    return Ending.CONTINUE if is_prefilled and continue_final_message is None else Ending.ANSWER


def answer_prefix_of(messages: Sequence[Message], ending: Ending, tags: Tags) -> str:
    """The part of the answer that the prompt holds already; thinking comes with its opening tag."""
    if ending is not Ending.CONTINUE or not messages:
        return ""
    last = messages[-1]
    text, thinking = str(last.get("content") or ""), str(last.get("thinking") or "")
    return text or (f"{tags.begin}{tags.space}{thinking}" if thinking else "")


def continued(messages: Sequence[Message], tags: Tags, render: Callable[[Sequence[Message], Ending], str]) -> str:
    """The prompt that ends with the last message's text, or with its thinking if there is nothing else yet.

    The template writes the message, and what it writes after the text is cut off. Where it does not write it as it is, the text
    is put where the template would have an answer begin.
    Errors: TemplateError, what *render* raises.
    """
    *before, last = messages
    text, thinking = str(last.get("content") or ""), str(last.get("thinking") or "")
    if text:
        prompt = _cut_after_text(before, last, text, render)
        if prompt is not None:
            return prompt
    begin = render(before, Ending.ANSWER)
    if not text and not thinking:
        return begin
    if not text:
        return f"{begin}{thinking}" if tags.are_open_in(begin) else f"{begin}{tags.begin}{tags.space}{thinking}"
    if tags.are_open_in(begin):
        return f"{begin}{thinking}{tags.space}{tags.end}{2 * tags.space}{text}"
    return f"{begin}{text}"


def _cut_after_text(
    before: Sequence[Message], last: Message, text: str, render: Callable[[Sequence[Message], Ending], str]
) -> str | None:
    mark = f"end-{secrets.token_hex(16)}"  # stands behind the text, where no template trims
    try:
        whole = render([*before, {**last, "content": text + mark}], Ending.NOTHING)
    except TemplateError:
        return None
    prompt, found, rest = whole.partition(mark)
    return prompt if found and mark not in rest and prompt.endswith(text.lstrip()) else None
