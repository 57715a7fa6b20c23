"""One answer's way through a grammar: which tokens may come next, and what to do when the parser cannot go on.

Knows nothing of how grammars are compiled, nor of batches. llguidance does the parsing; this module does not load it,
since that takes longer than the start of a runner should, and most runners never see a grammar.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from puna.sample.sampler import SampleError
from puna.sample.transforms import Floats

if TYPE_CHECKING:
    from llguidance import LLMatcher

log = logging.getLogger(__name__)

T = TypeVar("T")
Bits = NDArray[np.uint32]  # one per token, the lowest bit of the first word is token 0

MAX_REASON = 300  # characters of an error of the library, which may quote a whole grammar
_NOTHING = "there is no text that the model could write"


class GrammarError(SampleError):
    """The grammar cannot go on."""


@dataclass(frozen=True)
class Compiled:
    """A grammar at its beginning: never advanced, only copied."""

    matcher: LLMatcher
    first: Bits


class Matcher:
    """One answer's way through a grammar. One thread at a time, but for the mask, which ``start_masks`` computes elsewhere."""

    def __init__(self, compiled: Compiled) -> None:
        self._matcher = compiled.matcher.deep_copy()
        self._bits = compiled.first
        self._error: GrammarError | None = None
        self._pending: Future[None] | None = None

    def allowed(self) -> Bits:
        """The tokens that may come next; waits for them if they are being computed.

        Errors: GrammarError.
        """
        self.join()
        if self._error is not None:
            raise self._error
        return self._bits

    def advance(self, token: int) -> None:
        """Take a token that is allowed.

        Errors: GrammarError.
        """
        self.join()
        guarded(lambda: self._matcher.consume_token(token))
        raise_error(self._matcher)

    @property
    def is_complete(self) -> bool:
        """Whether nothing but the end may follow."""
        return self._matcher.is_stopped()

    def compute(self) -> None:
        """What ``allowed`` returns next; an error is kept for it."""
        bits = np.zeros_like(self._bits)
        try:
            fill(self._matcher, bits)
        except GrammarError as error:
            self._error = error
        except BaseException as error:  # others' masks are computed after this one
            log.exception("a grammar cannot go on")
            self._error = GrammarError(one_line(str(error)) or type(error).__name__)
        self._bits = bits

    def join(self) -> None:
        """Wait until nothing is being computed: after this nobody uses the vocabulary for this matcher. Never raises.

        An error is kept for ``allowed``.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            except BaseException as error:
                log.exception("what a grammar allows was not computed")
                self._error = GrammarError(one_line(str(error)) or type(error).__name__)

    def start(self, pending: Future[None]) -> None:
        self._pending = pending


_masks = ThreadPoolExecutor(1, "masks")


def start_masks(matchers: Sequence[Matcher]) -> None:
    """Begin to compute the next masks, while the model computes; llguidance works without the interpreter's lock."""

    def compute() -> None:
        for matcher in matchers:
            matcher.compute()

    pending = _masks.submit(compute)
    for matcher in matchers:
        matcher.start(pending)


def masked(row: Floats, allowed: Bits) -> Floats:
    """A copy of a row of logits in which only the allowed tokens are above -inf."""
    bits = np.unpackbits(allowed.view(np.uint8), bitorder="little", count=len(row))  # tokens beyond the bits: 0
    result: Floats = np.where(bits.view(np.bool_), row, np.float32(-np.inf))
    return result


def is_allowed(token: int, allowed: Bits) -> bool:
    return token < 32 * len(allowed) and bool(allowed[token // 32] >> np.uint32(token % 32) & np.uint32(1))


def fill(matcher: LLMatcher, bits: Bits) -> None:
    """Errors: GrammarError, also when there is no token that the grammar allows."""
    guarded(lambda: matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes))
    raise_error(matcher)
    if not bits.any():
        raise GrammarError(_NOTHING)


def raise_error(matcher: LLMatcher) -> None:
    if matcher.is_error():
        reason = one_line(matcher.get_error())
        raise GrammarError(_NOTHING if reason == "NoExtensionBias" else reason)


def guarded(work: Callable[[], T]) -> T:
    """A panic in Rust is no Exception in Python, so that it would end the thread it comes to."""
    try:
        return work()
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime":
            raise GrammarError(one_line(str(error)) or type(error).__name__) from error
        raise


def one_line(text: str) -> str:
    line = " ".join(text.replace("<non-verbose/>", "").split())
    return line if len(line) <= MAX_REASON else f"{line[:MAX_REASON]}..."
