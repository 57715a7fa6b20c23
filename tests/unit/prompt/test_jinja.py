from __future__ import annotations

import re
import time
from typing import Any

import pytest

from puna.errors import TemplateError
from puna.prompt import jinja
from puna.prompt.limits import MAX_TEMPLATE_CHARS, Budget
from tests.patience import PATIENCE_S


@pytest.mark.parametrize(
    ("template", "variables", "expected"),
    [
        ("{% for m in ms %}\n  {% if m %}\n{{ m }}\n  {% endif %}\n{% endfor %}", {"ms": [1, 0, 2]}, "1\n2\n"),
        ("{% for i in range(9) %}{{ i }}{% if i == 3 %}{% break %}{% endif %}{% continue %}x{% endfor %}", {}, "0123"),
        ("{{ x | tojson }}", {"x": {"a": "<é>"}}, '{"a": "<é>"}'),
        ("{{ x | tojson(indent=2) }}", {"x": [1]}, "[\n  1\n]"),
        ("{% generation %}a{{ 1 }}{% endgeneration %}b", {}, "a1b"),
        ("{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", {}, "3"),
        ("{% macro m(x, y='!') %}<{{ x }}{{ y }}>{% endmacro %}{{ m('a') }}{{ m('b', y='?') }}", {}, "<a!><b?>"),
        ("{{ ms[::-1][0] }}{{ ms[1:] }}{{ 'abc'[:-1] }}", {"ms": [1, 2]}, "2[2]ab"),
        ("{{ ms | selectattr('r', 'equalto', 1) | map(attribute='c') | join(',') }}", {"ms": [{"r": 1, "c": "x"}]}, "x"),
        ("{{ 'a,b'.split(',')[-1] }}{{ ' x '.strip() }}{{ 'x' in 'xyz' }}{{ 'A'.lower().startswith('a') }}", {}, "bxTrueTrue"),
        ("{% for k, v in d.items() %}{{ k }}{{ v }}{% endfor %}{{ d.get('z', 0) }}", {"d": {"a": 1}}, "a10"),
        ("{{ 'a' ~ 1 ~ none }}{{ 'x%s' % 2 }}{{ '{}-{}'.format(1, 2) }}{{ 7 // 2 }}{{ 2 ** 3 }}{{ -1 }}", {}, "a1Nonex21-238-1"),
        ("{% set a, b = (1, 2) %}{{ a }}{{ b }}{% set s %}x{{ a }}{% endset %}{{ s }}", {}, "12x1"),
        ("{{ missing }}{{ missing is defined }}{{ missing or 'none' }}", {}, "Falsenone"),
        ("{% for x in tree recursive %}{{ x.n }}{{ loop(x.c) if x.c }}{% endfor %}", {"tree": [{"n": 1, "c": [{"n": 2}]}]}, "12"),
        ("{% for m in ms %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{% endfor %}", {"ms": ["a"]}, "1True1"),
        ("{{ 'a\nb' | indent(2) }}", {}, "a\n  b"),
        ("{% macro m() %}{{ caller(1) }}{% endmacro %}{% call(x) m() %}{{ x }}{% endcall %}", {}, "1"),
        ("{% filter upper %}a{% endfilter %}", {}, "A"),
    ],
)  # fmt: skip
def test_what_templates_use(template: str, variables: dict[str, Any], expected: str) -> None:
    assert jinja.render(template, variables) == expected


def test_the_date() -> None:
    assert re.fullmatch(r"\d\d \w+ \d{4}", jinja.render("{{ strftime_now('%d %b %Y') }}", {}))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("a\nb\n{% if %}", "line 3: Expected an expression"),
        ("{% for %}", "line 1"),
        ("{{ 'x' | nosuch }}", "line 1: No filter named 'nosuch'"),
        ("a\n{{ missing.x }}", "line 2: 'missing' is undefined"),
        ("\n\n{% for x in 5 %}{% endfor %}", "line 3: TypeError: 'int' object is not iterable"),
        ("{{ 1 / 0 }}", "line 1: ZeroDivisionError"),
        ("{{ raise_exception('only user') }}", "the chat template refuses these messages: only user"),
        ("{% include 'x' %}", "line 1: TypeError: no loader"),
        ("x" * (MAX_TEMPLATE_CHARS + 1), "characters; more than"),
    ],
)
def test_errors_name_the_line(template: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        jinja.render(template, {})


def test_check_finds_syntax_errors_without_rendering() -> None:
    jinja.check("{{ raise_exception('not called') }}")
    with pytest.raises(TemplateError, match="line 2"):
        jinja.check("\n{% endif %}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ().__class__.__base__.__subclasses__() }}",
        "{{ ''.__class__.mro() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format(1).x }}",
        "{{ messages.append(1) }}",
        "{{ messages.clear() }}",
        "{{ dict.fromkeys('ab') }}",
        "{{ namespace.__init__ }}{{ namespace.mro() }}",
        "{{ (messages|attr('append'))(1) }}",
        "{{ lipsum() }}",
    ],
)
def test_the_sandbox(template: str) -> None:
    messages = ["untouched"]
    with pytest.raises(TemplateError):
        jinja.render(template, {"messages": messages})
    assert messages == ["untouched"]


def growing(body: str, start: str = "'ab'") -> str:
    """A template that runs *body* 99 times on ``ns.x``."""
    return f"{{% set ns = namespace(x={start}) %}}{{% for i in range(99) %}}{body}{{% endfor %}}"


HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "empty loops": "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4,
    "wide range": "{% for a in range(10**9) %}{% endfor %}",
    "range to list": "{{ range(99999) | list | length }}" * 3000,
    "repeated text": "{{ 'a' * 10**9 }}",
    "repeated list": "{{ [1] * 10**9 }}",
    "doubling with ~": growing("{% set ns.x = ns.x ~ ns.x %}"),
    "doubling with +": growing("{% set ns.x = ns.x + ns.x %}"),
    "doubling by join": growing("{% set ns.x = [ns.x, ns.x] | join %}"),
    "doubling by method": growing("{% set ns.x = ns.x.join(['', '', '']) ~ ns.x %}"),
    "doubling by format": growing("{% set ns.x = '{0}{0}'.format(ns.x) %}"),
    "doubling by percent": growing("{% set ns.x = '%(a)s%(a)s' % {'a': ns.x} %}"),
    "doubling by blocks": growing("{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    "doubling lists": growing("{% set ns.x = [ns.x, ns.x] %}", "[1]") + "{{ ns.x }}",
    "doubling dicts": growing("{% set ns.x = {'a': ns.x, 'b': ns.x} %}", "{}") + "{{ ns.x | tojson }}",
    "comparing doubled lists": "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    "replacing nothing": "{{ ('a' * 99999).replace('', 'b' * 99999) }}",
    "filter that replaces": "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "many slices": "{% set b = 'x' * 1000000 %}{% set c = [" + "b[1:], " * 20000 + "1] %}",
    "lazy defaults": "{{ ([none] * 99999) | map('default', 'x' * 999999, true) | join }}",
    "wide percent": "{{ '%1000000000d' % 1 }}",
    "computed percent": "{{ '%*d' % (10**9, 1) }}",
    "wide format": "{{ '{:1000000000}'.format(1) }}",
    "computed format": "{{ '{:{}}'.format(1, 10**9) }}",
    "justified": "{{ 'a'.ljust(10**9) }}",
    "centred": "{{ 'a' | center(10**9) }}",
    "indented": "{{ 'a' | indent(10**9, true) }}",
    "indented json": "{{ [1] | tojson(indent=10**9) }}",
    "padded date": "{{ strftime_now('%1000000000Y') }}",
    "large power": "{{ 9 ** 99999999 }}",
    "squaring": "{% set ns = namespace(x=10) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "endless recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "branching recursion": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(50) }}",
    "recursive loops": "{% for x in range(9) recursive %}{% if loop.depth < 20 %}{{ loop(range(9)) }}{% endif %}{% endfor %}",
    "endless output": "{% set b = 'x' * 100000 %}{% for i in range(99999) %}{{ b }}{% endfor %}",
    "long strip": "{{ ('ab' * 99999).strip('ba' * 99999) }}",
    "sum of lists": "{{ ([[1]] * 99999) | sum(start=[]) }}",
    "deep parentheses": "{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}",
    "deep blocks": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "long chains": "{{ " + "+".join("1" * 30000) + " }}",
    "many branches": "{% if a %}" + "{% elif b %}" * 15000 + "{% endif %}",
}  # fmt: skip


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_templates_end_with_an_error(template: str) -> None:
    begin = time.monotonic()
    with pytest.raises(TemplateError):
        jinja.render(template, {})
    assert time.monotonic() - begin < PATIENCE_S / 2  # the limit is 5 s


def test_comparisons_count_as_steps() -> None:
    with pytest.raises(TemplateError, match="more than 50 steps"):
        jinja.render("{{ [" + "x == 1, " * 100 + "] }}", {"x": 1}, budget=Budget(max_steps=50))


def test_time_is_limited() -> None:
    with pytest.raises(TemplateError, match="takes too long"):
        jinja.render("{% for i in range(1000) %}{% endfor %}", {}, budget=Budget(max_seconds=0))


def test_namespaces_that_refer_to_themselves_print() -> None:
    assert jinja.render("{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns }}", {}) == "<namespace>"


def test_long_conversations_are_within_the_limits() -> None:
    """A template that looks at all messages for each message, and a conversation of a million characters."""
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": "word " * 400} for i in range(500)]
    template = (
        "{% set ns = namespace(text='') %}{% for m in messages %}{% set later = messages[loop.index:] | list %}"
        "{{ m.role | upper }}: {{ m.content | trim | replace('word', 'Word') }}{{ later | length }}\n{% endfor %}"
    )
    prompt = jinja.render(template, {"messages": messages})
    assert prompt.count("Word") == 200_000
    assert prompt.endswith("Word0\n")
