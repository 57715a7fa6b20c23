"""Whatever stands in a template, parsing and rendering end in text or in TemplateError."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from puna.errors import TemplateError
from puna.prompt import jinja
from puna.prompt.gotemplate import GoTemplate
from puna.prompt.limits import Budget

GO = [
    "{{", "}}", "{{-", "-}}", " ", "\n", ".", ".A", ".Messages", "$", "$x", ":=", "=", "|", "(", ")", ",", "if ", "else ", "end",
    "range ", "with ", "define ", "template ", "block ", "break", "continue", "and ", "or ", "not ", "eq ", "len ", "index ",
    "slice ", "print ", "printf ", "json ", '"s"', '"%d%s"', "`r`", "'c'", "1", "-2", "1.5e3", "nil", "true", "/*",
    "*/", "text", "{", "é",
]  # fmt: skip
JINJA = [
    "{{", "}}", "{%", "%}", "{%-", "-%}", "{#", "#}", " ", "\n", "messages", "x", ".", "[", "]", "(", ")", "|", "~", "+", "*",
    "**", "%",
    "/", "==", " in ", " is ", "not ", "if ", "else ", "elif ", "endif", "for ", "endfor", "set ", "endset", "macro ", "endmacro",
    "filter ", "call ", "namespace", "loop", ":", ",", "'s'", "1", "-", "range(3)", "none", "join", "tojson", "upper",
    ".format", "é",
]  # fmt: skip

VARIABLES = {"A": "a", "x": [1, "b", None], "Messages": [{"A": 1}], "messages": [{"role": "user", "content": "hi"}]}


def pieces(vocabulary: list[str]) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(vocabulary), max_size=25).map("".join)


def actions(vocabulary: list[str], begin: str, end: str) -> st.SearchStrategy[str]:
    """Templates whose delimiters match more often than chance would have it."""
    inside = st.lists(st.sampled_from(vocabulary), max_size=6).map(" ".join)
    return st.lists(inside, max_size=6).map(lambda parts: "".join(f"{begin} {part} {end}" for part in parts))


@settings(max_examples=400)
@given(pieces(GO) | actions(GO, "{{", "}}"))
def test_go_templates(source: str) -> None:
    try:
        text = GoTemplate.parse(source).execute(VARIABLES, budget=Budget(max_steps=2000))
    except TemplateError as error:
        text = str(error)
    assert isinstance(text, str)


@settings(max_examples=400)
@given(pieces(JINJA) | actions(JINJA, "{{", "}}") | actions(JINJA, "{%", "%}"))
def test_jinja_templates(source: str) -> None:
    try:
        text = jinja.render(source, VARIABLES, budget=Budget(max_steps=2000))
    except TemplateError as error:
        text = str(error)
    assert isinstance(text, str)
