"""A completion's way through the engine: its prompt, what was computed of it, the text of its answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence, Set

from puna.errors import BadRequest, ContextOverflow
from puna.runner.failures import deliver
from puna.runner.images.in_sequence import ImageAt, extents, groups, n_ready, position, without
from puna.runner.prefixes.groups import Group, cut
from puna.runner.prefixes.key import scoped
from puna.runner.scheduling.schedule import Progress
from puna.runner.scheduling.shift import dropped
from puna.runner.scheduling.task import Reason, Removed
from puna.runner.tasks.prompt import said, tokens_of
from puna.runner.tasks.seeing import NOTHING_SEEN, Seen
from puna.runner.tasks.text import TextStream
from puna.runner.tasks.thinking import ThinkingMeter
from puna.sample.breakers import breakers_of
from puna.sample.matcher import GrammarError, Matcher
from puna.sample.sampler import Sampler
from puna.tokenizer.tokenizer import Tokenizer
from puna.wire import (
    FILL_CONTEXT,
    MAX_TOP_LOGPROBS,
    CompletionReply,
    CompletionRequest,
    Done,
    Failed,
    Grammar,
    Piece,
    TokenLogprob,
)

log = logging.getLogger(__name__)

Emit = Callable[[CompletionReply], None]

# Generation that never ends by itself ends after this many contexts.
MAX_CONTEXTS = 10


class Completion:
    """``tokens`` are those of prompt and answer; the first ``n_computed`` of them are in the cache of ``slot``."""

    def __init__(self, wire: CompletionRequest, tokenizer: Tokenizer, n_ctx: int, emit: Emit, seen: Seen = NOTHING_SEEN) -> None:
        tokens, images = tokens_of(wire.prompt, tokenizer, seen.images, wire.context)
        _check(wire, tokens, tokenizer.n_tokens)
        self.wire = wire
        self.n_ctx = n_ctx = min(wire.n_ctx or n_ctx, n_ctx)
        self.n_keep = _n_keep(wire, len(tokens), n_ctx)
        self.images: Sequence[ImageAt]
        self.tokens, self.images = fit(tokens, self.n_keep, n_ctx, wire, images)
        self.groups: Sequence[Group] = groups(self.images)
        self._seen = seen
        self.n_prompt = len(self.tokens)
        self.n_truncated = len(tokens) - self.n_prompt
        self.n_computed = 0
        self.n_cached = 0
        self.n_generated = 0
        self.n_predict = _n_predict(wire, self.n_prompt, n_ctx)
        self.slot = -1
        self.order = 0  # of admission
        self.last_turn = 0  # that it had, see puna.runner.scheduling.turns
        self.is_paused = False  # gave way to others, until the pool has room
        self.is_cancelled = False
        self.is_done = False
        has_dry = bool(wire.sampling.dry_multiplier)
        breakers = breakers_of(tokenizer, wire.sampling.dry_sequence_breakers) if has_dry else None
        self.sampler = Sampler(wire.sampling, request_id=wire.request_id, n_ctx=n_ctx, breakers=breakers)
        text = said(self.tokens, self.images, is_cross_attended=self.n_looked_at > 0)
        self.sampler.accept_many(text)
        self.matcher = None if wire.grammar is None else _matcher(wire.grammar, tokenizer)
        self._thinking = None if wire.thinking is None else ThinkingMeter(wire.thinking, tokenizer)
        self._tokenizer = tokenizer
        self._text = TextStream(wire.stop)
        self._emit = emit
        self._answer: list[int] = []
        self._n_emitted = 0  # characters
        self._held_logprobs: list[tuple[int, TokenLogprob]] = []  # with the character at which the token's text begins
        self._prompt_tokens = text if wire.return_tokens else []
        self.tokens = scoped(self.tokens, wire.salt)  # after all that takes tokens for what they are
        self._started = 0
        self._first_token = 0

    def shift(self) -> Removed:
        """Half of what follows the kept tokens goes, images as a whole."""
        begin, end = dropped(self.n_ctx, self.n_keep, extents(self.images))
        n_positions = position(self.images, end) - position(self.images, begin)
        self._drop(begin, end)
        return Removed(begin, end, n_positions)

    def _drop(self, begin: int, end: int) -> None:
        """Leave these tokens out; none of the images is split."""
        self.images = without(self.images, begin, end)
        self.groups = groups(self.images)
        del self.tokens[begin:end]
        self.tokens[:1] = scoped(self.tokens[:1], self.wire.salt)

    @property
    def progress(self) -> Progress:
        return Progress(self.n_computed, self.n_ready(self.n_computed), 0, self.groups)

    def n_ready(self, n_computed: int) -> int:
        if not self.images:
            return len(self.tokens)
        return n_ready(self.images, n_computed, len(self.tokens), self.n_looked_at)

    @property
    def n_looked_at(self) -> int:
        return self._seen.n_looked_at

    reuses_prefixes = True
    is_resumable = True

    @property
    def n_to_write(self) -> int:
        """How many more tokens the cache may have to hold, of which none is known yet."""
        return max(min(self.n_predict - self.n_generated, self.n_ctx - len(self.tokens)), 0)

    def place(self, slot: int, n_cached: int) -> None:
        self.slot, self.n_cached, self.n_computed = slot, n_cached, n_cached
        self._started = time.perf_counter_ns()
        if self.n_predict == 0:
            self.finish("length")

    def output_rows(self, begin: int, n_tokens: int) -> range:
        """The last, also in the middle of a prompt, to know whether what was computed is sound."""
        return range(n_tokens - 1, n_tokens)

    @property
    def n_tokens(self) -> int:
        """Of the vocabulary: what is beyond it in a row of logits is no token."""
        return self._tokenizer.n_tokens

    def text_of(self, token: int) -> bytes:
        """What a token is called where it stands alone: control tokens have a text too."""
        return self._tokenizer.piece(token, special=True)

    @property
    def forced_token(self) -> int | None:
        """What must come next, whatever the model would write: the end of thinking whose budget is spent."""
        return self._thinking.forced_token if self._thinking is not None and self._text.is_whole else None

    @property
    def banned_tokens(self) -> Set[int]:
        """What must not come next. Where a grammar leaves nothing else it comes all the same."""
        is_early = self.n_generated < self.wire.min_tokens
        return self._tokenizer.end_tokens if is_early or (self.wire.ignore_eos and self.matcher is None) else frozenset()

    def accept(self, token: int, logprob: TokenLogprob | None = None) -> None:
        """Take the sampled token; this may end the request."""
        if not self._first_token:
            self._first_token = time.perf_counter_ns()
        self.n_generated += 1
        self._answer.append(token)
        if token in self._tokenizer.end_tokens and (self.matcher is not None or not self.wire.ignore_eos):
            self.finish("stop")
            return
        self.sampler.accept(token)
        if self._thinking is not None:
            self._thinking.accept(token, self.text_of(token))
        if self.matcher is not None:
            try:
                self.matcher.advance(token)
            except GrammarError as error:
                self.fail(error, status=400)
                return
        if logprob is not None:
            self._held_logprobs.append((self._text.n_read, logprob))
        piece = self._tokenizer.piece(token, special=self.wire.show_control_tokens)
        emitted = self._text.feed(piece, may_stop=self.n_generated > self.wire.min_tokens)
        if emitted.text:
            self._emit_text(emitted.text)
        if emitted.stopped or (self.matcher is not None and self.matcher.is_complete):
            self.finish("stop")
        elif self.n_generated >= self.n_predict:
            self.finish("length")
        else:
            self.tokens.append(token)

    def _emit_text(self, text: str) -> None:
        """Send text, with the logprobs of the tokens that begin in it; the others wait for their text."""
        self._n_emitted += len(text)
        sent: list[TokenLogprob] = []
        if self._held_logprobs:
            sent = [logprob for begin, logprob in self._held_logprobs if begin < self._n_emitted]
            del self._held_logprobs[: len(sent)]
        self._emit(Piece(content=text, logprobs=sent))

    def finish(self, reason: Reason) -> None:
        """The one terminal reply, after what was held back; if that cannot be emitted, it is a failure. Never raises."""
        if self.is_done:
            return
        try:
            self._release()
            self._emit_rest(reason)
            done = self._done(reason)
        except BaseException as error:
            log.exception("an answer could not be ended as it should")
            self.fail(error)
        else:
            self._end(done)

    def _emit_rest(self, reason: Reason) -> None:
        held = self._text.finish()
        if reason != "cancelled":
            if held:
                self._emit_text(held)
            if self._held_logprobs and not self._text.stopped:
                self._emit(Piece(content="", logprobs=[logprob for _, logprob in self._held_logprobs]))

    def _done(self, reason: Reason) -> Done:
        now = time.perf_counter_ns()
        started, first = self._started or now, self._first_token or now
        return Done(
            reason="stop" if self._text.stopped and reason == "length" else reason,
            prompt_eval_count=self.n_prompt,
            cached_count=self.n_cached,
            prompt_eval_duration=first - started,
            eval_count=self.n_generated,
            eval_duration=now - first,
            tokens=[*self._prompt_tokens, *self._answer] if self.wire.return_tokens else [],
            stop_sequence=self._text.stop_sequence,
            thinking_count=self._thinking.n_tokens if self._thinking is not None else 0,
            truncated_count=self.n_truncated,
        )

    def fail(self, error: BaseException, status: int = 500) -> None:
        """The one terminal reply. Never raises."""
        if self.is_done:
            return
        try:
            self._release()
        except BaseException:
            log.exception("a grammar could not be given up")
        self._end(Failed(error=str(error) or type(error).__name__, status=status))

    def _release(self) -> None:
        matcher, self.matcher = self.matcher, None
        if matcher is not None:
            matcher.join()

    def _end(self, last: Done | Failed) -> None:
        self.is_done = True
        try:
            self._seen.give_back()
        except BaseException:
            log.exception("images could not be given back")
        deliver(self._emit, last)


def _check(wire: CompletionRequest, tokens: list[int], n_vocab: int) -> None:
    """Errors: BadRequest naming what cannot be."""
    bad = next((t for t in wire.context if not 0 <= t < n_vocab), None)
    if bad is not None:
        raise BadRequest(f"context has the token {bad}, which is not in the vocabulary of {n_vocab}")
    if not tokens:
        raise BadRequest("the prompt is empty")
    foreign = next((t for t in wire.sampling.logit_bias if not 0 <= t < n_vocab), None)
    if foreign is not None:
        raise BadRequest(f"logit_bias has the token {foreign}, which is not in the vocabulary of {n_vocab}")
    if 0 <= wire.n_predict < wire.min_tokens:
        raise BadRequest(f"min_tokens is {wire.min_tokens}, but the answer may have {wire.n_predict} tokens at most")
    if not 0 <= wire.top_logprobs <= MAX_TOP_LOGPROBS:
        raise BadRequest(f"top_logprobs must be between 0 and {MAX_TOP_LOGPROBS}")
    if wire.n_ctx < 0:
        raise BadRequest(f"n_ctx must not be negative: {wire.n_ctx}")


def _matcher(grammar: Grammar, tokenizer: Tokenizer) -> Matcher:
    """Errors: BadRequest naming what is wrong with the grammar; Overloaded."""
    from puna.sample.grammar import grammars_of  # loading llguidance takes longer than most runners need to start

    return grammars_of(tokenizer).matcher(grammar)


def _n_keep(wire: CompletionRequest, n_tokens: int, n_ctx: int) -> int:
    """Tokens at the front that survive truncation and shifts; at most half the context, so that there is room."""
    kept = n_tokens if wire.n_keep < 0 else wire.n_keep
    return min(kept, n_tokens, n_ctx // 2)


def _n_predict(wire: CompletionRequest, n_prompt: int, n_ctx: int) -> int:
    """New tokens at most. Where nothing makes room, prompt and answer end with the context, to the token."""
    n_most = MAX_CONTEXTS * n_ctx if wire.shift and wire.n_predict != FILL_CONTEXT else n_ctx - n_prompt
    return min(wire.n_predict, n_most) if wire.n_predict >= 0 else n_most


def fit(
    tokens: list[int], n_keep: int, n_ctx: int, wire: CompletionRequest, images: Sequence[ImageAt] = ()
) -> tuple[list[int], list[ImageAt]]:
    """The prompt as it fits the context, and its images: the first n_keep tokens and the newest, with room for an answer.

    Errors: ContextOverflow when it does not fit and may not be truncated, or nothing would be left.
    """
    if len(tokens) <= n_ctx:
        return tokens, list(images)
    if not wire.truncate:
        raise ContextOverflow(len(tokens), n_ctx)
    room = max(n_ctx // 4, 1)
    if wire.n_predict >= 0:
        room = min(room, max(wire.n_predict, 1))
    n_tail = max(n_ctx - room - n_keep, 1)
    begin, end = cut(n_keep, len(tokens) - n_tail, extents(images))
    if not begin and end == len(tokens):
        raise ContextOverflow(len(tokens), n_ctx)
    return [*tokens[:begin], *tokens[end:]], without(images, begin, end)
