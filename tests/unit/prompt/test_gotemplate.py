from __future__ import annotations

import re
import time
from datetime import date, timedelta
from typing import Any

import pytest

from puna.errors import TemplateError
from puna.prompt.go_values import JsonDict, JsonList, Struct
from puna.prompt.gotemplate import GoTemplate
from puna.prompt.limits import MAX_TEMPLATE_CHARS, Budget
from tests.patience import PATIENCE_S

PEOPLE = [
    Struct("Message", {"Role": role, "Content": text}, {"role": role}) for role, text in (("user", "hi"), ("assistant", "yo"))
]


def run(source: str, **variables: Any) -> str:
    return GoTemplate.parse(source).execute(variables)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("plain { text } }}", "plain { text } }}"),
        ("a {{ .S }} b", "a text b"),
        ("a \n {{- .S -}} \n b", "atextb"),
        ("a {{ .S -}} b {{- .S }} c", "a textbtext c"),
        ("{{-3}}", "-3"),
        ("a{{/* a comment with }} inside */}}b {{- /* trimmed */ -}} c", "abc"),
        ('{{ "a\\n\\"\\u00e9" }}{{ `raw\\n` }}', 'a\n"éraw\\n'),
        ("{{ 'a' }} {{ 0x1f }} {{ 017 }} {{ 1_000 }} {{ -1.5 }} {{ 1e3 }} {{ 1e21 }} {{ 0.00001 }}",
         "97 31 15 1000 -1.5 1000 1e+21 1e-05"),
        ("{{ true }} {{ .Missing }} {{ .M.missing }}", "true <no value> <no value>"),
        ("{{ .L }} {{ .M }} {{ .J }}", '[1 b true] map[a:1 b:x] {"k":"\\u003c\\u0026\\u003e"}'),
        ("{{ .M.a }}{{ $.M.b }}{{ (index .People 1).Role }}", "1xassistant"),
        ("{{ if .S }}yes{{ else }}no{{ end }}{{ if .Empty }}yes{{ end }}", "yes"),
        ("{{ if .Empty }}a{{ else if .No }}b{{ else if .S }}c{{ else }}d{{ end }}", "c"),
        ("{{ with .S }}{{ . }}{{ end }}{{ with .Empty }}x{{ else }}none{{ end }}", "textnone"),
        ("{{ with .Empty }}x{{ else with .S }}{{ . }}{{ end }}", "text"),
        ("{{ with $x := .S }}{{ $x }}{{ end }}{{ if $y := .L }}{{ len $y }}{{ end }}", "text3"),
        ("{{ range .People }}{{ .Role }}:{{ .Content }};{{ end }}", "user:hi;assistant:yo;"),
        ("{{ range $i, $p := .People }}{{ $i }}{{ $p.Role }}{{ end }}{{ range $x := .L }}{{ $x }}{{ end }}",
         "0user1assistant1btrue"),
        ("{{ range $k, $v := .M }}{{ $k }}={{ $v }} {{ end }}", "a=1 b=x "),
        ("{{ range .None }}x{{ else }}empty{{ end }}{{ range 3 }}{{ . }}{{ end }}", "empty012"),
        ("{{ range .L }}{{ if eq . 1 }}{{ continue }}{{ end }}{{ . }}{{ break }}{{ end }}".replace("eq . 1",
         'eq (print .) "1"'), "b"),
        ("{{ $x := 1 }}{{ if true }}{{ $x = 2 }}{{ $x := 3 }}{{ $x }}{{ end }}{{ $x }}", "32"),
        ("{{ $x := `a` }}{{ range .L }}{{ $x = print $x . }}{{ end }}{{ $x }}", "a1btrue"),
        ('{{ define "t" }}<{{ . }}{{ $ }}>{{ end }}{{ template "t" .S }}{{ template "t" }}', "<texttext><<no value><no value>>"),
        ('{{ block "b" .S }}[{{ . }}]{{ end }}', "[text]"),
        ("{{ .S | printf `%s-%s` `a` | len }}", "6"),
        ("{{ and .S .L `last` }}{{ and .Empty (index .L 9) }}|{{ or .Empty `x` (index .L 9) }}", "last|x"),
        ("{{ not .S }} {{ eq .S `text` }} {{ eq .S `a` `text` }} {{ ne 1 2 }} {{ eq .Missing nil }}",
         "false true true true true"),
        ("{{ lt 1 2 }}{{ le 2 2 }}{{ gt 1 2 }}{{ ge `b` `a` }}", "truetruefalsetrue"),
        ("{{ len `é` }}{{ len .L }}{{ len .M }}{{ index .L 1 }}{{ index .M `a` }}{{ index `abc` 1 }}", "232b198"),
        ("{{ slice .S 1 3 }}{{ slice .L 2 }}{{ len (slice .People 1) }}", "ex[true]1"),
        ("{{ print 1 2 `a` 3 4 }}|{{ println 1 `a` }}", "1 2a3 4|1 a\n"),
        ('{{ printf "%s|%4d|%-4s|%06.2f|%v|%q|%%|%x|%t|%c" `a` 3 `b` 2.5 .L "q\\n" 255 true 65 }}',
         'a|   3|b   |002.50|[1 b true]|"q\\n"|%|ff|true|A'),
        ("{{ printf `%5.1f|%+d|%x` 1.25 7 `hi` }} {{ 08 }}", "  1.2|+7|6869 8"),
        ("{{ printf `%d %s` `x` }}{{ printf `a` 1 }}", "%!d(string=x) %!s(MISSING)a%!(EXTRA int=1)"),
        ("{{ html `<a href=\"x\">'` }} {{ urlquery `a b&` }} {{ js `it's <x>` }}",
         "&lt;a href=&#34;x&#34;&gt;&#39; a+b%26 it\\'s \\u003Cx\\u003E"),
        ("{{ json .M }} {{ json .J }} {{ json `<` }} {{ json .L }}",
         '{"a":1,"b":"x"} {"k":"\\u003c\\u0026\\u003e"} "\\u003c" [1,"b",true]'),
    ],
)  # fmt: skip
def test_the_language(source: str, expected: str) -> None:
    variables = {
        "S": "text",
        "Empty": "",
        "No": False,
        "L": [1, "b", True],
        "M": {"b": "x", "a": 1},
        "J": JsonDict({"k": "<&>"}),
        "None": None,
        "People": PEOPLE,
    }
    assert run(source, **variables) == expected


def test_values_that_print_as_json() -> None:
    tool = Struct("Tool", {}, {"type": "function", "args": JsonDict({"b": 2.0, "a": [0.5]})})
    assert run("{{ .T }}{{ range .T }}{{ . }}{{ end }}", T=JsonList([tool])) == (
        '[{"type":"function","args":{"a":[0.5],"b":2}}]{"type":"function","args":{"a":[0.5],"b":2}}'
    )


def test_dates() -> None:
    today = date.today()
    assert run("{{ currentDate }} {{ yesterdayDate }}") in (
        f"{today} {today - timedelta(days=1)}",
        f"{today + timedelta(days=1)} {today}",
    )


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, "string"),
        ({"type": "integer"}, "number"),
        ({"type": ["string", "null"]}, "string | null"),
        ({"type": "array"}, "any[]"),
        ({"type": "object"}, "Record<string, any>"),
        ({"anyOf": [{"type": "boolean"}, {"type": "number"}]}, "boolean | number"),
        ({"type": "other"}, "any"),
        ({}, "any"),
    ],
)
def test_typescript_types(schema: dict[str, Any], expected: str) -> None:
    assert run("{{ toTypeScriptType .P }}", P=schema) == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n\n{{ if }}", "line 3: unexpected end in if"),
        ("{{ if .X }}", "{{end}} is missing"),
        ("a\n{{ end }}", "line 2: unexpected {{end}}"),
        ("{{ else }}", "unexpected {{else}}"),
        ("{{ if 1 }}{{ else }}{{ else }}{{ end }}", "unexpected {{else}}"),
        ("{{ end", "unclosed action"),
        ("{{", "unclosed action"),
        ("{{ }}", "empty action"),
        ("{{/* x", "unclosed comment"),
        ("{{ $q }}", "undefined variable '$q'"),
        ("{{ if 1 }}{{ $q := 1 }}{{ end }}{{ $q }}", "undefined variable '$q'"),
        ("{{ $q = 1 }}", "undefined variable '$q'"),
        ("{{ foo 1 }}", "function 'foo' is not defined"),
        ("x\n{{ template `t` }}", "line 2: template 't' is not defined"),
        ("{{ template t }}", "unexpected 't' in template"),
        ("{{ break }}", "break outside a range"),
        ("{{ if 1 }}{{ define `x` }}{{ end }}{{ end }}", "define inside another block"),
        ('{{ "unfinished }}', "unexpected"),
        ('{{ "\\q" }}', "malformed constant"),
        ("{{ 'ab' }}", "unexpected"),
        ("{{ 0xZ }}", "unexpected 'xZ'"),
        ("{{ 1 | 2 }}", "something that is no function"),
        ("{{ (1 }}", "unexpected end"),
        ("{{ 1) }}", "unexpected ')'"),
        ("{{ .A! }}", "unexpected '!"),
        ("{{ .A.B$x }}", "unexpected '$x'"),
        ("{{ range $a, $b }}{{ end }}", "unexpected end"),
        ("{{ $a, $b := 1 }}", "undefined variable|unexpected ','"),
        ("{{ end 1 }}", "unexpected {{end}}"),
        ("{{ if 1 }}{{ end 1 }}", "unexpected '1' in end"),
        ("x" * (MAX_TEMPLATE_CHARS + 1), "more than"),
        ("{{" + "(" * 9999 + "1" + ")" * 9999 + "}}", "nested more than"),
        ("{{ if 1 }}" * 9999 + "{{ end }}" * 9999, "nested more than"),
    ],
)
def test_syntax_errors_name_the_line(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=re.escape(message).replace(r"\|", "|")) as caught:
        GoTemplate.parse(source)
    assert "template" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("\n{{ .X.Y }}", "line 2: nil has no field Y"),
        ("{{ range .People }}{{ .Foo }}{{ end }}", "can't evaluate field Foo in type Message"),
        ("{{ .S.X }}", "can't evaluate field X in type string"),
        ("{{ index .L 3 }}", "index out of range: 3"),
        ("{{ index .L -1 }}", "index out of range: -1"),
        ("{{ index .L `a` }}", "cannot index slice/array with type string"),
        ("{{ index 1 0 }}", "can't index item of type int"),
        ("{{ slice .L 2 1 }}", "invalid slice index: 2 > 1"),
        ("{{ slice 1 }}", "can't slice item of type int"),
        ("{{ len 1 }}", "len of type int"),
        ("{{ eq 1 `a` }}", "incompatible types for comparison"),
        ("{{ eq .L .L }}", "invalid type for comparison: slice"),
        ("{{ lt true false }}", "invalid type for comparison"),
        ("{{ eq 1 }}", "wrong number of arguments for eq: want at least 2, got 1"),
        ("{{ not 1 2 }}", "wrong number of arguments for not: want 1, got 2"),
        ("{{ and }}", "wrong number of arguments for and"),
        ("{{ .S 1 }}", "arguments for something that is no function"),
        ("{{ 1 | .S }}", "arguments for something that is no function"),
        ("{{ range .S }}{{ end }}", "range can't iterate over a string"),
        ("{{ call .S }}", "call of a string"),
        ("{{ printf `%9999d` 1 }}", "wider than 1000"),
        ("{{ toTypeScriptType 1 }}", "toTypeScriptType needs a property"),
    ],
)
def test_errors_while_rendering_name_the_line(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=r"template, line \d+: .*" + re.escape(message.partition(": ")[2] or message)):
        run(source, S="text", L=[1, 2, 3], People=PEOPLE)


@pytest.mark.parametrize(
    "source",
    [
        "{{ range 1000000000 }}{{ end }}",
        "{{ range 1000000000 }}xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx{{ end }}",
        "{{ $x := `ab` }}{{ range 99 }}{{ $x = print $x $x }}{{ end }}",
        "{{ $x := `ab` }}{{ range 99 }}{{ $x = printf `%s%s` $x $x }}{{ end }}",
        "{{ $x := `ab` }}{{ range 99 }}{{ $x = html $x $x }}{{ end }}",
        "{{ $x := `<<` }}{{ range 99 }}{{ $x = js $x }}{{ $x = json $x }}{{ end }}",
        "{{ define `a` }}{{ template `a` }}{{ end }}{{ template `a` }}",
        "{{ define `a` }}{{ range 9 }}{{ template `a` }}{{ end }}{{ end }}{{ template `a` }}",
    ],
)
def test_hostile_templates_end_with_an_error(source: str) -> None:
    begin = time.monotonic()
    with pytest.raises(TemplateError):
        run(source)
    assert time.monotonic() - begin < PATIENCE_S / 2  # the limit is 5 s


def test_steps_are_counted_across_renderings_that_share_a_budget() -> None:
    template = GoTemplate.parse("{{ range 30 }}{{ end }}")
    budget = Budget(max_steps=50)
    template.execute({}, budget=budget)
    with pytest.raises(TemplateError, match="more than 50 steps"):
        template.execute({}, budget=budget)


def test_mentions() -> None:
    template = GoTemplate.parse(
        "{{ define `t` }}{{ .InTemplate }}{{ end }}{{ if (index $.Messages 0).Content }}{{ range .Tools }}{{ end }}{{ end }}"
    )
    assert template.fields == {"InTemplate", "Messages", "Content", "Tools"}
    assert template.mentions("Messages")
    assert not template.mentions("Suffix")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ .Prompt }}A:{{ .Response }}END", "pA:"),
        ("{{ if .Prompt }}<{{ .Response }}>{{ else }}none{{ end }}END", "<"),
        ("{{ .Prompt }}END", "pEND"),
    ],
)
def test_cut_after_response(source: str, expected: str) -> None:
    assert GoTemplate.parse(source).cut_after_response().execute({"Prompt": "p", "Response": ""}) == expected
