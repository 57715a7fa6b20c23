"""Whether an engine's answer is what its model says, however its steps were cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from puna.native.kernels.library import wanted
from puna.runner.engine import Engine
from puna.runner.step.forward import Forward
from puna.wire import Done
from tests.puna_engine import PunaEngine


def is_exact(engine: Engine) -> bool:
    """Whether what it computes is the same to the last bit whatever is computed beside: with Puna's own products."""
    return isinstance(engine.loop.model.forward, Forward) and wanted(None) is not None


def is_greedy(engine: Engine, model: Path, done: Done) -> bool:
    """Whether each token of the answer is the likeliest, or as good as that, when everything is computed from scratch.

    Long answers of random models cannot be compared as texts: a state computed in other steps differs in the fourth digit,
    and one choice that turns on it makes everything after it another text.
    """
    said = range(done.prompt_eval_count, len(done.tokens))
    with PunaEngine(model, n_ctx=2048, n_batch=2048) as puna:
        n = len(done.tokens)
        logits = puna.decode(done.tokens, range(n), [0] * n, [p - 1 for p in said]).copy()
    chosen = logits[np.arange(len(said)), [done.tokens[p] for p in said]]
    logits[:, list(engine.loop.model.tokenizer.end_tokens)] = -np.inf  # never chosen here
    best = logits.max(1)
    return bool((chosen >= best - 0.01 * np.abs(best)).all())
