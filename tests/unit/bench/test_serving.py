from __future__ import annotations

import io

from bench.load.rows import ROWS
from bench.load.sample import Sample
from bench.serving import NO_RATIO, as_json, table_of
from rich.console import Console


def printed(samples: list[Sample]) -> str:
    out = io.StringIO()
    Console(file=out, width=100).print(table_of(ROWS[1], ["puna", "peer"][: len(samples)], samples))
    return out.getvalue()


def line(text: str, name: str) -> list[str]:
    (found,) = (row for row in text.splitlines() if f" {name} " in row)
    return [cell.strip() for cell in found.strip("│").split("│")][1:]


def test_the_ratio_is_punas_figure_by_the_peers() -> None:
    puna = Sample(first_token_s=[0.2], gaps_s=[0.0125], n_tokens=300, n_texts=300, wall_s=2, problems=["it broke"])
    peer = Sample(first_token_s=[0.4], gaps_s=[0.010], n_tokens=200, n_texts=100, wall_s=2)
    text = printed([puna, peer])
    assert line(text, "first token, p50 s") == ["0.200", "0.400", "0.500"]
    assert line(text, "between texts, p50 ms") == ["12.5", "10.0", "1.250"]
    assert line(text, "tokens/s") == ["150.0", "100.0", "1.500"]
    assert line(text, "tokens per text") == ["1.00", "2.00", ""]
    assert line(text, "requests that failed") == ["1", "0", ""]
    assert "ratio" not in printed([puna])
    assert "chunks" not in text


def test_of_more_than_two_the_last_is_what_the_others_are_compared_with() -> None:
    samples = [Sample(gaps_s=[0.1], n_tokens=n, n_texts=n, wall_s=2) for n in (300, 150, 200)]
    out = io.StringIO()
    Console(file=out, width=120).print(table_of(ROWS[1], ["puna 50ms", "puna 1s", "peer"], samples))
    assert line(out.getvalue(), "tokens/s, by the last one's") == ["1.500", "0.750", "1.000"]


def test_every_figure_of_a_row_is_in_the_json() -> None:
    sample = Sample(first_token_s=[0.2], n_tokens=3, wall_s=1, problems=["it broke"])
    sample.note(left=3)
    (found,) = as_json(ROWS[0], ["puna"], [sample])["contenders"].values()
    assert (found["first_token_p50_s"], found["left"], found["problems"]) == (0.2, 3, ["it broke"])
    assert set(found) > NO_RATIO & {"left", "client_cpu_share"}


def test_a_row_is_marked_when_others_were_busy() -> None:
    calm, disturbed = Sample(wall_s=10, foreign_cpu_s=0.9), Sample(wall_s=10, foreign_cpu_s=1.1)
    assert "busy with other things" in printed([calm, disturbed])
    assert "busy with other things" not in printed([calm, calm])
