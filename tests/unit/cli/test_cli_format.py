from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from puna.cli.format import (
    go_duration,
    human_bytes,
    human_count,
    human_duration,
    human_expiry,
    human_time,
    parse_time,
    processor,
)

NOW = datetime(2026, 8, 22, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 KB"),
        (1500, "1.5 KB"),
        (9_999, "10.0 KB"),
        (10_999, "10 KB"),
        (999_999, "999 KB"),
        (4_661_224_676, "4.7 GB"),
        (91_737_440, "91 MB"),
        (1_000_000_000_000, "1 TB"),
        (12_345_000_000_000_000, "12345 TB"),
    ],
)
def test_bytes(n_bytes: int, text: str) -> None:
    assert human_bytes(n_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "Less than a second"),
        (1, "1 second"),
        (59, "59 seconds"),
        (60, "About a minute"),
        (119, "About a minute"),
        (120, "2 minutes"),
        (3599, "59 minutes"),
        (3600, "About an hour"),
        (2 * 3600, "2 hours"),
        (47 * 3600, "47 hours"),
        (48 * 3600, "2 days"),
        (13 * 86400, "13 days"),
        (14 * 86400, "2 weeks"),
        (59 * 86400, "8 weeks"),
        (60 * 86400, "2 months"),
        (729 * 86400, "24 months"),
        (730 * 86400, "2 years"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert human_duration(seconds) == text


def test_times_say_which_side_of_now() -> None:
    assert human_time(NOW - timedelta(hours=3), NOW) == "3 hours ago"
    assert human_time(NOW + timedelta(minutes=4), NOW) == "4 minutes from now"


@pytest.mark.parametrize(
    ("ahead", "text"),
    [
        (timedelta(minutes=4, seconds=30), "4 minutes from now"),
        (timedelta(0), "Stopping..."),
        (timedelta(seconds=-1), "Stopping..."),
        (timedelta(days=365 * 292), "Forever"),
    ],
)
def test_expiry(ahead: timedelta, text: str) -> None:
    assert human_expiry(NOW + ahead, NOW) == text


@pytest.mark.parametrize(
    ("total", "on_gpu", "text"),
    [(100, 0, "100% CPU"), (0, 0, "100% CPU"), (100, 100, "100% GPU"), (100, 52, "48%/52% CPU/GPU"), (100, 101, "Unknown")],
)
def test_processor(total: int, on_gpu: int, text: str) -> None:
    assert processor(total, on_gpu) == text


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "0s"),
        (15, "15ns"),
        (95_000, "95µs"),
        (812_500_000, "812.5ms"),
        (1_200_000_000, "1.2s"),
        (1_234_567_891, "1.234567891s"),
        (90_500_000_000, "1m30.5s"),
        (3_600_000_000_000, "1h0m0s"),
        (-1_500_000, "-1.5ms"),
    ],
)
def test_go_durations(nanoseconds: int, text: str) -> None:
    assert go_duration(nanoseconds) == text


@pytest.mark.parametrize("text", ["2026-08-22T12:00:00.123456789Z", "2026-08-22T14:00:00.123456789+02:00"])
def test_nanoseconds_in_times_are_cut(text: str) -> None:
    assert parse_time(text) == NOW.replace(microsecond=123456)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        *[(None, ""), (0, "0"), (999, "999"), (1000, "1K"), (1999, "1.9K"), (12_345, "12K"), (999_999, "999K")],
        *[(1_000_000, "1M"), (1_250_000, "1.2M"), (3_000_000_000, "3B"), (5_000_000_000_000, "5000B")],
    ],
)
def test_counts(number: int | None, text: str) -> None:
    assert human_count(number) == text
