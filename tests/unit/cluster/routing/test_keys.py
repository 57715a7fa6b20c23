from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from puna import wire
from puna.cluster.routing.keys import BLOCK_BYTES, MAX_KEYS, keys_of, n_common, n_leading, pack, unpack
from puna.errors import BadRequest


def request(prompt: str, **fields: object) -> wire.CompletionRequest:
    return wire.CompletionRequest(prompt=prompt, **fields)  # type: ignore[arg-type]


@given(st.text(max_size=300), st.text(max_size=200), st.text(max_size=200))
def test_prompts_share_the_keys_of_the_blocks_they_begin_with(begin: str, one: str, other: str) -> None:
    a, b = (begin + one).encode(), (begin + other).encode()
    n_equal = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    first, second = keys_of(request(begin + one)), keys_of(request(begin + other))
    assert n_leading(first, set(second)) == n_common(first, second) == n_equal // BLOCK_BYTES
    assert len(first) == len(a) // BLOCK_BYTES


def test_a_block_counts_for_all_that_stands_before_it() -> None:
    same = "z" * BLOCK_BYTES
    a, b = keys_of(request("a" * BLOCK_BYTES + same)), keys_of(request("b" * BLOCK_BYTES + same))
    assert not set(a) & set(b)


@pytest.mark.parametrize("other", [{"salt": "somebody else"}, {"context": [1, 2]}])
def test_what_the_cache_would_keep_apart_shares_no_key(other: dict[str, object]) -> None:
    text = "the quick brown fox " * 20
    assert not set(keys_of(request(text))) & set(keys_of(request(text, **other)))


def test_an_image_counts_by_what_it_shows_and_not_by_its_marker() -> None:
    def with_image(marker: str, data: bytes) -> list[int]:
        return keys_of(request(f"look at {marker} " + "and tell me " * 20, images=[wire.Image(marker=marker, data=data)]))

    assert with_image("<1>", b"cat") == with_image("<2>", b"cat")
    assert not set(with_image("<1>", b"cat")) & set(with_image("<1>", b"dog"))


def test_the_next_turn_begins_like_prompt_and_answer() -> None:
    prompt, answer = "question " * 30, "answer " * 30
    assert n_leading(keys_of(request(prompt + answer + "and then?" * 30)), set(keys_of(request(prompt), answer))) == (
        len(prompt + answer) // BLOCK_BYTES
    )


def test_a_very_long_prompt_has_no_more_keys_than_are_of_use() -> None:
    assert len(keys_of(request("x" * (MAX_KEYS + 5) * BLOCK_BYTES))) == MAX_KEYS
    assert keys_of(request("")) == []


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_packed_keys_come_back(keys: list[int]) -> None:
    assert unpack(pack(keys)) == keys


def test_what_is_no_list_of_keys_is_refused() -> None:
    with pytest.raises(BadRequest, match="9 bytes"):
        unpack(bytes(9))
