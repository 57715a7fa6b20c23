"""JSON schemas as those who send them mean them: an object that names its properties has no others.

By the letter of JSON Schema, ``{"properties": {...}}`` allows any further property, and anything that is no object. Who writes
such a schema for a model's answer means neither; other servers take it as closed too, and a small model that may invent
properties does so until its limit. Here such objects are closed: ``additionalProperties``, of any value, says otherwise.

What a schema takes from others counts as its own: all of ``allOf``, what ``$ref`` points to, and for each alternative of
``anyOf`` and ``oneOf`` what stands beside them. Closing each of them by itself would forbid what the others name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Schema = Any  # an object, or true or false

MAX_DEPTH = 200
MAX_NAMES = 200_000  # read or written: alternatives repeat those that stand beside them

_ALTERNATIVES = ("anyOf", "oneOf")
_PATTERNS = "patternProperties"
_ONE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames", "unevaluatedProperties")
_CONDITIONAL = ("if", "then", "else")
_SAY_NAMES = frozenset(("properties", _PATTERNS, "additionalProperties", "unevaluatedProperties", "allOf", "$ref"))
_SAY_NAMES |= {*_ALTERNATIVES, *_CONDITIONAL}
_LISTS = ("prefixItems", *_ALTERNATIVES, "allOf")
_MAPS = ("properties", _PATTERNS, "$defs", "definitions")


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with every object closed that names properties and does not say whether there may be others.

    Errors: ValueError for one that is nested too deeply, or whose definitions and alternatives repeat too much.
    """
    return _Closing(schema).whole()


@dataclass
class _Names:
    """What a schema and all that applies beside it say of an object's properties."""

    properties: dict[str, None] = field(default_factory=dict)  # in order
    patterns: dict[str, None] = field(default_factory=dict)
    is_open: bool = False

    def add(self, other: _Names) -> None:
        self.properties |= other.properties
        self.patterns |= other.patterns
        self.is_open = self.is_open or other.is_open


_NO_NAMES = _Names()


class _Closing:
    """One schema and the copies of its definitions that are made on the way."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._copies: dict[str, str] = {}  # the name of the open form, by reference
        self._definitions: dict[str, Schema] = {}
        self._n_left = MAX_NAMES
        given = root.get("$defs")
        longest = max(map(len, given), default=0) if isinstance(given, dict) else 0
        self._prefix = "open" + "-" * longest  # longer than any name there

    def whole(self) -> dict[str, Any]:
        found = self._alone(self._root, 0)
        assert isinstance(found, dict)
        if self._definitions:
            own = found.get("$defs")
            found["$defs"] = {**(own if isinstance(own, dict) else {}), **self._definitions}
        return found

    def _alone(self, schema: Schema, depth: int) -> Schema:
        """A schema that nothing else applies beside."""
        return self._closed(schema, _NO_NAMES, depth)

    def _closed(self, schema: Schema, beside: _Names, depth: int) -> Schema:
        """*schema*, closed; *beside* is what others say of the same object, who leave the closing to it."""
        if not isinstance(schema, dict):
            return schema
        if depth > MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        if beside is _NO_NAMES and _is_reference_alone(schema):
            return self._within(schema, depth)  # what it points to is closed where it stands
        own_alternatives = [key for key in _ALTERNATIVES if isinstance(schema.get(key), list)]
        names = _Names()
        names.add(beside)
        names.add(self._names({key: value for key, value in schema.items() if key not in own_alternatives}))
        if names.is_open:
            return self._opened(schema, depth)
        if own_alternatives:
            return self._alternatives(schema, own_alternatives, names, depth)
        if not names.properties:
            return self._open(schema, depth)  # patterns alone do not say that there is nothing else
        self._count(len(names.properties) + len(names.patterns))
        found = self._open(schema, depth)
        given = found.get("properties")
        own = given if isinstance(given, dict) else {}
        found["properties"] = {name: own.get(name, True) for name in names.properties}
        if names.patterns:
            given = found.get(_PATTERNS)
            found[_PATTERNS] = {**dict.fromkeys(names.patterns, True), **(given if isinstance(given, dict) else {})}
        found["additionalProperties"] = False
        return _object(found)

    def _alternatives(self, schema: dict[str, Any], keys: list[str], names: _Names, depth: int) -> Schema:
        """Each alternative is closed for itself, with all that stands beside it."""
        key, *others = keys
        for other in others:  # alternatives beside alternatives: any of these names may come
            for item in schema[other]:
                names.add(self._names(item))
        if names.is_open:
            return self._opened(schema, depth)
        rest = {name: value for name, value in schema.items() if name not in keys}
        found = self._open(rest, depth) if rest else {}
        for other in others:
            found[other] = [self._opened(item, depth + 1) for item in schema[other]]
        beside = names if names.properties or names.patterns else _NO_NAMES
        found[key] = [self._closed(item, beside, depth + 1) for item in schema[key]]
        return found

    def _open(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        """*schema* without its closing, which something around it does; what lies within its properties is closed."""
        found = self._within({key: value for key, value in schema.items() if key not in ("allOf", "$ref")}, depth)
        if "allOf" in schema:
            parts = schema["allOf"]
            found["allOf"] = [self._opened(item, depth + 1) for item in parts] if isinstance(parts, list) else parts
        if "$ref" in schema:
            found["$ref"] = self._reference(schema["$ref"], depth)
        return found

    def _opened(self, schema: Schema, depth: int) -> Schema:
        if not isinstance(schema, dict):
            return schema
        if depth > MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        found = self._open(schema, depth)
        for key in _ALTERNATIVES:
            if isinstance(schema.get(key), list):
                found[key] = [self._opened(item, depth + 1) for item in schema[key]]
        return _object(found)

    def _reference(self, pointer: Any, depth: int) -> Any:
        """A reference to the open form of a definition, which is made when first needed."""
        target = self._target(pointer)
        if not isinstance(target, dict):
            return pointer
        if pointer not in self._copies:
            self._copies[pointer] = name = f"{self._prefix}{len(self._copies)}"
            self._definitions[name] = self._opened(target, depth + 1)
        return f"#/$defs/{self._copies[pointer]}"

    def _within(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        """Everything inside *schema* closed, and *schema* itself as it is."""
        found: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _MAPS and isinstance(value, dict):
                found[key] = {name: self._alone(item, depth + 1) for name, item in value.items()}
            elif key in _LISTS and isinstance(value, list):
                found[key] = [self._alone(item, depth + 1) for item in value]
            elif key in _ONE:
                found[key] = self._alone(value, depth + 1)
            else:
                found[key] = value
        return _object(found)

    def _names(self, schema: Schema) -> _Names:
        """Of *schema* itself and of all that applies, or may apply, to the same value."""
        found = _Names()
        visited: set[str] = set()  # each definition once
        waiting: list[tuple[str, Any]] = [("", schema)]
        while waiting:
            key, value = waiting.pop()
            self._count(1)
            if key in ("properties", _PATTERNS):
                if isinstance(value, dict):
                    self._count(len(value))
                    (found.properties if key == "properties" else found.patterns).update(dict.fromkeys(value))
            elif key in ("additionalProperties", "unevaluatedProperties"):
                found.is_open = found.is_open or key == "additionalProperties" or value is not False
            elif key in ("allOf", *_ALTERNATIVES):
                waiting += [("", item) for item in reversed(value)] if isinstance(value, list) else []
            elif key == "$ref":
                if isinstance(value, str) and value not in visited:
                    visited.add(value)
                    waiting.append(("", self._target(value)))
            elif key in ("", *_CONDITIONAL) and isinstance(value, dict):
                waiting += [item for item in reversed(value.items()) if item[0] in _SAY_NAMES]
        return found

    def _count(self, n: int) -> None:
        self._n_left -= n
        if self._n_left < 0:
            raise ValueError("its definitions and alternatives repeat too much")

    def _target(self, pointer: Any) -> Schema:
        if not isinstance(pointer, str) or not pointer.startswith("#"):
            return None
        found: Any = self._root
        for step in pointer[1:].split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict):
                found = found.get(name)
            elif isinstance(found, list) and name.isdecimal() and len(name) < 10 and int(name) < len(found):
                found = found[int(name)]
            else:
                return None
        return found


def _is_reference_alone(schema: dict[str, Any]) -> bool:
    beside = ("properties", _PATTERNS, "additionalProperties", "allOf", *_ALTERNATIVES)
    return isinstance(schema.get("$ref"), str) and not any(key in schema for key in beside)


def _object(schema: dict[str, Any]) -> dict[str, Any]:
    """Who names properties means an object."""
    return {"type": "object", **schema} if "properties" in schema and "type" not in schema else schema
