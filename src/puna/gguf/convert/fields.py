"""Fields of config.json and of objects in it, each held against what it may be when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from puna.errors import FileFormatError

MAX_NUMBER = 1e30  # far from what a 32-bit float cannot hold
MAX_LENGTH = 1 << 24  # of an axis, in values
MAX_LAYERS = 1024


class Fields:
    """A JSON object. Several names are tried one after another: checkpoints of one kind spell a field in several ways.

    A field that is null is as good as none. Errors of all methods: FileFormatError naming the field.
    """

    def __init__(self, values: Mapping[str, Any], file: str = "config.json") -> None:
        self.values = values
        self.file = file

    @classmethod
    def of_text(cls, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Fields:
        """Of a model that also sees or hears, the part that reads."""
        inner = values.get("text_config")
        return cls({**defaults, **values, **(inner if isinstance(inner, dict) else {})})

    @classmethod
    def of_vision(cls, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Fields:
        """Of a model that also sees, the part that does; ``text`` in it has the fields of the part that reads."""
        inner = values.get("vision_config")
        text = cls.of_text(values, {}).values
        return cls({**defaults, **values, **(inner if isinstance(inner, dict) else {}), "text": text})

    def get(self, *names: str) -> Any:
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    def has(self, *names: str) -> bool:
        return self.get(*names) is not None

    def whole(self, *names: str, default: int | None = None, low: int = 1, high: int = MAX_LENGTH) -> int:
        value = self._there(names, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.wrong(names[0], value, "not a whole number")
        if not low <= value <= high:
            raise self.wrong(names[0], value, f"not from {low} to {high}")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        value = self._there(names, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not -MAX_NUMBER < value < MAX_NUMBER:
            raise self.wrong(names[0], value, "not a number")
        return float(value)

    def positive(self, *names: str, default: float | None = None) -> float:
        value = self.number(*names, default=default)
        if not 0 < value < 1 << 31:
            raise self.wrong(names[0], value, "not a number above 0")
        return value

    def flag(self, *names: str, default: bool | None = None) -> bool:
        value = self._there(names, default)
        if not isinstance(value, bool):
            raise self.wrong(names[0], value, "neither true nor false")
        return value

    def text(self, *names: str, default: str | None = None) -> str:
        value = self._there(names, default)
        if not isinstance(value, str):
            raise self.wrong(names[0], value, "not a text")
        return value

    def object(self, *names: str) -> Fields:
        """Empty when there is none."""
        value = self._there(names, {})
        if not isinstance(value, dict):
            raise self.wrong(names[0], value, "not an object")
        return Fields(value, self.file)

    def items(self, *names: str, default: list[Any] | None = None, length: int | None = None) -> list[Any]:
        value = self._there(names, default)
        if not isinstance(value, list) or (length is not None and len(value) != length):
            raise self.wrong(names[0], value, "not a list" if length is None else f"not a list of {length}")
        return value

    def numbers(self, *names: str, length: int) -> list[float]:
        found = self.items(*names, length=length)
        return [Fields({names[0]: value}, self.file).number(names[0]) for value in found]

    def wrong(self, name: str, value: Any, what: str) -> FileFormatError:
        return FileFormatError(f"{self.file}: {name} is {str(value)[:60]}, {what}")

    def _there(self, names: tuple[str, ...], default: Any) -> Any:
        value = self.get(*names)
        if value is None:
            value = default
        if value is None:
            raise FileFormatError(f"{self.file}: {names[0]} is missing")
        return value
