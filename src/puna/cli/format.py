"""Sizes, counts, durations and points in time as people read them in tables and summaries.

Pure functions in Ollama's notation: scripts that read its tables read these. Knows nothing of terminals.
"""

from __future__ import annotations

import re
from datetime import datetime

_UNITS = (("KB", 10**3), ("MB", 10**6), ("GB", 10**9), ("TB", 10**12))
_MINUTE, _HOUR = 60, 3600
# up to so many hours (not included), in units of so many hours
_SPANS = ((48, 1, "hours"), (24 * 14, 24, "days"), (24 * 60, 24 * 7, "weeks"), (24 * 365 * 2, 24 * 30, "months"))
_FOREVER_DAYS = 365 * 100  # a server writes "never" as a date some centuries ahead


def human_bytes(n_bytes: int) -> str:
    """Decimal units: one decimal below ten unless it is zero, whole numbers (truncated) from there on."""
    if n_bytes < 1000:
        return f"{n_bytes} B"
    unit, n_unit = next(((u, n) for u, n in _UNITS if n_bytes < n * 1000), _UNITS[-1])
    value = n_bytes / n_unit
    if value >= 10 or value == int(value):
        return f"{int(value)} {unit}"
    return f"{value:.1f} {unit}"


def human_count(number: int | None) -> str:
    """A number of things, rounded down from a thousand on; nothing where it is not known."""
    if number is None or number < 1000:
        return "" if number is None else str(number)
    unit, n_unit = next(((u, n) for u, n in (("K", 10**3), ("M", 10**6)) if number < n * 1000), ("B", 10**9))
    tenths = number * 10 // n_unit
    return f"{tenths // 10}{unit}" if tenths >= 100 or tenths % 10 == 0 else f"{tenths / 10}{unit}"


def human_duration(seconds: float) -> str:
    """A length of time in one unit, as in ``About an hour`` or ``3 weeks``."""
    whole = int(seconds)
    hours = int(seconds / _HOUR + 0.5)
    if whole < _MINUTE:
        return {0: "Less than a second", 1: "1 second"}.get(whole, f"{whole} seconds")
    if whole < _HOUR:
        return "About a minute" if whole // _MINUTE == 1 else f"{whole // _MINUTE} minutes"
    if hours == 1:
        return "About an hour"
    for limit, unit_hours, unit in _SPANS:
        if hours < limit:
            return f"{hours // unit_hours} {unit}"
    return f"{hours // (24 * 365)} years"


def human_time(moment: datetime, now: datetime) -> str:
    """A point in time relative to *now*: ``3 hours ago``, ``4 minutes from now``."""
    seconds = (moment - now).total_seconds()
    return f"{human_duration(seconds)} from now" if seconds > 0 else f"{human_duration(-seconds)} ago"


def human_expiry(moment: datetime, now: datetime) -> str:
    """When an idle model will be unloaded; a time that has passed means that it is on its way out."""
    if moment <= now:
        return "Stopping..."
    if (moment - now).days >= _FOREVER_DAYS:
        return "Forever"
    return human_time(moment, now)


def processor(total: int, on_gpu: int) -> str:
    """Where a model's memory lies: ``100% CPU``, ``100% GPU``, ``48%/52% CPU/GPU``."""
    if on_gpu == 0:
        return "100% CPU"
    if on_gpu >= total:
        return "100% GPU" if on_gpu == total else "Unknown"
    cpu_percent = round((total - on_gpu) / total * 100)
    return f"{cpu_percent}%/{100 - cpu_percent}% CPU/GPU"


def go_duration(nanoseconds: int) -> str:
    """A duration as Go prints it: ``1m30.5s``, ``812.5ms``, ``95µs``, ``0s``."""
    if nanoseconds < 0:
        return "-" + go_duration(-nanoseconds)
    if nanoseconds == 0:
        return "0s"
    for unit, n_ns in (("ns", 1), ("µs", 1000), ("ms", 1_000_000)):
        if nanoseconds < n_ns * 1000:
            return _decimal(nanoseconds, n_ns) + unit
    minutes, rest = divmod(nanoseconds, _MINUTE * 10**9)
    hours, minutes = divmod(minutes, 60)
    text = _decimal(rest, 10**9) + "s"
    if hours or minutes:
        text = f"{minutes}m{text}"
    return f"{hours}h{text}" if hours else text


def _decimal(value: int, unit: int) -> str:
    whole, rest = divmod(value, unit)
    if not rest:
        return str(whole)
    n_digits = len(str(unit)) - 1
    return f"{whole}.{rest:0{n_digits}d}".rstrip("0")


def parse_time(text: str) -> datetime:
    """An RFC 3339 time; nanoseconds are cut to what Python holds.

    Errors: ValueError when it is no such time.
    """
    moment = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text))
    return moment if moment.tzinfo else moment.astimezone()
