"""What comes before the choice of a token: bans, forced tokens, and the row as the model gave it."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.sample.vocabulary import WordTokenizer

from puna.errors import BadRequest
from puna.runner.step import sampling
from puna.runner.step.sampling import has_number, sample
from puna.runner.tasks.completion import Completion
from puna.sample.choice import sample_batch
from puna.wire import CompletionReply, CompletionRequest, Done, Failed, Grammar, Piece, SamplingOptions, Thinking

TOKENIZER = WordTokenizer()
GREEDY = SamplingOptions(temperature=0)


def ask(**fields: object) -> tuple[Completion, list[CompletionReply]]:
    replies: list[CompletionReply] = []
    given = {"prompt": "x", "sampling": GREEDY, **fields}
    return Completion(CompletionRequest(**given), TOKENIZER.as_tokenizer(), 512, replies.append), replies  # type: ignore[arg-type]


def logits_that_want(*tokens: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """One row per token; after the wanted one the letter "b" is the likeliest."""
    rows = np.zeros((len(tokens), TOKENIZER.n_tokens), np.float32)
    rows[:, ord("b")] = 1
    rows[range(len(tokens)), tokens] = 2
    return rows


def test_who_ignores_the_end_gets_another_token_in_its_place() -> None:
    goes_on, said = ask(ignore_eos=True)
    ends, reply = ask()
    logits = logits_that_want(TOKENIZER.end, TOKENIZER.end)
    before = logits.copy()
    sample(logits, [goes_on, ends])
    assert [piece.content for piece in said if isinstance(piece, Piece)] == ["b"]
    assert isinstance(reply[-1], Done)
    assert reply[-1].reason == "stop"
    assert np.array_equal(logits, before)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 1}, {"temperature": 0, "repeat_penalty": 1.5}, {"top_k": 2}])
def test_a_ban_leaves_the_choice_among_all_others(options: dict[str, float]) -> None:
    """The end is the likeliest at every step, then "x", which penalties make less likely than "b" once it was seen."""
    request, said = ask(prompt="y", ignore_eos=True, sampling=SamplingOptions(**{"seed": 1, **options}))  # type: ignore[arg-type]
    row = np.full((1, TOKENIZER.n_tokens), -20, np.float32)
    row[0, [TOKENIZER.end, ord("x"), ord("b")]] = 40, 30, 20
    for _ in range(3):
        sample(row, [request])
    text = "".join(piece.content for piece in said if isinstance(piece, Piece))
    assert text == ("xbx" if "repeat_penalty" in options else "xxx")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([np.nan, 1, -np.inf], True),
        ([np.inf, np.nan, 0], True),
        ([0, -1, -2], True),
        ([0, -np.inf, -np.inf], True),
        ([np.nan, np.nan, np.nan], False),
        ([-np.inf, np.nan, -np.inf], False),
        ([0, 0, 0], False),
        ([-0.0, 0, 0], False),
    ],
)
def test_whether_a_row_of_logits_says_anything(row: list[float], expected: bool) -> None:
    assert has_number(np.array(row, np.float32)) is expected


def test_a_forced_token_is_not_chosen_by_the_model() -> None:
    """Its probability is the one that the model gave it."""
    tags = Thinking(begin="<think>", end="</think>", is_open=True, budget=0)
    request, said = ask(thinking=tags, logprobs=True)
    other, heard = ask()
    sample(logits_that_want(ord("a"), ord("a")), [request, other])
    (piece,) = said
    assert isinstance(piece, Piece)
    assert piece.content == "</think>"
    assert np.exp(piece.logprobs[0].logprob) < 0.01
    assert [piece.content for piece in heard if isinstance(piece, Piece)] == ["a"]


PADDING = 40  # columns beyond the vocabulary: embeddings are often padded


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sampling": SamplingOptions(seed=1)},
        {"sampling": SamplingOptions(seed=1, top_k=0, top_p=1.0)},
        {"sampling": SamplingOptions(seed=1, top_k=0, top_p=0.5)},
        {"sampling": SamplingOptions(temperature=0, repeat_penalty=1.1)},
        {"ignore_eos": True},
        {"grammar": Grammar(kind="regex", text="[a-z]")},
    ],
)
def test_what_is_beyond_the_vocabulary_is_no_token(fields: dict[str, object]) -> None:
    request, said = ask(logprobs=True, top_logprobs=3, n_predict=1, **fields)
    other, heard = ask(n_predict=1)
    row = np.full((1, TOKENIZER.n_tokens + PADDING), -30, np.float32)
    row[0, [ord("b"), ord("c")]] = 20, 1
    row[0, TOKENIZER.n_tokens :] = 40
    sample(np.repeat(row, 2, axis=0), [request, other])
    (piece,) = [reply for reply in said if isinstance(reply, Piece)]
    assert piece.content == "b"
    assert piece.logprobs[0].logprob > -0.01  # no probability is lost to what is no token
    assert [entry.text for entry in piece.logprobs[0].top][:2] == [b"b", b"c"]
    assert isinstance(said[-1], Done)
    assert isinstance(heard[-1], Done)


@pytest.mark.parametrize("where", ["accept", "forced_token", "banned_tokens"])
def test_an_error_of_one_request_stays_with_it(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Completion):
        pass

    def broken(*_: object) -> None:
        raise RuntimeError("one of many is broken")

    monkeypatch.setattr(Broken, where, broken if where == "accept" else property(broken))
    request, said = ask(n_predict=1)
    request.__class__ = Broken
    (before, first), (after, last) = ask(n_predict=1), ask(n_predict=1)
    sample(logits_that_want(ord("a"), ord("a"), ord("a")), [before, request, after])
    assert said == [Failed(error="one of many is broken", status=500)]
    for replies in (first, last):
        assert [reply.content for reply in replies if isinstance(reply, Piece)] == ["a"]
        assert isinstance(replies[-1], Done)


def test_an_error_in_choosing_for_many_stays_with_the_one_that_causes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    request, said = ask(n_predict=1)
    (before, first), (after, last) = ask(n_predict=1), ask(n_predict=1)

    def chosen(rows: object, samplers: list[object]) -> list[object]:
        if request.sampler in samplers:
            raise FloatingPointError("its options are mad")
        return sample_batch(rows, samplers)  # type: ignore[arg-type, return-value]

    monkeypatch.setattr(sampling, "sample_batch", chosen)
    sample(logits_that_want(ord("a"), ord("a"), ord("a")), [before, request, after])
    assert said == [Failed(error="its options are mad", status=500)]
    assert isinstance(first[-1], Done)
    assert isinstance(last[-1], Done)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 1, "top_k": 2}, {"seed": 1, "top_k": 0, "top_p": 1.0}])
def test_an_answer_may_not_end_before_its_least_length(options: dict[str, float]) -> None:
    request, said = ask(min_tokens=3, stop=["bb"], sampling=SamplingOptions(**options))  # type: ignore[arg-type]
    row = np.full((1, TOKENIZER.n_tokens), -30, np.float32)
    row[0, [TOKENIZER.end, ord("b")]] = 40, 30
    for _ in range(4):
        sample(row, [request])
    assert "".join(piece.content for piece in said if isinstance(piece, Piece)) == "bbb"
    end = said[-1]
    assert isinstance(end, Done)
    assert (end.reason, end.eval_count) == ("stop", 4)


def test_a_stop_sequence_counts_from_the_least_length_on() -> None:
    request, said = ask(min_tokens=2, stop=["ab"])
    for text in "ababab":
        if not request.is_done:
            sample(logits_that_want(ord(text)), [request])
    assert "".join(piece.content for piece in said if isinstance(piece, Piece)) == "ab"
    assert isinstance(said[-1], Done)
    assert (said[-1].eval_count, said[-1].stop_sequence) == (4, "ab")


@pytest.mark.parametrize(("pattern", "text"), [("b{1,3}", "bbb"), ("b{1,2}", "bb"), ("b", "b")])
def test_a_grammar_ends_an_answer_when_it_must(pattern: str, text: str) -> None:
    """It goes on where it can: the end is the likeliest token, but comes too early."""
    request, said = ask(min_tokens=3, grammar=Grammar(kind="regex", text=pattern))
    for _ in range(4):
        if not request.is_done:
            sample(logits_that_want(TOKENIZER.end), [request])
    assert "".join(piece.content for piece in said if isinstance(piece, Piece)) == text
    assert isinstance(said[-1], Done)


def test_a_bias_changes_what_comes_and_not_what_is_told_of_it() -> None:
    token = TOKENIZER.pieces.index(b" the")
    for options in ({"temperature": 0}, {"seed": 3, "top_k": 1}, {"seed": 3, "top_k": 40}, {"seed": 3, "top_k": 0}):
        bias = SamplingOptions(**options, logit_bias={token: 100.0, ord("b"): -100.0})  # type: ignore[arg-type]
        request, said = ask(sampling=bias, logprobs=True, n_predict=1)
        sample(logits_that_want(ord("a")), [request])
        piece = said[0]
        assert isinstance(piece, Piece)
        assert piece.content == " the"
        assert np.exp(piece.logprobs[0].logprob) < 0.01


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"sampling": SamplingOptions(logit_bias={99999: 1.0})},
            "logit_bias has the token 99999, which is not in the vocabulary",
        ),
        ({"sampling": SamplingOptions(logit_bias={-1: 1.0})}, "logit_bias has the token -1"),
        ({"n_ctx": -1}, "n_ctx must not be negative"),
        ({"min_tokens": 5, "n_predict": 4}, "min_tokens is 5, but the answer may have 4 tokens at most"),
        (
            {"sampling": SamplingOptions(dry_multiplier=1.0, dry_sequence_breakers=("x",) * 65)},
            "dry_sequence_breakers has 65 texts",
        ),
    ],
)
def test_what_has_no_meaning_is_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        ask(**fields)
