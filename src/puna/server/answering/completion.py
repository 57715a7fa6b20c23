"""What a runner is asked for: a prompt, and all that a request says about the answer."""

from __future__ import annotations

from typing import Any

from puna import wire
from puna.server.answering.constraint import grammar_for, thinking_for
from puna.server.answering.fitting import Prompt
from puna.server.prompting.plan import PromptPlan

_RANDOM = -1  # as a seed
_INT64 = 1 << 63
_MAX_CONTEXTS = 10  # an answer without a limit of its own ends after so many contexts' worth of tokens


def completion_request(prompt: Prompt, number: int = 0) -> wire.CompletionRequest:
    """*number*: which of several answers to the prompt it is."""
    plan, n_ctx = prompt.plan, prompt.place.n_ctx
    request, native, options = plan.request, plan.request.native, plan.request.options
    limit = _MAX_CONTEXTS * n_ctx
    fills = options.num_predict == wire.FILL_CONTEXT
    sampling: dict[str, Any] = {name: getattr(options, name) for name in wire.SamplingOptions.__struct_fields__}
    sampling["seed"] = _seed(options.seed, number)
    return wire.CompletionRequest(
        prompt=prompt.text,
        images=list(prompt.images),
        context=plan.context,
        sampling=wire.SamplingOptions(**sampling),
        n_ctx=n_ctx,  # what the request may have, not what the runner has
        n_predict=options.num_predict if 0 <= options.num_predict <= limit or fills else limit,
        n_keep=options.num_keep,
        min_tokens=options.min_tokens,
        stop=options.stop,
        ignore_eos=options.ignore_eos,
        grammar=grammar_for(plan, prompt.text),
        thinking=thinking_for(plan, prompt.text),
        logprobs=native.logprobs,
        top_logprobs=native.top_logprobs,
        truncate=native.truncate,
        shift=native.shift,
        return_tokens=plan.returns_tokens,
        show_control_tokens=_needs_control_tokens(plan),
        salt=request.caller.salt,
        request_id=request.caller.request_id,
    )


def _needs_control_tokens(plan: PromptPlan) -> bool:
    output = plan.output
    if output.format is None:
        return False
    return output.format.needs_control_tokens(think=bool(plan.request.think), tools=bool(output.tools))


def _seed(seed: int, number: int) -> int:
    """Answers to the same prompt differ, also where a seed is given."""
    if seed == _RANDOM or not number:
        return seed
    return (seed + number + (seed < _RANDOM <= seed + number) + _INT64) % (2 * _INT64) - _INT64
