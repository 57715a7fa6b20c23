"""Where steps over a prompt should end, for caches that can resume a sequence only where a step ended."""

from __future__ import annotations

from collections.abc import Sequence

from puna.runner.prefixes.tree import common_prefix
from puna.runner.scheduling.admission import QUEUE_WINDOW
from puna.runner.scheduling.schedule import Progress
from puna.runner.tasks.completion import Request

# A step costs time, so it should spare at least so many tokens.
MIN_STEP = 32


def stopping(request: Request, waiting: Sequence[list[int]], prompt_tail: int) -> Progress:
    """The request's progress, with a stop where others that wait depart from its prompt, or *prompt_tail* before its end.

    Others wait for what they have in common with it (puna.runner.scheduling.admission), and copy it when the step has
    ended there.
    """
    if request.n_computed >= request.n_prompt:
        return request.progress
    common = (common_prefix(other, request.tokens, min(len(other) - 1, request.n_prompt)) for other in waiting[:QUEUE_WINDOW])
    stops = [*common, request.n_prompt - prompt_tail]
    n_stop = min((n for n in stops if n >= request.n_computed + MIN_STEP), default=0)
    return request.progress._replace(n_stop=n_stop)
