"""Grammars and logprobs through the whole engine, on tiny models whose weights are random: left alone they write nonsense."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from puna.errors import BadRequest
from puna.runner.engine import Engine
from puna.sample.matcher import GrammarError, Matcher
from puna.wire import (
    CompletionReply,
    CompletionRequest,
    Done,
    Failed,
    Grammar,
    LoadOptions,
    LoadRequest,
    Piece,
    SamplingOptions,
    TokenLogprob,
)
from tests.oracle import Oracle
from tests.patience import PATIENCE_S, wait_until
from tests.tiny import write_llama

GREEDY = SamplingOptions(temperature=0)
WILD = SamplingOptions(temperature=1.5, top_k=0, top_p=1.0, seed=7)
PROMPTS = ["the sea", "once upon a time there was a little girl", "why is the sky blue", "x"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    return {
        "bpe": write_llama(folder / "bpe.gguf", seed=3, n_layers=1, n_embd=64, n_ff=64, n_ctx=8192),
        "spm": write_llama(folder / "spm.gguf", seed=4, n_layers=1, n_embd=64, n_ff=64, n_ctx=8192, vocab="spm"),
    }


def started(path: Path, **options: Any) -> Engine:
    engine = Engine(path)
    assert engine.load(LoadRequest(options=LoadOptions(n_threads=1, **options))).success
    wait_until(lambda: engine.health().status == "ready")
    return engine


@pytest.fixture(scope="module")
def engines(models: dict[str, Path]) -> Iterator[dict[str, Engine]]:
    engines = {name: started(path, n_ctx=4096, n_parallel=8) for name, path in models.items()}
    yield engines
    for engine in engines.values():
        engine.close()


@pytest.fixture
def engine(engines: dict[str, Engine]) -> Engine:
    return engines["bpe"]


class Answer:
    def __init__(self, engine: Engine, prompt: str = PROMPTS[0], **fields: Any) -> None:
        self.text = ""
        self.pieces: list[Piece] = []
        self.end: Done | Failed | None = None
        self._ended = threading.Event()
        given = {"sampling": GREEDY, "n_predict": 3000, "shift": False, **fields}
        self.handle = engine.submit(CompletionRequest(prompt=prompt, **given), self._take)

    def _take(self, reply: CompletionReply) -> None:
        if isinstance(reply, Piece):
            self.pieces.append(reply)
            self.text += reply.content
        else:
            self.end = reply
            self._ended.set()

    def wait(self) -> Answer:
        assert self._ended.wait(PATIENCE_S)
        return self

    def done(self) -> Done:
        self.wait()
        assert isinstance(self.end, Done), self.end
        return self.end

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [entry for piece in self.pieces for entry in piece.logprobs]


def schema(value: Any) -> Grammar:
    return Grammar(kind="json_schema", text=json.dumps(value))


# Schemas.

NAMES = st.sampled_from(["name", "age", "ünïcode", "a b", 'quo"te', "x", "the answer", "日本"])
LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.integers(0, 12).map(lambda n: {"type": "string", "maxLength": n}),
    st.integers(1, 6).map(lambda n: {"type": "string", "minLength": n, "maxLength": n}),
    st.tuples(st.integers(-500, 0), st.integers(0, 100000)).map(lambda r: {"type": "integer", "minimum": r[0], "maximum": r[1]}),
    st.sampled_from([{"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 5}]),
    st.lists(st.one_of(st.integers(-9, 9), st.text(max_size=6), st.none()), min_size=1, max_size=4, unique_by=repr).map(
        lambda values: {"enum": values}
    ),
    st.sampled_from([{"type": "string", "pattern": pattern} for pattern in (r"^[a-z]{2,5}$", r"^\d{4}-\d{2}$", r"^(yes|no|é)$")]),
    st.sampled_from([{"type": "string", "format": name} for name in ("date", "time", "uuid", "ipv4")]),
    st.just({"const": {"deep": [1, "two", None]}}),
)


def arrays(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.tuples(items, st.integers(0, 2), st.integers(0, 2)).map(
        lambda t: {"type": "array", "items": t[0], "minItems": t[1], "maxItems": t[1] + t[2]}
    )


def objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def build(properties: dict[str, Any], flags: list[bool]) -> dict[str, Any]:
        required = [name for name, flag in zip(properties, flags, strict=False) if flag]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    return st.builds(build, st.dictionaries(NAMES, values, max_size=4), st.lists(st.booleans(), min_size=4, max_size=4))


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(arrays(inner), objects(inner), st.lists(inner, min_size=1, max_size=3).map(lambda s: {"anyOf": s})),
    max_leaves=6,
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(schemas=st.lists(SCHEMAS, min_size=4, max_size=4), vocabulary=st.sampled_from(["bpe", "spm"]))
def test_whatever_the_schema_the_answer_is_valid(engines: dict[str, Engine], schemas: list[Any], vocabulary: str) -> None:
    """25 times four schemas at once, greedily and wildly sampled."""
    answers = [
        Answer(engines[vocabulary], prompt, grammar=schema(wanted), sampling=GREEDY if number % 2 else WILD)
        for number, (prompt, wanted) in enumerate(zip(PROMPTS, schemas, strict=True))
    ]
    for answer, wanted in zip(answers, schemas, strict=True):
        assert answer.done().reason == "stop", answer.text[-200:]
        jsonschema.validate(json.loads(answer.text), wanted)


@pytest.mark.parametrize("vocabulary", ["bpe", "spm"])
@pytest.mark.parametrize(
    ("kind", "text", "pattern"),
    [
        ("regex", r"(yes|no), \d{2,4}!", r"(yes|no), \d{2,4}!"),
        ("regex", "the quick brown fox", "the quick brown fox"),
        ("lark", 'start: WORD ("," WORD){1,3} "."\nWORD: /[a-zé]{1,6}/', r"[a-zé]{1,6}(,[a-zé]{1,6}){1,3}\."),
    ],
)
def test_regular_expressions_and_lark(engines: dict[str, Engine], vocabulary: str, kind: Any, text: str, pattern: str) -> None:
    answers = [Answer(engines[vocabulary], grammar=Grammar(kind=kind, text=text), sampling=s) for s in (GREEDY, WILD)]
    for answer in answers:
        assert answer.done().reason == "stop"
        assert re.fullmatch(pattern, answer.text)


def test_json_without_a_schema_is_an_object(engine: Engine) -> None:
    """A random model may write on for ever; what it has written is the beginning of an object."""
    answer = Answer(engine, grammar=Grammar(kind="json"), n_predict=60)
    answer.done()
    assert answer.text.startswith("{")


def test_the_end_of_the_grammar_is_the_end_also_for_who_ignores_ends(engine: Engine) -> None:
    answer = Answer(engine, grammar=schema({"enum": ["a", "b"]}), ignore_eos=True)
    assert answer.done().reason == "stop"
    assert answer.text in ('"a"', '"b"')


def test_neighbours_say_what_they_say_alone(engine: Engine) -> None:
    alone = []
    for prompt in PROMPTS:
        answer = Answer(engine, prompt, n_predict=40, ignore_eos=True)
        answer.done()
        alone.append(answer.text)
    wanted = {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 3, "maxItems": 3}
    constrained = [Answer(engine, prompt, grammar=schema(wanted), sampling=WILD) for prompt in PROMPTS]
    free = [Answer(engine, prompt, n_predict=40, ignore_eos=True) for prompt in PROMPTS]
    for answer in (*free, *constrained):
        answer.done()
    assert [answer.text for answer in free] == alone
    for answer in constrained:
        jsonschema.validate(json.loads(answer.text), wanted)


def test_a_seed_gives_the_same_constrained_text_in_any_company(engine: Engine) -> None:
    grammar = schema({"type": "string", "minLength": 20, "maxLength": 40})
    alone = Answer(engine, grammar=grammar, sampling=WILD)
    alone.done()
    company = [Answer(engine, prompt, n_predict=30) for prompt in PROMPTS[1:]]
    again = Answer(engine, grammar=grammar, sampling=WILD)
    for answer in (again, *company):
        answer.done()
    assert again.text == alone.text


def test_penalties_and_stop_sequences_apply_with_a_grammar(engine: Engine) -> None:
    sampling = SamplingOptions(temperature=0, repeat_penalty=1.5, frequency_penalty=2.0, presence_penalty=1.0)
    grammar = Grammar(kind="regex", text="[a-c]{60}")
    plain, penalized = Answer(engine, grammar=grammar), Answer(engine, grammar=grammar, sampling=sampling)
    assert plain.done().reason == penalized.done().reason == "stop"
    assert len(plain.text) == len(penalized.text) == 60
    assert plain.text != penalized.text
    stopped = Answer(engine, grammar=grammar, stop=[plain.text[10:14]])
    assert stopped.done().reason == "stop"
    assert stopped.text == plain.text[: plain.text.index(plain.text[10:14])]


def test_a_thought_comes_before_the_answer(engine: Engine) -> None:
    grammar = Grammar(kind="json_schema", text='{"enum": [1, 2]}', thinking_begin="a", thinking_end="e")
    answers = [Answer(engine, prompt, grammar=grammar, sampling=WILD) for prompt in PROMPTS]
    assert {answer.done().reason for answer in answers} == {"stop"}
    for answer in answers:
        assert re.fullmatch(r"\s*a[^e]*e\s*[12]|\s*[12]", answer.text)
    begun = Answer(engine, grammar=Grammar(kind="regex", text="xy", thinking_end="e"), sampling=WILD)
    begun.done()
    assert re.fullmatch(r"[^e]*e\s*xy", begun.text)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar(kind="json_schema", text='{"type": "foo"}'), "invalid JSON schema in format: .*foo"),
        (Grammar(kind="regex", text="("), "invalid regex: .*unclosed group"),
        (Grammar(kind="lark", text="start: nothing"), "invalid Lark grammar: .*nothing"),
    ],
)
def test_a_bad_grammar_is_refused_at_once(engine: Engine, grammar: Grammar, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        Answer(engine, grammar=grammar)


def test_an_error_in_a_grammar_fails_only_its_request(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    free_alone = Answer(engine, n_predict=40, ignore_eos=True)
    free_alone.done()
    real = Matcher.compute
    n_calls = 0

    def compute(self: Matcher) -> None:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 5:
            self._error = GrammarError("too complex")
        else:
            real(self)

    monkeypatch.setattr(Matcher, "compute", compute)
    broken = Answer(engine, grammar=Grammar(kind="regex", text="[a-z]{30}"))
    free = Answer(engine, n_predict=40, ignore_eos=True)
    assert isinstance(broken.wait().end, Failed)
    assert (broken.end.status, broken.end.error) == (400, "too complex")  # type: ignore[union-attr]
    free.done()
    assert free.text == free_alone.text


def test_cancelling_constrained_requests_leaves_nothing(engine: Engine) -> None:
    answers = [Answer(engine, grammar=Grammar(kind="regex", text="[a-z]{2000}")) for _ in range(8)]
    wait_until(lambda: all(a.text for a in answers))
    for answer in answers:
        answer.handle.cancel()
    assert {answer.done().reason for answer in answers} == {"cancelled"}
    wait_until(lambda: engine.health().active == 0)


# Logprobs.


@pytest.fixture(scope="module")
def exact(models: dict[str, Path]) -> Iterator[Engine]:
    """Attends as libllama is asked to: in one call ggml sums in half precision, and Puna's own kernel does not."""
    engine = started(models["bpe"], n_ctx=512, flash_attention=False)
    yield engine
    engine.close()


@pytest.mark.parametrize("sampling", [GREEDY, SamplingOptions(temperature=1.2, top_k=5, repeat_penalty=1.3, seed=1)])
def test_logprobs_are_those_of_the_models_own_logits(exact: Engine, models: dict[str, Path], sampling: SamplingOptions) -> None:
    """Whatever chose the token: libllama reads the same tokens and says how likely each was."""
    wanted: Any = {"ignore_eos": True, "logprobs": True, "top_logprobs": 3, "return_tokens": True, "show_control_tokens": True}
    answer = Answer(exact, n_predict=20, sampling=sampling, **wanted)
    done = answer.done()
    entries = answer.logprobs
    assert len(entries) == 20
    with Oracle(models["bpe"], flash_attention=False) as oracle:
        begin = done.prompt_eval_count - 1
        rows = oracle.decode(done.tokens, range(len(done.tokens)), [0] * len(done.tokens), range(begin, begin + 20))
    for row, token, entry in zip(rows.astype(np.float64), done.tokens[-20:], entries, strict=True):
        expected = row - row.max() - np.log(np.exp(row - row.max()).sum())
        assert entry.logprob == pytest.approx(expected[token], abs=1e-3)
        assert [top.logprob for top in entry.top] == pytest.approx(sorted(expected)[:-4:-1], abs=1e-3)
    assert b"".join(entry.text for entry in entries).decode("utf-8", "replace").startswith(answer.text[:5])


def test_a_grammar_does_not_change_what_the_model_thought_likely(engine: Engine) -> None:
    answer = Answer(engine, grammar=Grammar(kind="regex", text="[0-9]{8}"), logprobs=True, top_logprobs=1)
    answer.done()
    assert b"".join(entry.text for entry in answer.logprobs).decode() == answer.text
    assert any(entry.top[0].logprob > entry.logprob for entry in answer.logprobs)


def test_nothing_is_sent_that_nobody_asked_for(engine: Engine) -> None:
    answer = Answer(engine, n_predict=5, ignore_eos=True)
    answer.done()
    assert answer.logprobs == []
