"""The key-value part of a GGUF file: typed access to values, and arrays that are decoded only when asked for.

Knows nothing of models: which keys matter, and what they mean, is the caller's business.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

from puna.errors import FileFormatError
from puna.gguf import strings
from puna.gguf.types import NUMPY_NAMES, SCALARS, ValueType

if TYPE_CHECKING:  # who reads numbers and long arrays imports it then: others start sooner without
    import numpy as np

D = TypeVar("D")

ARCHITECTURE = "general.architecture"
_ABSOLUTE = ("general.", "tokenizer.", "split.", "quantize.", "adapter.")


class _Missing:
    pass


_MISSING = _Missing()


class LazyArray(Sequence[Any]):
    """An array value that stays in the file; items are decoded on access.

    Strings come out as text, with the replacement character for what is not UTF-8; ``bytes_at`` and ``iter_bytes`` give
    them unchanged. Usable while the file is open.
    """

    def __init__(self, source: mmap.mmap, element: ValueType, length: int, begin: int, end: int) -> None:
        self.element = element
        self._source = source
        self._length = length
        self._begin = begin
        self._end = end
        self._offsets: np.ndarray[Any, np.dtype[np.int64]] | None = None

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._length))]
        if self.element is ValueType.STRING:
            return self.bytes_at(index).decode(errors="replace")
        packed = SCALARS[self.element]
        (value,) = packed.unpack_from(self._source, self._begin + self._checked(index) * packed.size)
        return bool(value) if self.element is ValueType.BOOL else value

    def __iter__(self) -> Iterator[Any]:
        if self.element is ValueType.STRING:
            return (raw.decode(errors="replace") for raw in self.iter_bytes())
        return iter(self.numpy().tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and not isinstance(other, str | bytes) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # equal to lists, which have no hash either

    def __repr__(self) -> str:
        return f"LazyArray({self.element.name}, {self._length} items)"

    def numpy(self) -> np.ndarray[Any, Any]:
        """A copy of the numbers.

        Errors: TypeError for an array of strings.
        """
        if self.element is ValueType.STRING:
            raise TypeError("an array of strings has no numpy form")
        import numpy as np

        numbers = np.frombuffer(self._source, NUMPY_NAMES[self.element], self._length, self._begin)
        return numbers.astype(bool) if self.element is ValueType.BOOL else numbers.copy()

    def bytes_at(self, index: int) -> bytes:
        """One string's bytes as they stand in the file.

        Errors: TypeError for an array of numbers, IndexError outside the array.
        """
        at = self._checked(index)
        if self._offsets is None and at < strings.MANY and self.element is ValueType.STRING:
            begin = strings.skip(self._source, self._begin, at, self._end)
            return self._source[begin + 8 : strings.skip(self._source, begin, 1, self._end)]
        offsets = self._string_offsets()
        return self._source[int(offsets[at]) + 8 : int(offsets[at + 1])]

    def holds(self, text: bytes) -> bool:
        """Whether one of the strings is *text*; what is not UTF-8 counts as it stands.

        Errors: TypeError for an array of numbers.
        """
        self._check_strings()
        return strings.holds(self._source, self._begin, self._end, text)

    def iter_bytes(self) -> Iterator[bytes]:
        """All strings' bytes in order."""
        offsets = self._string_offsets().tolist()
        source = self._source
        return (source[begin + 8 : end] for begin, end in itertools.pairwise(offsets))

    def _checked(self, index: int) -> int:
        if not -self._length <= index < self._length:
            raise IndexError(f"index {index} is outside an array of {self._length}")
        return index % self._length

    def _check_strings(self) -> None:
        if self.element is not ValueType.STRING:
            raise TypeError(f"an array of {self.element.name} holds no strings")

    def _string_offsets(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        self._check_strings()
        if self._offsets is None:
            import numpy as np

            from puna.gguf import string_walk

            pieces = [piece for piece, _ in string_walk.walk(self._source, self._begin, self._length, self._end)]
            self._offsets = np.concatenate([*pieces, np.array([self._end], dtype=np.int64)])
        return self._offsets


class Metadata(Mapping[str, Any]):
    """All values by key. The typed methods put the architecture in front of a key that has no known first part.

    Errors of the typed methods: FileFormatError naming the key, when it is missing and has no default or its value is of
    another kind.
    """

    def __init__(self, path: str, values: dict[str, Any]) -> None:
        self.path = path
        self._values = values

    @property
    def values_by_key(self) -> dict[str, Any]:
        """As they were read; not to be changed."""
        return self._values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def architecture(self) -> str:
        """Errors: FileFormatError when the file does not name its architecture."""
        found = self._values.get(ARCHITECTURE)
        if not isinstance(found, str) or not found:
            raise FileFormatError(f"{self.path}: key {ARCHITECTURE!r} is missing or no text, so this is not a model")
        return found

    def full_key(self, key: str) -> str:
        if key.startswith(_ABSOLUTE):
            return key
        architecture = self.architecture
        return key if key.startswith(f"{architecture}.") else f"{architecture}.{key}"

    def has(self, key: str) -> bool:
        return self.full_key(key) in self._values

    @overload
    def integer(self, key: str) -> int: ...
    @overload
    def integer(self, key: str, default: D) -> int | D: ...
    def integer(self, key: str, default: Any = _MISSING) -> Any:
        """A whole number, whatever it is stored as."""
        full, value = self._find(key, default)
        return default if value is _MISSING else self._whole(full, value)

    @overload
    def number(self, key: str) -> float: ...
    @overload
    def number(self, key: str, default: D) -> float | D: ...
    def number(self, key: str, default: Any = _MISSING) -> Any:
        full, value = self._find(key, default)
        return default if value is _MISSING else self._float(full, value)

    @overload
    def string(self, key: str) -> str: ...
    @overload
    def string(self, key: str, default: D) -> str | D: ...
    def string(self, key: str, default: Any = _MISSING) -> Any:
        full, value = self._find(key, default)
        if value is _MISSING:
            return default
        return value if isinstance(value, str) else self._wrong(full, value, "a string")

    @overload
    def boolean(self, key: str) -> bool: ...
    @overload
    def boolean(self, key: str, default: D) -> bool | D: ...
    def boolean(self, key: str, default: Any = _MISSING) -> Any:
        full, value = self._find(key, default)
        if value is _MISSING:
            return default
        return bool(value) if isinstance(value, int) and value in (0, 1) else self._wrong(full, value, "a boolean")

    @overload
    def integers(self, key: str) -> list[int]: ...
    @overload
    def integers(self, key: str, default: D) -> list[int] | D: ...
    def integers(self, key: str, default: Any = _MISSING) -> Any:
        """An array of whole numbers; a single number is an array of one."""
        full, value = self._find(key, default)
        return default if value is _MISSING else [self._whole(full, item) for item in self._items(value)]

    @overload
    def numbers(self, key: str) -> list[float]: ...
    @overload
    def numbers(self, key: str, default: D) -> list[float] | D: ...
    def numbers(self, key: str, default: Any = _MISSING) -> Any:
        full, value = self._find(key, default)
        return default if value is _MISSING else [self._float(full, item) for item in self._items(value)]

    @overload
    def strings(self, key: str) -> list[str]: ...
    @overload
    def strings(self, key: str, default: D) -> list[str] | D: ...
    def strings(self, key: str, default: Any = _MISSING) -> Any:
        full, value = self._find(key, default)
        if value is _MISSING:
            return default
        items = self._items(value)
        return items if all(isinstance(item, str) for item in items) else self._wrong(full, value, "an array of strings")

    def array(self, key: str) -> LazyArray:
        """An array of anything, not decoded."""
        full, value = self._find(key, _MISSING)
        return value if isinstance(value, LazyArray) else self._wrong(full, value, "an array")

    @overload
    def per_layer(self, key: str, n_layers: int) -> list[int]: ...
    @overload
    def per_layer(self, key: str, n_layers: int, default: D) -> list[int | D]: ...
    def per_layer(self, key: str, n_layers: int, default: Any = _MISSING) -> Any:
        """One whole number per layer; a single value, and the default, hold for all layers."""
        full, value = self._find(key, default)
        if value is _MISSING:
            return [default] * n_layers
        if not isinstance(value, LazyArray):
            return [self._whole(full, value)] * n_layers
        if len(value) != n_layers:
            self._fail(full, f"has {len(value)} items for {n_layers} layers")
        return [self._whole(full, item) for item in value]

    def _find(self, key: str, default: object) -> tuple[str, Any]:
        full = self.full_key(key)
        value = self._values.get(full, _MISSING)
        if value is _MISSING and default is _MISSING:
            self._fail(full, "is missing")
        return full, value

    def _items(self, value: Any) -> list[Any]:
        return list(value) if isinstance(value, LazyArray) else [value]

    def _whole(self, key: str, value: Any) -> int:
        if isinstance(value, int):
            return int(value)
        is_whole = isinstance(value, float) and value.is_integer()
        return int(value) if is_whole else self._wrong(key, value, "a whole number")

    def _float(self, key: str, value: Any) -> float:
        return float(value) if isinstance(value, int | float) else self._wrong(key, value, "a number")

    def _wrong(self, key: str, value: Any, wanted: str) -> NoReturn:
        shown = repr(value)
        self._fail(key, f"is {shown if len(shown) <= 60 else shown[:57] + '...'}, not {wanted}")

    def _fail(self, key: str, what: str) -> NoReturn:
        raise FileFormatError(f"{self.path}: key {key!r} {what}")
