"""No regular expression of the package takes time that grows as the square of a text, whatever the text repeats.

All are found in the source, with the way in which they are used.
"""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import puna
from tests.growth import LIMIT, growth

N_CHARS = 1_000
PLAIN = ["a", "0", " ", "\n", "<", "{", "'", '"', "-", ".", "\\", "%", "a ", "0.", "a."]
METHODS = ("search", "match", "fullmatch", "sub", "findall", "finditer", "split")
SLACK = 1.3  # what is searched for is short and the machine busy: a square would be 16 times
SURELY_LINEAR_S = 0.002  # what takes less with so long a text does not look at it thousands of times


OF_SHORT_TEXT = {r"(\d+\.?\d*|\.\d+)(ns|us|µs|ms|s|m|h)", r"\d+\.?\d*"}
"""The parts of a duration, of at most MAX_DURATION_CHARS."""

HANDED_ON: dict[str, tuple[str, ...]] = {
    "prompt/go_syntax.py:_TRIMMED_END": ("match",),
    "prompt/go_syntax.py:_END": ("match",),
    "prompt/tools/python_values.py:_NUMBER": ("match",),
    "prompt/tools/python_values.py:_STRING": ("match",),
}
"""Patterns that something else applies than the line that names them."""


@dataclass(frozen=True)
class Use:
    where: str
    pattern: re.Pattern[Any]
    method: str


def _uses() -> Iterator[Use]:
    root = Path(puna.__file__).parent
    for path in sorted(root.rglob("*.py")):
        source = path.read_text()
        if not re.search(r"^ *import re$", source, re.MULTILINE):
            continue
        tree = ast.parse(source)
        assigned = (node for node in tree.body if isinstance(node, ast.Assign))
        names = {id(node.value): node.targets[0].id for node in assigned if isinstance(node.targets[0], ast.Name)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "re":
                yield from _uses_of(node, str(path.relative_to(root)), names.get(id(node), ""), source)


def _uses_of(node: ast.Call, module: str, name: str, source: str) -> Iterator[Use]:
    assert isinstance(node.func, ast.Attribute)
    method, given = node.func.attr, node.args[:1]
    text = given[0].value if given and isinstance(given[0], ast.Constant) else None
    if method not in (*METHODS, "compile") or not isinstance(text, str | bytes):
        return
    flags = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "flags"]
    flags += [ast.unparse(argument) for argument in node.args[1:2]] if method == "compile" else []
    pattern = re.compile(text, eval(flags[0], {"re": re}) if flags else 0)
    if pattern.pattern in OF_SHORT_TEXT:
        return
    where = f"{module}:{name or node.lineno}"
    used = [one for one in METHODS if name and f"{name}.{one}(" in source]
    for one in (method,) if method != "compile" else used or HANDED_ON.get(where, ("search", "fullmatch")):
        yield Use(where, pattern, one)


USES = list(_uses())


def _units(pattern: re.Pattern[Any]) -> Iterator[str]:
    """What the pattern is made of, and each of it with something behind."""
    source = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode()
    plain = re.sub(r"\\[bBdDsSwWAZ]|\(\?P<\w+>|\(\?[:=!<]?|[()|?*+^$]|\{\d*,?\d*\}", "\0", source).replace("\\", "")
    yield from PLAIN
    for unit in filter(None, plain.split("\0")):
        yield unit
        yield from (unit + other for other in ("a", "0", " ", "x "))


def test_they_are_found() -> None:
    assert len(USES) > 60
    assert {"match"} == {use.method for use in USES if "go_syntax" in use.where and "string" in str(use.pattern.pattern)}


@pytest.mark.parametrize("use", USES, ids=lambda use: f"{use.where}-{use.method}")
def test_growth(use: Use) -> None:
    is_bytes = isinstance(use.pattern.pattern, bytes)

    def make(n: int, unit: str) -> Any:
        text = unit * (n // len(unit)) + "\x00"
        return text.encode() if is_bytes else text

    def work(text: Any) -> None:
        if use.method == "sub":
            use.pattern.sub(b"" if is_bytes else "", text)
        elif use.method == "finditer":
            list(use.pattern.finditer(text))
        else:
            getattr(use.pattern, use.method)(text)

    for unit in dict.fromkeys(_units(use.pattern)):
        began = time.thread_time()
        work(make(4 * N_CHARS, unit))
        if time.thread_time() - began > SURELY_LINEAR_S:
            assert growth(partial(make, unit=unit), work, N_CHARS) < SLACK * LIMIT, unit
