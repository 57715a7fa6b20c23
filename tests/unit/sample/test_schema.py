"""Objects that name their properties have no others, wherever in a schema they stand."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.sample.test_grammar import schema, write
from tests.unit.sample.vocabulary import WordTokenizer

from puna.errors import BadRequest
from puna.sample.grammar import Grammars
from puna.sample.schema import MAX_NAMES, closed

INTEGER = {"type": "integer"}
A = {"type": "object", "properties": {"a": INTEGER}}
B = {"type": "object", "properties": {"b": INTEGER}}
OPEN = {**A, "additionalProperties": True}


@pytest.fixture(scope="module")
def tokenizer() -> WordTokenizer:
    return WordTokenizer()


@pytest.fixture(scope="module")
def grammars(tokenizer: WordTokenizer) -> Grammars:
    return Grammars(tokenizer.as_tokenizer())


CASES: list[tuple[Any, str, bool]] = [
    (A, '{"a":1}', True),
    (A, '{"a":1,"b":1}', False),
    (A, '{"b":1}', False),
    ({"properties": {"a": INTEGER}}, '{"b":1}', False),
    ({"properties": {"a": INTEGER}}, "[1]", False),
    (OPEN, '{"a":1,"b":1}', True),
    ({**A, "additionalProperties": False}, '{"a":1,"b":1}', False),
    ({**A, "additionalProperties": INTEGER}, '{"a":1,"b":1}', True),
    ({**A, "additionalProperties": INTEGER}, '{"a":1,"b":"x"}', False),
    ({**A, "unevaluatedProperties": False}, '{"a":1,"b":1}', False),
    ({"type": "object"}, '{"b":1}', True),
    ({"type": "object", "required": ["b"]}, '{"b":1}', True),
    # nested
    ({"type": "object", "properties": {"x": A}}, '{"x":{"a":1}}', True),
    ({"type": "object", "properties": {"x": A}}, '{"x":{"a":1,"b":1}}', False),
    ({"type": "object", "properties": {"x": OPEN}}, '{"x":{"a":1,"b":1}}', True),
    ({"type": "object", "properties": {"x": {"type": "object"}}}, '{"x":{"b":1}}', True),
    ({"type": "array", "items": A}, '[{"a":1},{"b":1}]', False),
    ({"type": "array", "prefixItems": [A]}, '[{"b":1}]', False),
    ({"type": "object", "additionalProperties": A}, '{"q":{"a":1}}', True),
    ({"type": "object", "additionalProperties": A}, '{"q":{"b":1}}', False),
    ({"properties": {"x": {"properties": {"a": INTEGER}}}}, '{"x":{"b":1}}', False),
    # references
    ({"$ref": "#/$defs/A", "$defs": {"A": A}}, '{"b":1}', False),
    ({"$ref": "#/$defs/A", "$defs": {"A": OPEN}}, '{"b":1}', True),
    ({"type": "array", "items": {"$ref": "#/definitions/A"}, "definitions": {"A": A}}, '[{"b":1}]', False),
    ({"$ref": "#/$defs/A", "properties": {"b": INTEGER}, "$defs": {"A": A}}, '{"a":1,"b":1}', True),
    ({"$ref": "#/$defs/A", "properties": {"b": INTEGER}, "$defs": {"A": A}}, '{"a":1,"c":1}', False),
    ({"properties": {"next": {"$ref": "#"}}}, '{"next":{"next":{}}}', True),
    ({"properties": {"next": {"$ref": "#"}}}, '{"next":{"other":{}}}', False),
    # allOf: one object, named by all
    ({"allOf": [A, B]}, '{"a":1,"b":1}', True),
    ({"allOf": [A, B]}, '{"a":1,"c":1}', False),
    ({"allOf": [A, B]}, '{"a":"x"}', False),
    ({"allOf": [A], "properties": {"b": INTEGER}}, '{"a":1,"b":1}', True),
    ({"allOf": [A, {"allOf": [B]}], "type": "object"}, '{"a":1,"b":1}', True),
    ({"allOf": [A, OPEN, B]}, '{"a":1,"b":1,"c":1}', True),
    ({"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}}, '{"a":1,"b":1}', True),
    ({"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}}, '{"a":1,"c":1}', False),
    ({"allOf": [{"properties": {"x": A}}, B]}, '{"x":{"b":1}}', False),
    ({"allOf": [{"anyOf": [A, B]}], "properties": {"c": INTEGER}}, '{"a":1,"c":1}', True),
    # alternatives: each for itself, with what stands beside them
    ({"anyOf": [A, B]}, '{"b":1}', True),
    ({"anyOf": [A, B]}, '{"a":1,"b":1}', False),
    ({"anyOf": [A, {"type": "string"}]}, '"x"', True),
    ({"oneOf": [A, B]}, '{"a":1,"b":1}', False),
    ({"properties": {"c": INTEGER}, "anyOf": [A, B]}, '{"c":1,"b":1}', True),
    ({"properties": {"c": INTEGER}, "anyOf": [A, B]}, '{"c":1,"d":1}', False),
    ({"properties": {"c": INTEGER}, "oneOf": [{"required": ["c"]}, B]}, '{"c":1}', True),
    ({"properties": {"c": INTEGER}, "anyOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}}, '{"c":1,"a":1}', True),
    ({"properties": {"c": INTEGER}, "anyOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}}, '{"c":1,"d":1}', False),
    ({"anyOf": [OPEN, B]}, '{"a":1,"z":1}', True),
    ({"properties": {"c": INTEGER}, "additionalProperties": True, "anyOf": [A, B]}, '{"c":1,"z":1}', True),
    ({"anyOf": [A, B], "oneOf": [A, {"properties": {"c": INTEGER}}]}, '{"a":1}', True),
    # patterns name properties too, and do not forbid the rest by themselves
    ({**A, "patternProperties": {"^x": INTEGER}}, '{"a":1,"xy":1}', True),
    ({**A, "patternProperties": {"^x": INTEGER}}, '{"a":1,"y":1}', False),
    ({"type": "object", "patternProperties": {"^x": INTEGER}}, '{"y":1}', True),
    ({"allOf": [A, {"patternProperties": {"^x": INTEGER}}]}, '{"a":1,"xy":1}', True),
    ({"type": "object", "patternProperties": {"^x": A}}, '{"xy":{"b":1}}', False),
]


@pytest.mark.parametrize(("given_schema", "text", "is_allowed"), CASES)
def test_what_an_object_may_have(
    given_schema: Any, text: str, is_allowed: bool, grammars: Grammars, tokenizer: WordTokenizer
) -> None:
    matcher = grammars.matcher(schema(given_schema))
    assert (write(matcher, text, tokenizer) == text) is is_allowed


def test_what_is_not_a_schema_stays() -> None:
    value = {"const": {"properties": {"a": 1}}, "default": {"properties": {}}, "description": "properties"}
    assert closed(value) == value


def test_a_definition_of_that_name_stays() -> None:
    found = closed({"allOf": [{"$ref": "#/$defs/open0"}, B], "$defs": {"open0": A}})
    assert found["$defs"]["open0"]["additionalProperties"] is False
    assert len(found["$defs"]) == 2


objects = st.recursive(
    st.sampled_from([INTEGER, {"type": "string"}, {"type": "object"}, {"$ref": "#/$defs/D"}, {}]),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "properties": st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
            "allOf": st.lists(inner, min_size=1, max_size=2),
            "anyOf": st.lists(inner, min_size=1, max_size=2),
            "items": inner,
            "additionalProperties": st.booleans(),
        },
    ),
    max_leaves=6,
)
instances = st.recursive(
    st.integers(0, 3) | st.just("x"),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=3) | st.lists(inner, max_size=2),
    max_leaves=5,
)


@given(objects, objects, instances)
def test_a_closed_schema_allows_nothing_that_the_open_one_forbids(outer: Any, definition: Any, instance: Any) -> None:
    whole = {**outer, "$defs": {"D": definition}}
    if "$ref" in json.dumps(definition):
        return  # jsonschema would go round for ever
    narrow, wide = jsonschema.Draft202012Validator(closed(whole)), jsonschema.Draft202012Validator(whole)
    if narrow.is_valid(instance):
        assert wide.is_valid(instance)


def test_repetition_is_refused_before_it_takes_memory(grammars: Grammars) -> None:
    many = {f"p{i}": True for i in range(2000)}
    with pytest.raises(BadRequest, match="repeat too much"):
        grammars.matcher(schema({"properties": many, "anyOf": [{"required": ["p0"]}] * (MAX_NAMES // 2000)}))


def test_depth_is_refused(grammars: Grammars) -> None:
    deep: Any = A
    for _ in range(250):
        deep = {"anyOf": [deep]}
    with pytest.raises(BadRequest, match="nested too deeply"):
        grammars.matcher(schema(deep))
