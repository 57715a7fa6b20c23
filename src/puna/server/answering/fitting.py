"""The text of a prompt, rendered for the runner that is to read it; a conversation that is too long is cut to its context.

Source: product description "Truncation to context".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import msgspec

from puna import wire
from puna.prompt import harmony
from puna.prompt.exchange import PromptRequest
from puna.server.answering.counting import TokenCount
from puna.server.answering.images import in_text, shown
from puna.server.placing.loaded import Place
from puna.server.prompting.plan import PromptPlan
from puna.server.prompting.turns import Turn
from puna.server.rendering import Renderers


@dataclass(frozen=True)
class Fitted:
    """A text, and what of the conversation is not in it."""

    text: str
    n_messages_cut: int = 0
    n_tokens_cut: int = 0  # of those messages; of so many that not even their tokens were counted, at least so many


@dataclass(frozen=True)
class Prompt:
    """What the model reads at its place."""

    place: Place
    plan: PromptPlan
    fitted: Fitted
    warnings: list[str]  # what of the request is not in it, besides messages that were cut

    @property
    def text(self) -> str:
        return self.fitted.text

    @cached_property
    def images(self) -> list[wire.Image]:
        """Those that are in it: with messages that are left out their images are."""
        return in_text(self.text, self.plan.images)

    @property
    def shown(self) -> str:
        """As a person may see it."""
        return shown(self.text, self.images)


async def prompt_for(place: Place, plan: PromptPlan, renderers: Renderers) -> Prompt:
    """Errors: what rendering raises; RunnerDied."""
    warnings: dict[str, None] = {}

    async def render(content: PromptRequest, turns: list[Turn]) -> str:
        rendered = await renderers.render(msgspec.structs.replace(content, messages=turns))
        warnings.update(dict.fromkeys(rendered.warnings))
        return rendered.text

    fitted = await _fitted(place, plan, render)
    if plan.output.is_final_message and not harmony.is_within_message(fitted.text):
        # made of control tokens, which no grammar describes
        fitted = replace(fitted, text=fitted.text + harmony.FINAL_BEGIN)
    prompt = Prompt(place, plan, fitted, list(warnings))
    if not fitted.n_messages_cut and len(prompt.images) < len(plan.images):
        n_lost = len(plan.images) - len(prompt.images)
        prompt.warnings.append(f"the model does not see {n_lost} of the images: its template leaves them out")
    return prompt


async def _fitted(place: Place, plan: PromptPlan, render: Callable[[PromptRequest, list[Turn]], Awaitable[str]]) -> Fitted:
    content = plan.content
    if isinstance(content, str):
        return Fitted(content)
    if plan.is_cut_to_fit and content.messages:
        return await fit(content.messages, partial(render, content), place.n_ctx, TokenCount(place, plan))
    return Fitted(await render(content, content.messages))


def _is_system(turn: Turn) -> bool:
    return bool(turn["role"] == "system")


async def fit(messages: list[Turn], render: Callable[[list[Turn]], Awaitable[str]], n_ctx: int, count: TokenCount) -> Fitted:
    """The prompt of the longest end of a conversation that fits the context, system messages and the last one kept.

    Each step of the search renders and counts once; that a shorter conversation never has more tokens makes it a bisection.
    """

    def kept(begin: int) -> list[Turn]:
        return [message for number, message in enumerate(messages) if number >= begin or _is_system(message)]

    if all(map(_is_system, messages[:-1])):
        return Fitted(await render(list(messages)))  # nothing may be left out, so there is nothing to count

    n_most = 0  # tokens of the longest that was tried and does not fit

    async def rendered(begin: int) -> str:
        """The prompt from that message on; empty when it does not fit."""
        nonlocal n_most
        text = await render(kept(begin))
        is_fitting, n = await count.fits(text)
        if not is_fitting:
            n_most = max(n_most, n)
        return text if is_fitting else ""

    # A message is a token at least: of more messages than that the first cannot be kept, however many were sent.
    first = max(0, len(messages) - n_ctx)
    if first == 0 and (text := await rendered(0)):
        return Fitted(text)
    low, high, best = max(1, first), len(messages) - 1, ""
    while low < high:
        middle = (low + high) // 2
        if text := await rendered(middle):
            high, best = middle, text
        else:
            low = middle + 1
    best = best or await render(kept(high))
    n_tokens_cut = n_most - await count.of(best) if n_most > n_ctx else 0
    return Fitted(best, len(messages) - len(kept(high)), n_tokens_cut)
