"""What grammars allow, what is refused, and that no text makes compiling them slow, large or fatal."""

from __future__ import annotations

import gc
import json
import logging
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits
from tests.patience import PATIENCE_S
from tests.unit.sample.vocabulary import WordTokenizer

from puna.errors import BadRequest, Overloaded
from puna.sample import grammar as grammar_module
from puna.sample.grammar import Grammars, grammars_of
from puna.sample.matcher import GrammarError, Matcher, guarded, masked, start_masks
from puna.wire import Grammar

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> WordTokenizer:
    return WordTokenizer()


@pytest.fixture
def grammars(tokenizer: WordTokenizer) -> Grammars:
    return Grammars(tokenizer.as_tokenizer())


def schema(value: Any) -> Grammar:
    return Grammar(kind="json_schema", text=json.dumps(value))


def allowed(matcher: Matcher) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little")).tolist())


def advance(matcher: Matcher, token: int) -> None:
    matcher.advance(token)
    if not matcher.is_complete:
        matcher.compute()


def write(matcher: Matcher, text: str, tokenizer: WordTokenizer) -> str:
    """Write as much of the text as the grammar allows, byte by byte."""
    for n, byte in enumerate(text.encode()):
        if matcher.is_complete or byte not in allowed(matcher):
            return text.encode()[:n].decode("utf-8", "replace")
        advance(matcher, byte)
    return text


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (schema(PERSON), '{"name": "é日本 \\n\\u0001", "age": -12}'),
        (schema(PERSON), '{\n  "name": "x",\n  "age": 0\n}'),
        (schema({"enum": ["é", "è"]}), '"è"'),
        (schema({"type": "array", "items": {"$ref": "#"}}), "[[], [[]]]"),
        (Grammar(kind="json"), '{"a": [1, 2.5e-3, null, true, {"b": "c"}]}'),
        (Grammar(kind="regex", text=r"(yes|no), \d{4}-\d{2}"), "no, 2026-08"),
        (Grammar(kind="regex", text='a/b"c'), 'a/b"c'),
        (Grammar(kind="lark", text='start: WORD ("," WORD)* "."\nWORD: /[a-z]+/'), "ab,c."),
        (Grammar(kind="lark", text='start: "call " %json {"type": "object"}'), 'call {"x": 1}'),
    ],
)
def test_what_follows_the_grammar_can_be_written(
    grammars: Grammars, tokenizer: WordTokenizer, grammar: Grammar, text: str
) -> None:
    matcher = grammars.matcher(grammar)
    rest = text.encode()
    while rest:
        fitting = [t for t in allowed(matcher) if (piece := tokenizer.piece(t)) and rest.startswith(piece)]
        assert fitting, f"nothing that is allowed continues with {rest!r}"
        token = max(fitting, key=lambda t: len(tokenizer.piece(t)))
        rest = rest[len(tokenizer.piece(token)) :]
        advance(matcher, token)
    assert matcher.is_complete or tokenizer.end in allowed(matcher)


@pytest.mark.parametrize(
    ("grammar", "text", "written"),
    [
        (Grammar(kind="json"), "[1]", ""),
        (schema({"properties": {"a": {}}}), "[1]", ""),
        (Grammar(kind="json"), "3", ""),
        (Grammar(kind="json"), '{"a": 1} ', '{"a": 1}'),
        (Grammar(kind="json"), '{"a": +1}', '{"a": '),
        (Grammar(kind="json"), '{"a\n', '{"a'),
        (Grammar(kind="json"), '{"a": 1}}', '{"a": 1}'),
        (Grammar(kind="regex", text="[ab]{2}c?"), "abd", "ab"),
    ],
)
def test_what_does_not_cannot(grammars: Grammars, tokenizer: WordTokenizer, grammar: Grammar, text: str, written: str) -> None:
    assert write(grammars.matcher(grammar), text, tokenizer) == written


def test_white_space_has_an_end(grammars: Grammars, tokenizer: WordTokenizer) -> None:
    matcher = grammars.matcher(Grammar(kind="json"))
    assert len(write(matcher, "{\n" + " " * 100, tokenizer)) == 2 + 40


def test_control_tokens_are_no_text(grammars: Grammars, tokenizer: WordTokenizer) -> None:
    matcher = grammars.matcher(schema({"type": "string"}))
    assert not {tokenizer.end, tokenizer.end + 1} & allowed(matcher)
    advance(matcher, ord('"'))
    assert not {tokenizer.end, tokenizer.end + 1} & allowed(matcher)
    for character in b"<|end|>":
        assert character in allowed(matcher)  # as plain characters they are text like any other
        advance(matcher, character)
    advance(matcher, ord('"'))
    assert matcher.is_complete


def test_the_end_is_allowed_where_the_text_may_end(grammars: Grammars, tokenizer: WordTokenizer) -> None:
    matcher = grammars.matcher(Grammar(kind="regex", text="a{2,4}"))
    ends = []
    for _ in range(3):
        ends.append(tokenizer.end in allowed(matcher))
        advance(matcher, ord("a"))
    assert [*ends, tokenizer.end in allowed(matcher)] == [False, False, True, True]
    advance(matcher, ord("a"))
    assert matcher.is_complete


def test_a_vocabulary_without_an_end() -> None:
    tokenizer = WordTokenizer(controls=[])
    matcher = grammars_of(tokenizer.as_tokenizer()).matcher(Grammar(kind="regex", text="ab?"))
    advance(matcher, ord("a"))
    row = masked(np.zeros(tokenizer.n_tokens, np.float32), matcher.allowed())
    assert np.flatnonzero(row == 0).tolist() == [ord("b")]


@pytest.mark.parametrize("kind", ["json", "json_schema", "regex", "lark"])
def test_a_thought_is_free_and_then_the_answer_is_not(grammars: Grammars, tokenizer: WordTokenizer, kind: Any) -> None:
    texts = {"json": "", "json_schema": json.dumps(PERSON), "regex": r"\{[a]+\}", "lark": 'start: "{" WORD "}"\nWORD: /a+/'}
    begun = Grammar(kind=kind, text=texts[kind], thinking_end="</think>")
    matcher = grammars.matcher(begun)
    assert write(matcher, 'anything {"goes" </thin\n\n</think>\n\nx', tokenizer).endswith("</think>\n\n")
    assert tokenizer.end not in allowed(matcher)
    assert ord("{") in allowed(matcher)
    own = Grammar(kind=kind, text=texts[kind], thinking_begin="<think>", thinking_end="</think>")
    assert write(grammars.matcher(own), "<think>why?</think>{", tokenizer) == "<think>why?</think>{"
    assert write(grammars.matcher(own), "{", tokenizer) == "{"
    assert write(grammars.matcher(own), "x", tokenizer) == ""


def test_a_thought_between_control_tokens(grammars: Grammars, tokenizer: WordTokenizer) -> None:
    """Such tags are no text: the tokens themselves must come."""
    turn = tokenizer.end + 1
    begun = grammars.matcher(Grammar(kind="regex", text="ab", thinking_end="<|turn|>"))
    for token in (ord("h"), ord("m"), ord("<")):
        assert {turn, token} <= allowed(begun)
        advance(begun, token)
    assert tokenizer.end not in allowed(begun)
    own = grammars.matcher(Grammar(kind="regex", text="ab", thinking_begin="<|turn|>", thinking_end="</think>"))
    assert {turn, ord("a")} <= allowed(own)
    for matcher in (begun, own):
        advance(matcher, turn)
    assert ord("b") not in allowed(begun)
    assert write(begun, "\nab", tokenizer) == "\nab"
    assert begun.is_complete
    assert write(own, "x</think>ab", tokenizer) == "x</think>ab"


# What is refused.


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("json_schema", "{", "invalid JSON schema in format"),
        ("json_schema", "[]", "is a JSON object"),
        ("json_schema", '{"type": "foo"}', "foo"),
        ("json_schema", '{"type": "object", "properties": []}', "properties must be an object"),
        ("json_schema", '{"$ref": "http://127.0.0.1:1/x"}', "127.0.0.1"),
        ("json_schema", '{"$ref": "#"}', "no text"),
        ("json_schema", '{"minimum": NaN}', "invalid JSON schema in format"),
        ("json_schema", '{"required": ["a"], "properties": {"a": false}}', "unsatisfiable"),
        ("json_schema", '{"multipleOf": 999983}', "multipleOf"),
        ("json_schema", '{"allOf": [{"multipleOf": 97}, {"multipleOf": 89}, {"multipleOf": 83}]}', "multipleOf"),
        ("json_schema", '{"multipleOf": 0}', "multipleOf"),
        ("json_schema", json.dumps({"const": "x" * 300_000}), "300013 bytes, more than"),
        ("regex", "(", "unclosed group"),
        ("regex", r"[^\s\S]", "no text"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", "a" * 40_000, "more than"),
        ("lark", "", "Empty grammar"),
        ("lark", "start: foo", "foo"),
        ("lark", "start: start", "no text"),
        ("lark", '{"grammars": [{"json_schema": {}}]}', "must begin with a rule"),
        ("lark", 'start: %json {"\\u006dultipleOf": 999983}', "multipleOf"),
        ("lark", "start: %json {", "invalid Lark grammar"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(grammars: Grammars, kind: Any, text: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        grammars.matcher(Grammar(kind=kind, text=text))
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


def chain(n: int, link: Any) -> dict[str, Any]:
    defs = {f"a{i}": link(f"#/$defs/a{i + 1}") if i < n else {"type": "string"} for i in range(n + 1)}
    return {"$defs": defs, "$ref": "#/$defs/a0"}


HOSTILE: dict[str, Grammar] = {
    "deep arrays": Grammar(kind="json_schema", text='{"items":' * 20_000 + "{}" + "}" * 20_000),
    "deep values": Grammar(kind="json_schema", text="[" * 100_000),
    "references in a row": schema(chain(3000, lambda ref: {"$ref": ref})),
    "objects in a row": schema(chain(3000, lambda ref: {"type": "object", "properties": {"x": {"$ref": ref}}})),
    "choices in a row": schema(chain(2000, lambda ref: {"anyOf": [{"$ref": ref}, {"type": "null"}]})),
    "doubling": schema(chain(40, lambda ref: {"allOf": [{"$ref": ref}, {"$ref": ref}]})),
    "many choices of many": schema(
        {"allOf": [{"anyOf": [{"properties": {f"p{i}_{j}": {"type": "string"}}} for j in range(4)]} for i in range(12)]}
    ),
    "endless digits": schema({"type": "integer", "minimum": -(10**300), "maximum": 10**300}),
    "a length of a billion": schema({"type": "string", "minLength": 10**9}),
    "a million items": schema({"type": "array", "items": {}, "minItems": 10**6}),
    "many properties": schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}),
    "nested pattern": schema({"type": "string", "pattern": "(x{1,1000}){1,1000}"}),
    "exponential automaton": Grammar(kind="regex", text="(.*a.{30})*b"),
    "repeated repeats": Grammar(kind="regex", text="((a{1,1000}){1,1000}){1,1000}"),
    "deep groups": Grammar(kind="regex", text="(" * 15_000 + "a" + ")" * 15_000),
    "rules in a row": Grammar(kind="lark", text="start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(2000)) + 'r2000: "a"'),
    "terminals in a row": Grammar(
        kind="lark", text="start: R0\n" + "".join(f"R{i}: R{i + 1}\n" for i in range(2000)) + 'R2000: "a"'
    ),
    "doubling terminals": Grammar(
        kind="lark", text="start: A39\nA0: /ab/\n" + "".join(f"A{i}: A{i - 1} A{i - 1}\n" for i in range(1, 40))
    ),
    "groups in rules": Grammar(
        kind="lark",
        text="start: r0\n" + "".join(f'r{i}: (((((((("b" r{i + 1})))))))*)?\n' for i in range(800)) + 'r800: "a"',
    ),
    "ambiguous": Grammar(kind="lark", text='start: x\nx: x x | x x x | "a" | ""'),
    "complement": Grammar(kind="lark", text="start: A\nA: ~/(.*a.{20})/"),
    "intersection": Grammar(kind="lark", text="start: A\nA: /(.*a.{12}.*)/ & /(.*b.{12}.*)/ & /(.*c.{12}.*)/"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_bounded(grammars: Grammars, name: str) -> None:
    """Compiled or refused within seconds, and each step of what was compiled is quick or the end of that request."""
    begin = time.monotonic()
    try:
        matcher = grammars.matcher(HOSTILE[name])
    except BadRequest:
        assert time.monotonic() - begin < PATIENCE_S / 4
        return
    random = np.random.default_rng(0)
    for _ in range(30):
        try:
            token = int(random.choice(sorted(allowed(matcher))))
            if token in (WordTokenizer().end, WordTokenizer().end + 1) or matcher.is_complete:
                break
            advance(matcher, token)
        except GrammarError:
            break
    assert time.monotonic() - begin < PATIENCE_S / 2


@settings(max_examples=150)
@given(
    kind=st.sampled_from(["json_schema", "regex", "lark"]),
    text=st.one_of(
        st.text(max_size=60),
        st.text('start:ABab"/|()[]{}*+?~&%json<>\\.,0123456789 \n', max_size=80).map(lambda t: f"start: {t}"),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=5),
            lambda inner: (
                st.dictionaries(
                    st.sampled_from(
                        ["type", "items", "properties", "anyOf", "enum", "$ref", "pattern", "multipleOf", "minLength"]
                    ),
                    inner,
                )
                | st.lists(inner, max_size=3)
            ),
        ).map(json.dumps),
    ),
)
def test_any_text_is_compiled_or_refused(kind: Any, text: str) -> None:
    try:
        matcher = FUZZED.matcher(Grammar(kind=kind, text=text))
    except BadRequest:
        return
    assert allowed(matcher)


FUZZ_TOKENIZER = WordTokenizer()
FUZZED = Grammars(FUZZ_TOKENIZER.as_tokenizer())


def test_what_is_not_enforced_is_said(grammars: Grammars, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        grammars.matcher(schema({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}))
    assert "uniqueItems" in caplog.text


def test_a_grammar_that_becomes_too_much_ends_only_its_matcher(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    other = grammars.matcher(schema(PERSON))
    monkeypatch.setattr(grammar_module, "_limits", lambda: LLParserLimits(max_items_in_row=100, verbose_errors=False))
    matcher = grammars.matcher(schema({"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(50)}}))
    with pytest.raises(GrammarError, match="items"):
        advance(matcher, ord("{"))
    matcher.compute()
    with pytest.raises(GrammarError):
        matcher.allowed()
    assert ord("{") in allowed(other)


# Compiling.


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Grammar]:
    seen: list[Grammar] = []
    real = grammar_module.compile_grammar

    def counting(vocabulary: Any, grammar: Grammar) -> Any:
        seen.append(grammar)
        return real(vocabulary, grammar)

    monkeypatch.setattr(grammar_module, "compile_grammar", counting)
    return seen


def test_a_grammar_is_compiled_once_and_its_matchers_are_apart(
    grammars: Grammars, tokenizer: WordTokenizer, compiled: list[Grammar]
) -> None:
    first, second = grammars.matcher(schema(PERSON)), grammars.matcher(schema(PERSON))
    advance(first, ord("{"))
    assert ord("{") in allowed(second)
    assert ord("{") not in allowed(first)
    assert len(compiled) == 1


def test_the_least_recently_used_grammars_are_forgotten(
    grammars: Grammars, compiled: list[Grammar], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "CACHED_BYTES", 100)
    a, b, c = (Grammar(kind="regex", text=letter * 40) for letter in "abc")
    for grammar in (a, b, a, c, a, b):
        grammars.matcher(grammar)
    assert compiled == [a, b, c, b]


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Compiling lasts until the event is set."""
    go = threading.Event()
    monkeypatch.setattr(grammar_module, "COMPILE_S", 0.05)
    monkeypatch.setattr(grammar_module, "compile_grammar", lambda _vocabulary, _grammar: go.wait(PATIENCE_S))
    yield go
    go.set()


def test_a_compilation_without_end_is_given_up_and_few_run_at_once(grammars: Grammars, stuck: threading.Event) -> None:
    for number in range(grammar_module.MAX_COMPILING):
        with pytest.raises(BadRequest, match="make it simpler"):
            grammars.matcher(Grammar(kind="regex", text=str(number)))
    with pytest.raises(Overloaded, match="try again"):
        grammars.matcher(Grammar(kind="regex", text="x"))
    stuck.set()
    places = [grammar_module._places.acquire(timeout=PATIENCE_S) for _ in range(grammar_module.MAX_COMPILING)]
    assert all(places), "a place was not given back"
    for _ in places:
        grammar_module._places.release()


def test_a_panic_of_the_library_is_an_error_like_any_other() -> None:
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})

    def fail() -> None:
        raise panic("index out of bounds\nat lib.rs")

    with pytest.raises(GrammarError, match="index out of bounds at"):
        guarded(fail)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guarded(interrupt)


def test_a_vocabulary_goes_with_its_tokenizer() -> None:
    tokenizer = WordTokenizer()
    grammars = grammars_of(tokenizer.as_tokenizer())
    assert grammars_of(tokenizer.as_tokenizer()) is grammars
    matcher = grammars.matcher(schema(PERSON))
    watched = weakref.ref(tokenizer)
    del tokenizer, grammars
    gc.collect()
    assert watched() is None
    assert ord("{") in allowed(matcher)


# Text that a grammar forces.


@pytest.mark.parametrize("lead", [b"", b" "])
def test_forced_text_is_tokenized_as_the_model_knows_it(lead: bytes) -> None:
    """A tokenizer that puts a space before every text must not put one into the answer."""
    tokenizer = WordTokenizer(lead=lead)
    matcher = grammars_of(tokenizer.as_tokenizer()).matcher(schema({"const": {"name": 1}}))
    pieces = []
    while not matcher.is_complete:
        token = max(allowed(matcher), key=lambda t: len(tokenizer.piece(t)))
        pieces.append(tokenizer.piece(token))
        advance(matcher, token)
    assert b"name" in pieces
    assert json.loads(b"".join(pieces)) == {"name": 1}


def test_long_forced_text_is_encoded_once() -> None:
    tokenizer = WordTokenizer()
    matcher = grammars_of(tokenizer.as_tokenizer()).matcher(schema({"const": "the name of the age " * 300}))
    begin = tokenizer.n_encoded
    steps = 0
    while not matcher.is_complete:
        advance(matcher, max(allowed(matcher), key=lambda t: len(tokenizer.piece(t))))
        steps += 1
    assert steps > 1000
    assert tokenizer.n_encoded - begin < 60


# Masks.


def test_a_mask_takes_nothing_but_what_is_not_allowed(grammars: Grammars, tokenizer: WordTokenizer) -> None:
    matcher = grammars.matcher(Grammar(kind="regex", text="[bc]x"))
    row = np.arange(tokenizer.n_tokens + 100, dtype=np.float32)  # the model has more rows than the vocabulary has tokens
    before = row.copy()
    result = masked(row, matcher.allowed())
    assert np.array_equal(row, before)
    assert np.flatnonzero(result > -np.inf).tolist() == [ord("b"), ord("c")]
    assert result[ord("b")] == ord("b")


def test_masks_are_computed_elsewhere_and_waited_for(grammars: Grammars) -> None:
    matchers = [grammars.matcher(Grammar(kind="regex", text="a[bc]")) for _ in range(5)]
    for matcher in matchers:
        matcher.advance(ord("a"))
    start_masks(matchers)
    assert all({ord("b"), ord("c")} <= allowed(matcher) for matcher in matchers)
    for matcher in matchers:
        matcher.advance(ord("b"))
    assert all(matcher.is_complete for matcher in matchers)
