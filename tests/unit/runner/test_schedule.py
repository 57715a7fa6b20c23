from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from puna.runner.schedule import MIXED_TOKENS, Progress, schedule


def behind(*counts: int) -> list[Progress]:
    return [Progress(100, 100 + n) for n in counts]


def test_a_prompt_alone_takes_the_whole_batch() -> None:
    assert schedule(behind(5000), 512) == [512]


def test_decoding_goes_on_beside_a_long_prompt_which_advances_by_small_steps() -> None:
    assert schedule(behind(1, 30000, 1), 512) == [1, MIXED_TOKENS, 1]


def test_prompts_are_served_in_order_of_arrival() -> None:
    assert schedule(behind(300, 300, 10), 512) == [300, 212, 0]


def test_a_step_ends_where_a_request_wants_it_to_and_others_get_the_rest() -> None:
    requests = [Progress(100, 400, n_stop=250), Progress(0, 1000), Progress(0, 10, n_stop=30)]
    assert schedule(requests, 512) == [150, 362, 0]
    assert schedule([Progress(250, 400, n_stop=250)], 512) == [150]


def test_more_decoders_than_rows() -> None:
    assert schedule(behind(1, 1, 1), 2) == [1, 1, 0]


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=20), st.integers(1, 600))
def test_every_step_makes_progress_within_its_budget(counts: list[int], n_batch: int) -> None:
    chosen = schedule(behind(*counts), n_batch)
    assert 0 < sum(chosen) <= n_batch
    assert all(0 <= c <= n for c, n in zip(chosen, counts, strict=True))


@given(st.lists(st.integers(1, 700), min_size=1, max_size=8), st.integers(1, 64))
def test_everyone_finishes(counts: list[int], n_batch: int) -> None:
    left = list(counts)
    for _ in range(sum(counts) + 1):
        if not any(left):
            break
        active = [i for i, n in enumerate(left) if n]
        for i, n in zip(active, schedule(behind(*(left[i] for i in active)), n_batch), strict=True):
            left[i] -= n
    assert not any(left)


def test_a_group_is_computed_in_one_step_even_beside_others() -> None:
    image = [(120, 420)]
    assert schedule([Progress(0, 600, groups=image), Progress(9, 10)], 512) == [120, 1]  # up to its begin
    assert schedule([Progress(120, 600, groups=image), Progress(9, 10)], 512) == [300, 1]  # more than a prompt's share
    assert schedule([Progress(0, 600, groups=image)], 512) == [512]
    assert schedule([Progress(0, 600, groups=image)], 400) == [120]


def test_a_group_as_large_as_the_batch_makes_those_who_decode_wait_for_one_step() -> None:
    requests = [Progress(9, 10), Progress(0, 600, groups=[(0, 512)]), Progress(9, 10)]
    assert schedule(requests, 512) == [0, 512, 0]


def test_a_later_group_waits_until_it_is_the_oldest_prompts_turn() -> None:
    requests = [Progress(9, 10), Progress(0, 100), Progress(0, 600, groups=[(0, 512)])]
    assert schedule(requests, 512) == [1, 100, 0]


def with_groups(sizes: list[int], n_batch: int) -> tuple[int, list[tuple[int, int]]]:
    """Plain tokens and groups in turn; the length and the groups."""
    position, groups = 0, []
    for i, size in enumerate(sizes):
        size = min(size, n_batch)
        if i % 2:
            groups.append((position, position + size))
        position += size
    return position, groups


@given(
    st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=6), min_size=1, max_size=5),
    st.integers(0, 5),
    st.integers(8, 256),
)
def test_no_group_is_ever_split_and_everyone_finishes(prompts: list[list[int]], n_decoding: int, n_batch: int) -> None:
    texts = [with_groups(sizes, n_batch) for sizes in prompts]
    done = [0] * len(texts)
    for _ in range(2 * sum(length for length, _ in texts) + 1):
        active = [i for i, (length, _) in enumerate(texts) if done[i] < length]
        if not active:
            break
        requests = [Progress(done[i], texts[i][0], groups=texts[i][1]) for i in active]
        counts = schedule([*requests, *behind(*[1] * n_decoding)], n_batch)
        assert 0 < sum(counts) <= n_batch
        for i, count in zip(active, counts, strict=False):
            for first, last in texts[i][1]:
                assert not first < done[i] + count < last
            done[i] += count
    assert done == [length for length, _ in texts]
