from __future__ import annotations

import ast
import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from puna.prompt.tools.python_values import PythonCall, read_calls, read_value

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**17), 10**17)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(alphabet=st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"]))
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner), max_leaves=20)


@given(value=VALUES)
def test_what_python_writes_is_read(value: Any) -> None:
    assert read_value(repr(value)) == value


def test_short_escapes_mean_what_they_mean_to_python() -> None:
    text = r"'\a\b\f\n\r\t\v\\\'\"\q\101\u00e9'"
    assert read_value(text) == "\a\b\f\n\r\t\v\\'\"\\qA\u00e9"


@given(text=st.text(alphabet="[](){}'\"\\,:=.-0123456789eabfTrue \n", max_size=30))
def test_nothing_but_a_value_error(text: str) -> None:
    for read in (read_value, read_calls):
        try:
            read(text)
        except ValueError:
            continue
    try:
        expected = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return
    if isinstance(expected, bool | int | str):
        with contextlib.suppress(ValueError):  # joined strings, sums and the like are left out on purpose
            assert read_value(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f()", [PythonCall("f")]),
        ("[]", []),
        ("[f(), a.b(1, x='y',)]", [PythonCall("f"), PythonCall("a.b", [1], {"x": "y"})]),
        ("f((1), (2,), ())", [PythonCall("f", [1, [2], []])]),
        (r"f('\101\a\q')", [PythonCall("f", ["A\a\\q"])]),
        ("f(x=true, y=None)", [PythonCall("f", [], {"x": True, "y": None})]),
        ('f("""a\n"b""")', [PythonCall("f", ['a\n"b'])]),
        (r"f('it\'s \u00e9\n')", [PythonCall("f", ["it's é\n"])]),
    ],
)
def test_calls(text: str, expected: list[PythonCall]) -> None:
    assert read_calls(text) == expected


@pytest.mark.parametrize(
    "text", ["", "f", "f(", "f(x)", "f(g())", "1 + 1", "[f(), 2]", "f(x=)", "f() g()", "[" * 1000 + "]" * 1000]
)
def test_what_is_no_call(text: str) -> None:
    with pytest.raises(ValueError):
        read_calls(text)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(ValueError, match="too deep"):
        read_value("[" * 100_000)
