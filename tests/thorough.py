"""What of a test's cases `make test` runs; the others, more of the same, are for `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first(n: int, cases: Iterable[Any]) -> list[Any]:
    """All of them as parameters, those after the first *n* marked thorough."""
    return [case if i < n else pytest.param(case, marks=pytest.mark.thorough) for i, case in enumerate(cases)]


def first_of_each_name(cases: Iterable[tuple[str, Any]]) -> list[Any]:
    """Of cases that begin with a name, the first with each name stays, those after it are marked thorough."""
    seen: set[str] = set()
    found: list[Any] = []
    for case in cases:
        found.append(pytest.param(case, marks=pytest.mark.thorough) if case[0] in seen else case)
        seen.add(case[0])
    return found
