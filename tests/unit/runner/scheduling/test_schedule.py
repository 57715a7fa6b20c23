from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from puna.runner.pacing.pace import Pace, Prices, work
from puna.runner.scheduling.schedule import LEAST_FOR_OLDEST, LEAST_TOKENS, OLDEST_PART, Progress, schedule

# A row that decodes takes 10 ms, a prompt's token 1 ms, all else nothing.
MILLISECOND = Prices(decoded=0.010, prompt=0.001)


def behind(*counts: int) -> list[Progress]:
    return [Progress(100, 100 + n) for n in counts]


def test_a_prompt_alone_takes_the_whole_batch() -> None:
    assert schedule(behind(5000), 512) == [512]


def paced(target_s: float, prices: Prices = MILLISECOND, most: int = 1 << 30) -> Pace:
    return Pace(target_s, prices, most)


def test_decoding_goes_on_beside_a_long_prompt_which_gets_what_is_left_of_the_time() -> None:
    assert schedule(behind(1, 30000, 1), 512, paced(0.150)) == [1, 126, 1]  # 130 would do; 128 rows are round
    assert schedule(behind(1, 30000, 1), 512, paced(0.120)) == [1, 94, 1]
    assert schedule(behind(1, 30000, 1), 512, paced(9)) == [1, 510, 1]


def test_without_anybody_who_decodes_the_batch_is_full_whatever_the_pace() -> None:
    assert schedule(behind(30000), 512, paced(0.001)) == [512]


def test_more_than_was_ever_tried_comes_step_by_step() -> None:
    assert schedule(behind(1, 30000), 512, paced(9, most=64)) == [1, 64]


def test_a_prompt_advances_even_where_decoding_takes_all_of_the_time() -> None:
    assert schedule(behind(1, 30000), 512, paced(0.010)) == [1, LEAST_TOKENS]
    assert schedule(behind(1, 30000), 512, paced(0.400, Prices(decoded=0.5, prompt=0.001))) == [1, 95]  # a quarter of it


def test_tokens_far_back_in_a_prompt_cost_more() -> None:
    prices = Prices(prompt=0.001, cell=1e-6)
    near, far = (schedule([Progress(1, 2), Progress(n, 30000)], 512, paced(0.128, prices))[1] for n in (0, 9000))
    assert (near, far) == (112 - 1, 16)


def test_short_prompts_overtake_long_ones() -> None:
    assert schedule(behind(1, 4000, 30), 512, paced(0.074)) == [1, 33, 30]
    assert schedule(behind(1, 4000, 300, 30), 512, paced(0.074)) == [1, 15, 18, 30]
    assert schedule(behind(300, 300, 10), 512) == [300, 202, 10]


def test_a_short_prompt_beside_a_long_one_is_computed_in_a_step_or_two_on_any_machine() -> None:
    for milliseconds in (0.01, 0.1, 1, 10, 1000):
        pace = paced(0.150, Prices(decoded=0.004, prompt=milliseconds / 1000))
        left = 30
        for _ in range(3 if milliseconds >= 10 else 2 if milliseconds > 1 else 1):
            left -= schedule([*behind(1, 1, 4000), Progress(30 - left, 30)], 512, pace)[-1]
        assert left <= 1


@given(
    st.integers(40, 2000),
    st.floats(0.001, 1),
    st.floats(0, 0.5),
    st.floats(0, 0.5),
    st.integers(8, 512),
    st.integers(0, 12),
    st.data(),
)
def test_nobody_starves_whoever_else_comes(
    n_long: int, target_s: float, decoded: float, prompt: float, n_batch: int, n_decoding: int, data: st.DataObject
) -> None:
    """A prompt beside which new ones arrive at every step, all of them shorter: the oldest advances by a part of each step."""
    pace = paced(target_s, Prices(decoded=decoded, prompt=prompt))
    arrivals = data.draw(st.lists(st.integers(2, 30), min_size=1, max_size=6))
    done, n_steps = 0, 0
    while done < n_long - 1:  # with one token left it counts as one that decodes
        requests = [*behind(*[1] * n_decoding), Progress(done, n_long), *behind(*arrivals)]
        counts = schedule(requests, n_batch, pace)
        n_prompt_tokens = sum(counts) - sum(counts[:n_decoding])
        least = min(LEAST_FOR_OLDEST if n_batch >= 16 else 1, n_long - done)
        assert counts[n_decoding] >= max(least, min(int(0.8 * OLDEST_PART * n_prompt_tokens) - 1, n_long - done))
        done += counts[n_decoding]
        n_steps += 1
    assert n_steps <= n_long


@given(
    st.lists(st.integers(2, 400), min_size=1, max_size=5),
    st.integers(16, 128),
    st.integers(0, 4),
    st.lists(st.integers(2, 40), min_size=1, max_size=5),
)
def test_a_prompt_waits_no_longer_than_four_times_what_it_and_the_older_ones_take(
    lengths: list[int], n_batch: int, n_decoding: int, arrivals: list[int]
) -> None:
    """Whoever comes after it: short ones in every step, each of which would otherwise go first."""
    done, ended = [0] * len(lengths), [0] * len(lengths)
    younger: list[Progress] = []
    n_steps = 0
    while not all(ended):
        n_steps += 1
        younger += [Progress(0, n) for n in arrivals]
        left = [i for i, end in enumerate(ended) if not end]
        requests = [*behind(*[1] * n_decoding), *(Progress(done[i], lengths[i]) for i in left), *younger]
        counts = schedule(requests, n_batch)[n_decoding:]
        for i, count in zip(left, counts, strict=False):
            done[i] += count
            ended[i] = n_steps if done[i] == lengths[i] else 0
        new = [r._replace(n_computed=r.n_computed + n) for r, n in zip(younger, counts[len(left) :], strict=True)]
        younger = [r for r in new if r.n_behind]
    n_prompts = n_batch - n_decoding
    for i, end in enumerate(ended):
        # A step more for each: its last token counts as one that decodes, of which the younger are not before it either.
        assert end <= sum(-(-n // int(OLDEST_PART * n_prompts)) + 1 for n in lengths[: i + 1])


@given(
    st.lists(st.integers(2, 3000), min_size=1, max_size=8),
    st.integers(1, 20),
    st.integers(64, 512),
    st.floats(0.001, 2),
    st.tuples(*[st.floats(0, 0.01)] * 5),
    st.integers(0, 20000),
)
def test_a_step_takes_no_longer_than_it_may(
    lengths: list[int], n_decoding: int, n_batch: int, target_s: float, numbers: tuple[float, ...], begin: int
) -> None:
    prices = Prices(numbers[0], numbers[1], numbers[2], numbers[3], numbers[4] / 1000)
    requests = [Progress(100, 101)] * n_decoding + [Progress(begin, begin + n) for n in lengths]
    counts = schedule(requests, n_batch, paced(target_s, prices))
    done = work((r.n_computed, n) for r, n in zip(requests, counts, strict=True) if n)
    decoding = work([(100, 1)] * n_decoding)
    n_prompts = sum(counts) - n_decoding
    allowed = max(target_s, prices.of(decoding) + prices.prompts + target_s / 4)
    assert n_prompts <= LEAST_TOKENS + LEAST_FOR_OLDEST or prices.of(done) <= allowed * 1.0001 + _least(prices, begin)


def _least(prices: Prices, begin: int) -> float:
    """What is computed whatever it costs."""
    return prices.of_prompt(begin + 3000, LEAST_TOKENS + LEAST_FOR_OLDEST)


def test_prompts_are_computed_beside_more_who_decode_than_there_are_rows() -> None:
    assert schedule(behind(1, 1, 1, 1, 1, 1, 1, 1, 1, 30), 8) == [1, 1, 1, 1, 1, 1, 0, 0, 0, 2]


def test_a_step_ends_where_a_request_wants_it_to_and_others_get_the_rest() -> None:
    requests = [Progress(100, 400, n_checkpoint=250), Progress(0, 1000), Progress(0, 10, n_checkpoint=30)]
    assert schedule(requests, 512) == [150, 352, 10]
    assert schedule([Progress(250, 400, n_checkpoint=250)], 512) == [150]


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
    pace = paced(0.138)
    assert schedule([Progress(0, 600, groups=image), Progress(9, 10)], 512, pace) == [120, 1]  # up to its begin
    assert schedule([Progress(120, 600, groups=image), Progress(9, 10)], 512, pace) == [300, 1]  # more than a prompt's share
    assert schedule([Progress(0, 600, groups=image)], 512) == [512]
    assert schedule([Progress(0, 600, groups=image)], 400) == [120]


def test_a_group_as_large_as_the_batch_makes_those_who_decode_wait_for_one_step() -> None:
    requests = [Progress(9, 10), Progress(0, 600, groups=[(0, 512)]), Progress(9, 10)]
    assert schedule(requests, 512) == [0, 512, 0]


def test_a_later_group_waits_until_it_is_the_oldest_prompts_turn() -> None:
    requests = [Progress(9, 10), Progress(0, 100), Progress(0, 600, groups=[(0, 512)])]
    assert schedule(requests, 512) == [1, 100, 0]


def test_the_oldest_prompt_s_stop_holds_though_it_is_asked_twice() -> None:
    assert schedule([Progress(0, 1000, n_checkpoint=40), Progress(0, 2000)], 512) == [40, 472]


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
