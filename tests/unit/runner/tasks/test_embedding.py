"""What is decided about texts: how they are cut, whose turn it is, which rows are wanted. No model, no library."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from puna.errors import BadRequest, ContextOverflow
from puna.model.pooling import Pooling
from puna.runner.images.image import Image, Key
from puna.runner.scheduling.packing import PACKED_TOKENS, fills_no_batch, schedule_whole
from puna.runner.scheduling.schedule import Progress
from puna.runner.scheduling.task import Part
from puna.runner.step.compute import collect
from puna.runner.tasks.embedding import EmbeddedText, EmbeddingJob, short
from puna.runner.tasks.inputs import Fitted, tokenize
from puna.runner.tasks.pooling import Embedding, take
from puna.runner.tasks.prompt import tokens_of
from puna.runner.tasks.seeing import Seen
from puna.tokenizer.tokenizer import Tokenizer
from puna.vision.model import Placed, Prepared
from puna.wire import EmbeddingReply, EmbeddingRequest, Failed

BEGIN, END = 1, 2


class Letters:
    """A token per character, with a begin and an end token around it."""

    n_tokens = 200

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        plain = [ord(c) for c in text]
        return [BEGIN, *plain, END] if add_special else plain


LETTERS = cast(Tokenizer, Letters())


def job(
    *inputs: Any, n_ctx: int = 16, n_ctx_wanted: int = 0, pooling: Pooling = Pooling.MEAN, **fields: Any
) -> tuple[EmbeddingJob, list[EmbeddingReply | Failed]]:
    replies: list[EmbeddingReply | Failed] = []
    request = EmbeddingRequest(inputs=list(inputs), n_ctx=n_ctx_wanted, **fields)
    return Embedding(LETTERS, n_ctx, pooling, takes_whole_texts=False).embed(request, replies.append), replies


def test_a_cut_text_keeps_its_end_token() -> None:
    assert tokenize("abcdef", 0, LETTERS, 5, True)[:2] == ([BEGIN, *map(ord, "abc"), END], 3)
    assert tokenize([9, 8, 7], 0, LETTERS, 2, True)[:2] == ([9, 8], 1)


@pytest.mark.parametrize(
    ("text", "truncate", "error", "says"),
    [
        ("abc", False, ContextOverflow, r"\(5 tokens, context 4\)"),
        ([], True, BadRequest, "input 3 is empty"),
        ([5, 200], True, BadRequest, "input 3 has the token 200, which is not in the vocabulary of 200"),
    ],
)
def test_what_cannot_be_embedded_is_refused(text: Any, truncate: bool, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        tokenize(text, 3, LETTERS, 4, truncate)


def image(n_tokens: int) -> Image:
    """Of which nobody has encoded anything yet."""
    return Image(Key(b"%d" % n_tokens, ""), Prepared([], Placed([7] * n_tokens, range(n_tokens)), n_tokens))


def test_what_stands_around_a_text_stands_around_its_images_too() -> None:
    images = {"<1>": image(3), "<2>": image(2)}
    for text, expected in (
        ("a<1>b", [BEGIN, 97, 7, 7, 7, 98, END]),
        ("<2>", [BEGIN, 7, 7, END]),
        ("<1><2>", [BEGIN, 7, 7, 7, 7, 7, END]),
    ):
        assert list(map(int, tokenize(text, 0, LETTERS, 16, True, images).tokens)) == expected
    assert list(map(int, tokens_of("a<2>b", LETTERS, images, context=[9]).tokens)) == [9, 97, 7, 7, 98]


@pytest.mark.parametrize(
    ("n_ctx", "tokens", "n_images"),
    [
        (9, [BEGIN, 97, 7, 7, 7, 98, 99, 100, END], 1),
        (6, [BEGIN, 97, 7, 7, 7, END], 1),
        (5, [BEGIN, 97, END], 0),
    ],
)
def test_a_cut_splits_no_image(n_ctx: int, tokens: list[int], n_images: int) -> None:
    found = tokenize("a<1>bcdef", 0, LETTERS, n_ctx, True, {"<1>": image(3)})
    assert (list(map(int, found.tokens)), found.n_cut, len(found.images)) == (tokens, 11 - len(tokens), n_images)


def test_where_nothing_would_be_left_it_is_too_long() -> None:
    with pytest.raises(ContextOverflow, match=r"\(6 tokens, context 4\)"):
        tokenize("<1>b", 0, LETTERS, 4, True, {"<1>": image(3)})


def test_who_waits_for_an_image_keeps_no_place_in_a_batch() -> None:
    made = image(PACKED_TOKENS)
    text = EmbeddedText(job("x")[0], 0, tokenize("<1>", 0, LETTERS, PACKED_TOKENS + 2, True, {"<1>": made}))
    assert fills_no_batch([text])
    made.rows = np.zeros((PACKED_TOKENS, 4), np.float32)
    assert not fills_no_batch([text])


@pytest.mark.parametrize("end", ["vectors", "error"])
def test_images_are_given_back_once(end: str) -> None:
    n_given = []
    made, replies = job("a", "b")
    made._seen = Seen({}, lambda: n_given.append(1))
    made.accept(0, np.ones(2, np.float32))
    assert not n_given
    made.accept(1, np.ones(2, np.float32)) if end == "vectors" else made.finish("cancelled")
    made.fail(ValueError("late"))
    assert (len(n_given), len(replies)) == (1, 1)


def test_no_input_is_refused() -> None:
    with pytest.raises(BadRequest, match="there is no input"):
        job()
    with pytest.raises(BadRequest, match="n_ctx must not be negative"):
        job("a", n_ctx_wanted=-1)


def test_an_input_keeps_to_the_requests_own_context() -> None:
    made, replies = job("abcdefgh", "a", n_ctx=16, n_ctx_wanted=5)
    for index in range(2):
        made.accept(index, np.array([1, 1], np.float32))
    (reply,) = replies
    assert isinstance(reply, EmbeddingReply)
    assert (reply.prompt_eval_count, reply.truncated_count) == (5 + 3, 5)


def test_jobs_take_turns() -> None:
    long, short_one = job("a", "b", "c")[0], job("d")[0]
    waiting = deque([long, short_one])
    taken = [take(waiting).tokens[1] for _ in range(4)]
    assert [chr(token) for token in taken] == ["a", "d", "b", "c"]
    assert not waiting


@given(st.lists(st.integers(1, 900), min_size=1, max_size=30))
def test_whole_texts_fill_a_batch_and_the_first_is_never_passed_over(lengths: list[int]) -> None:
    counts = schedule_whole([Progress(0, n) for n in lengths], 512)
    assert counts[0] == lengths[0]
    assert all(count in (0, n) for count, n in zip(counts, lengths, strict=True))
    assert sum(counts) <= max(512, lengths[0])
    left = 512 - sum(counts)
    assert all(n > left for count, n in zip(counts, lengths, strict=True) if not count)


@pytest.mark.parametrize(
    ("pooling", "outputs", "n_owners"),
    [(Pooling.MEAN, [0, 1, 2, 3, 4, 5], 3), (Pooling.CLS, [0, 5], 2), (Pooling.LAST, [4], 1)],
)
def test_only_the_rows_that_pooling_needs_are_outputs(pooling: Pooling, outputs: list[int], n_owners: int) -> None:
    texts = [EmbeddedText(job("x", pooling=pooling)[0], 0, Fitted(list(range(10, 10 + n)))) for n in (9, 4, 8)]
    rows = collect([Part(texts[0], 0, 3), Part(texts[1], 2, 2), Part(texts[2], 0, 1)])
    owners = [end for begin, end in pairwise(rows.bounds) if end > begin]
    assert rows.tokens == [10, 11, 12, 12, 13, 10]
    assert rows.positions == [0, 1, 2, 2, 3, 0]
    assert rows.outputs == outputs
    assert len(owners) == n_owners


def completed(vectors: list[list[float]], **fields: Any) -> EmbeddingReply | Failed:
    """The reply of a job whose texts are pooled to these vectors, the last one first."""
    made, replies = job(*["a"] * len(vectors), **fields)
    for index in reversed(range(len(vectors))):
        assert not replies
        made.accept(index, np.array(vectors[index], np.float32))
    assert len(replies) == 1
    return replies[0]


def test_vectors_come_in_the_order_of_the_inputs() -> None:
    reply = completed([[3, 4], [0, 2]])
    assert isinstance(reply, EmbeddingReply)
    assert reply.embeddings == [[0.6, 0.8], [0.0, 1.0]]
    assert reply.prompt_eval_count == 6


def test_dimensions_and_normalisation() -> None:
    assert cast(EmbeddingReply, completed([[3, 4, 12]], dimensions=2)).embeddings == [[0.6, 0.8]]
    assert cast(EmbeddingReply, completed([[3, 4, 12]], dimensions=2, normalize=False)).embeddings == [[3, 4]]
    assert cast(EmbeddingReply, completed([[3, 4]], dimensions=2)).embeddings == [[0.6, 0.8]]
    assert cast(EmbeddingReply, completed([[0, 0]])).embeddings == [[0, 0]]


def test_a_number_that_is_none_fails_the_job_once() -> None:
    made, replies = job("a", "b", "c")
    made.accept(0, np.array([np.nan, 1], np.float32))
    made.accept(1, np.array([1, 1], np.float32))
    made.finish("cancelled")
    assert replies == [Failed(error="embedding contains NaN or Inf values", status=400)]
    assert made.is_cancelled  # what is left of it is not computed


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_short_numbers_are_the_same_float32(values: list[float]) -> None:
    wanted = np.array(values, np.float32)
    np.testing.assert_array_equal(short(wanted).astype(np.float32), wanted)


def test_short_numbers_are_short() -> None:
    numbers = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    assert max(len(repr(x).lstrip("-0.").replace("e-05", "")) for x in short(numbers).tolist()) <= 10
