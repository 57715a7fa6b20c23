"""The one-line notation in which the function tables of this package are written.

``"p ppf"`` is a function that returns a pointer and takes two pointers and a float. The letters:

====  ==========================  ====  ==========================
p     any pointer                 z     size_t
s     const char * (text)         f     float
i     int, int32_t, any enum      d     double
u     uint32_t                    b     bool
l     int64_t                     c     uint8_t
L     uint64_t                    v     void (result only)
====  ==========================  ====  ==========================

A struct passed or returned by value is written ``{name}``. tests/contract compares every entry with the C headers.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from typing import Any

LETTERS: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "s": ctypes.c_char_p,
    "i": ctypes.c_int32,
    "u": ctypes.c_uint32,
    "l": ctypes.c_int64,
    "L": ctypes.c_uint64,
    "z": ctypes.c_size_t,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
    "b": ctypes.c_bool,
    "c": ctypes.c_uint8,
    "v": None,
}


def split(signature: str) -> tuple[str, list[str]]:
    """``"p p{llama_batch}i"`` to its result ``"p"`` and arguments ``["p", "{llama_batch}", "i"]``."""
    result, _, arguments = signature.partition(" ")
    return result, re.findall(r"\{\w+\}|\w", arguments)


def declare(function: Any, signature: str, structs: Mapping[str, type[ctypes.Structure]]) -> Any:
    """Set the result and argument types of a ctypes function and return it."""
    result, arguments = split(signature)

    def kind(code: str) -> Any:
        return structs[code[1:-1]] if code.startswith("{") else LETTERS[code]

    function.restype = kind(result)
    function.argtypes = [kind(code) for code in arguments]
    return function
