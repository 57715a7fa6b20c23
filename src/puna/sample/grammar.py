"""From a grammar as a client sends it (JSON schema, regular expression, Lark) to a matcher for one vocabulary.

Knows nothing of logits, requests or batches.

A grammar comes from a client, so it is hostile until compiled. Its text, the numbers in it that cost memory, the lexer's
states and the work of one step are bounded. It is compiled on a thread of its own, with a stack for deep recursion, while
the submitter waits, and for a bounded time; a copy of what was compiled costs microseconds.

Source: https://github.com/guidance-ai/llguidance (documentation of syntax, JSON schema and limits).
"""

from __future__ import annotations

import json
import logging
import math
import threading
import weakref
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from decimal import Decimal
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from puna.errors import BadRequest, Overloaded
from puna.sample.matcher import Compiled, GrammarError, Matcher, fill, guarded, one_line, raise_error
from puna.sample.schema import closed
from puna.tokenizer.tokenizer import Tokenizer
from puna.wire import Grammar

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_SCHEMA_BYTES = 256 << 10
MAX_TEXT_BYTES = 32 << 10  # of a regular expression or a Lark grammar: their compilation may be quadratic
MAX_MULTIPLE = 50_000  # states of the automaton for multipleOf
LONG_TEXT = 64  # bytes from which the tokens of forced text are remembered
COMPILE_S = 10.0
MAX_COMPILING = 2  # grammars at once; one whose time is over keeps its place until it ends
STACK_BYTES = 256 << 20  # address space, not memory: references may be nested as deep as a text of the size above allows
CACHED_GRAMMARS, CACHED_BYTES = 64, 1 << 20  # bytes of text: what is compiled from it is up to some hundred times larger

# Between the tokens of JSON: a space, or a new line and its indentation. Without an end a model may write nothing else.
JSON_SPACE = r" |\r?\n[ \t]{0,40}"
JSON_OBJECT = '{"type":"object"}'


class Grammars:
    """Compiles grammars for one vocabulary and remembers the latest. Any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = weakref.ref(tokenizer)
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._compiled: OrderedDict[Grammar, Compiled] = OrderedDict()

    def matcher(self, grammar: Grammar) -> Matcher:
        """Errors: BadRequest naming what is wrong with the grammar; Overloaded when too many are being compiled."""
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
        if compiled is None:
            check(grammar)
            vocabulary = self._need_vocabulary()
            compiled = _bounded(lambda: compile_grammar(vocabulary, grammar), _INVALID[grammar.kind])
            self._remember(grammar, compiled)
        return Matcher(compiled)

    def _need_vocabulary(self) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                tokenizer = self._tokenizer()
                assert tokenizer is not None, "who asks holds the tokenizer"
                self._vocabulary = read_vocabulary(tokenizer)
            return self._vocabulary

    def _remember(self, grammar: Grammar, compiled: Compiled) -> None:
        with self._lock:
            self._compiled[grammar] = compiled
            total = sum(len(g.text) for g in self._compiled)
            while len(self._compiled) > CACHED_GRAMMARS or (total > CACHED_BYTES and len(self._compiled) > 1):
                oldest, _ = self._compiled.popitem(last=False)
                total -= len(oldest.text)


_grammars: weakref.WeakKeyDictionary[Tokenizer, Grammars] = weakref.WeakKeyDictionary()
_grammars_lock = threading.Lock()


def grammars_of(tokenizer: Tokenizer) -> Grammars:
    """The grammars of a vocabulary, made when first asked for."""
    with _grammars_lock:
        found = _grammars.get(tokenizer)
        if found is None:
            found = _grammars[tokenizer] = Grammars(tokenizer)
        return found


# The vocabulary.


@dataclass(frozen=True)
class Vocabulary:
    tokens: LLTokenizer
    controls: dict[str, int]  # by name


def read_vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """The bytes of every token. Control tokens and those that end an answer are marked: no text contains them."""
    pieces = [tokenizer.piece(token) for token in range(tokenizer.n_tokens)]
    special = {token for token, piece in enumerate(pieces) if not piece} | tokenizer.end_tokens
    for token in special:
        pieces[token] = tokenizer.piece(token, special=True)
    ends = sorted(tokenizer.end_tokens)
    # A token without any bytes cannot be written in any way. Where the file names no end of an answer the library adds
    # one, beyond the model's tokens.
    encoder = _Encoder(tokenizer, pieces, [token for token in special if pieces[token]], ends)
    encoder.vocabulary = LLTokenizer(TokenizerWrapper(encoder), eos_token=ends or None)
    return Vocabulary(encoder.vocabulary, {pieces[t].decode("utf-8", "replace"): t for t in encoder.special_token_ids})


class _Encoder:
    """What llguidance asks of a tokenizer: the tokens of text that a grammar forces, as the model is used to see them.

    They must have exactly the bytes of the text. A tokenizer that puts a space before every text is asked with a new line
    before it, and the surplus is taken off; where that fails, the longest token is taken each time.
    """

    def __init__(self, tokenizer: Tokenizer, pieces: list[bytes], special: list[int], ends: list[int]) -> None:
        self.vocabulary: LLTokenizer | None = None
        self.tokens = pieces
        self.special_token_ids = special
        self.eos_token_id = ends[0] if ends else None
        self.bos_token_id = None
        self._tokenizer = weakref.ref(tokenizer)  # which is the key that everything here is kept under
        self._lead = next((lead for lead in (b"", b"\n") if self._ask(lead, b"test") is not None), None)
        self._last: tuple[bytes, list[int], list[int]] = (b"", [], [])

    def __call__(self, text: bytes) -> list[int]:
        if len(text) < LONG_TEXT:
            return self._encode(text)
        whole, tokens, begins = self._last
        if whole.endswith(text):
            # The same text after one more token of it: encoding it again at every token would cost its length squared.
            index = bisect_left(begins, len(whole) - len(text))
            if begins[index] == len(whole) - len(text):
                return tokens[index:]
        tokens = self._encode(text)
        self._last = text, tokens, list(accumulate((len(self.tokens[t]) for t in tokens), initial=0))
        return tokens

    def _encode(self, text: bytes) -> list[int]:
        found = None if self._lead is None else self._ask(self._lead, text)
        if found is None:
            found = [] if self.vocabulary is None else self.vocabulary.greedy_tokenize(text.decode())
        return found

    def _ask(self, lead: bytes, text: bytes) -> list[int] | None:
        tokenizer = self._tokenizer()
        if tokenizer is None:
            return None
        found = tokenizer.encode((lead + text).decode(), add_special=False, parse_special=False)
        surplus, begin = sum(len(self.tokens[t]) for t in found) - len(text), 0
        while surplus > 0 and begin < len(found):
            surplus -= len(self.tokens[found[begin]])
            begin += 1
        return found[begin:] if b"".join(self.tokens[t] for t in found[begin:]) == text else None


# Compilation.


def compile_grammar(vocabulary: Vocabulary, grammar: Grammar) -> Compiled:
    """Errors: BadRequest saying what is wrong with the grammar."""
    try:
        matcher = guarded(
            lambda: LLMatcher(vocabulary.tokens, _source(grammar, vocabulary.controls), log_level=0, limits=_limits())
        )
        raise_error(matcher)
        for warning in matcher.get_grammar_warnings():
            log.warning("a grammar is followed only in part: %s", one_line(warning))
        bits = np.zeros((vocabulary.tokens.vocab_size + 31) // 32, np.uint32)
        fill(matcher, bits)
    except GrammarError as error:
        raise BadRequest(f"{_INVALID[grammar.kind]}: {error}") from error
    bits.flags.writeable = False
    return Compiled(matcher, bits)


def _limits() -> LLParserLimits:
    return LLParserLimits(
        max_items_in_row=10_000,  # an object with n properties that may be left out needs 4 n
        max_lexer_states=100_000,  # half a kilobyte each
        verbose_errors=False,
    )


def _source(grammar: Grammar, controls: dict[str, int]) -> str:
    """The grammar as llguidance reads it; with thinking before the answer where the model is allowed one."""
    if not grammar.thinking_end:
        return _answer(grammar)
    if grammar.kind == "lark":
        answer = f"%lark {{\n{grammar.text}\n}}"
    else:
        inner = json.loads(_answer(grammar))["grammars"][0]
        is_schema = inner["json_schema"] is not None
        answer = f"%json {json.dumps(inner['json_schema'])}" if is_schema else f"%lark {{\n{inner['lark_grammar']}\n}}"
    end = controls.get(grammar.thinking_end)
    thinking = f"free? <[{end}]>" if end is not None else "free_to_end"
    if grammar.thinking_begin:  # else the prompt has begun thinking, and it must be ended
        begin = controls.get(grammar.thinking_begin)
        thinking = f"(space? {_literal(grammar.thinking_begin) if begin is None else f'<[{begin}]>'} {thinking})?"
    return (
        f"start: {thinking} space? answer\n"
        "free: /(.|\\n)+/\n"
        f"free_to_end[lazy]: /(.|\\n)*{_literal(grammar.thinking_end)[1:]}\n"
        "space: /[ \\t\\r\\n]{1,8}/\n"
        f"answer: {answer}\n"
    )


def _answer(grammar: Grammar) -> str:
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(grammar.text)
    # Keywords that the library does not know are passed over with a warning, as other servers pass over them.
    options: Any = {"whitespace_pattern": JSON_SPACE, "lenient": True}
    schema = JSON_OBJECT if grammar.kind == "json" else json.dumps(closed(json.loads(grammar.text)))
    return LLMatcher.grammar_from_json_schema(schema, options)


def _literal(text: str) -> str:
    """A regular expression of Lark for exactly this text."""
    return "/" + "".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text) + "/"


def check(grammar: Grammar) -> None:
    """Refuse what would take too long or too much memory to compile.

    Errors: BadRequest.
    """
    invalid, size = _INVALID[grammar.kind], len(grammar.text.encode("utf-8", "replace"))
    limit = MAX_SCHEMA_BYTES if grammar.kind == "json_schema" else MAX_TEXT_BYTES
    if size > limit:
        raise BadRequest(f"{invalid}: it has {size} bytes, more than {limit}")
    if grammar.kind == "lark" and grammar.text.lstrip().startswith("{"):
        raise BadRequest(f"{invalid}: it must begin with a rule or a directive")
    try:
        states = math.lcm(*{n for schema in _schemas(grammar) for n in _multiples(schema)})
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{invalid}: {one_line(str(error))}") from error
    if not 0 < states <= MAX_MULTIPLE:
        raise BadRequest(f"{invalid}: multipleOf must be above 0, and all of them together divide a number up to {MAX_MULTIPLE}")


def _schemas(grammar: Grammar) -> Iterator[Any]:
    decoder = json.JSONDecoder(parse_float=Decimal)
    if grammar.kind == "json_schema":
        schema = decoder.decode(grammar.text)
        if not isinstance(schema, dict):
            raise ValueError("a schema is a JSON object")
        yield schema
    elif grammar.kind == "lark":
        for part in grammar.text.split("%json")[1:]:
            yield decoder.raw_decode(part.lstrip())[0]


def _multiples(schema: Any) -> Iterator[int]:
    """The numbers of all multipleOf, without their powers of ten."""
    stack = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            value = node.get("multipleOf")
            if isinstance(value, int | Decimal) and not isinstance(value, bool):
                digits = "".join(map(str, Decimal(value).as_tuple().digits)).rstrip("0")
                yield int(digits[:10] or "0")
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)


_INVALID = {
    "json": "invalid format",
    "json_schema": "invalid JSON schema in format",
    "regex": "invalid regex",
    "lark": "invalid Lark grammar",
}


_places = threading.BoundedSemaphore(MAX_COMPILING)
_stack_size_lock = threading.Lock()


def _bounded(work: Callable[[], T], name: str) -> T:
    """Do it on a thread with a deep stack, and wait for it as long as that is reasonable.

    Errors: those of the work; BadRequest when it takes too long; Overloaded when there is no place for it.
    """
    if not _places.acquire(timeout=COMPILE_S):
        raise Overloaded("too many grammars are being compiled, try again")
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is waited for
            done.set_exception(error)
        finally:
            _places.release()

    with _stack_size_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=run, name="grammar", daemon=True).start()
        finally:
            threading.stack_size(before)
    try:
        return done.result(COMPILE_S)
    except TimeoutError as error:
        raise BadRequest(f"{name}: it is not compiled within {COMPILE_S:g} s, make it simpler") from error
