"""Read C headers far enough to compare them with the tables of puna.native.

Understands what the headers of ggml and llama.cpp contain: prototypes, structs, enums, typedefs and numeric macros.
Types become the letters of puna.native.signature, with ``[n]`` after an array's. No general C parser.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

BASE_LETTERS = {
    "void": "v",
    "bool": "b",
    "char": "char",
    "int8_t": "int8",
    "uint8_t": "c",
    "int16_t": "int16",
    "int": "i",
    "int32_t": "i",
    "unsigned": "u",
    "unsigned int": "u",
    "uint16_t": "uint16",
    "uint32_t": "u",
    "int64_t": "l",
    "uint64_t": "L",
    "size_t": "z",
    "float": "f",
    "double": "d",
}
_SIZES = {"int32_t": 4, "int64_t": 8, "float": 4}
_MACROS = (
    r"\b(?:GGML_API|GGML_BACKEND_API|LLAMA_API|MTMD_API|GGML_RESTRICT|GGML_NORETURN|extern)\b|GGML_ATTRIBUTE_FORMAT\([^)]*\)"
)


@dataclass
class Headers:
    functions: dict[str, tuple[str, list[str]]] = field(default_factory=dict)  # result and arguments as C spells them
    structs: dict[str, list[tuple[str, str]]] = field(default_factory=dict)  # (name, C type) of each field
    constants: dict[str, int] = field(default_factory=dict)
    typedefs: dict[str, str] = field(default_factory=dict)

    def letter(self, c_type: str) -> str:
        """What a C type is in a signature; ``s`` stands for text that is only read.

        Errors: KeyError for a type nobody defined.
        """
        words = [word for word in re.findall(r"\w+|\*", c_type) if word not in ("const", "volatile")]
        if "*" in words:
            is_text = words == ["char", "*"] and re.match(r"\s*const\b|\s*char\s+const\b", c_type)
            return "s" if is_text else "p"
        match words:
            case ["enum", _]:
                return "i"
            case ["struct", name]:
                return f"{{{name}}}"
            case [name] if name in self.typedefs:
                return self.letter(self.typedefs[name])
        spelled = " ".join(words)
        if spelled not in BASE_LETTERS:
            raise KeyError(f"unknown C type {c_type!r}")
        return BASE_LETTERS[spelled]

    def signature(self, name: str) -> tuple[str, list[str]]:
        result, arguments = self.functions[name]
        return self.letter(result), [self.letter(argument) for argument in arguments]

    def value(self, expression: str) -> int:
        """A number, a constant, or a quotient of one and a sizeof, as array lengths are written."""
        for name, size in _SIZES.items():
            expression = expression.replace(f"sizeof({name})", str(size))
        dividend, _, divisor = expression.partition("/")
        if divisor:
            return self.value(dividend) // self.value(divisor)
        text = expression.strip()
        return self.constants[text] if text in self.constants else int(text, 0)

    def fields(self, struct: str) -> list[tuple[str, str]]:
        """Names and letters, arrays as ``l[4]``."""
        found = []
        for name, c_type in self.structs[struct]:
            base, _, length = c_type.partition("[")
            array = f"[{self.value(length.rstrip(']'))}]" if length else ""
            found.append((name, self.letter(base) + array))
        return found


def read(folder: Path, files: Sequence[str]) -> Headers:
    headers = Headers()
    for name in files:
        _read_text((folder / name).read_text("utf-8"), headers)
    return headers


def parse(text: str) -> Headers:
    headers = Headers()
    _read_text(text, headers)
    return headers


def _read_text(text: str, headers: Headers) -> None:
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)
    text = "\n".join(_as_c(text.replace("\\\n", " ").split("\n")))
    for name, value in re.findall(r"^[ \t]*#\s*define\s+(\w+)[ \t]+\(?(-?\d+|0[xX][0-9a-fA-F]+)\)?[ \t]*$", text, re.MULTILINE):
        headers.constants[name] = int(value, 0)
    text = re.sub(r"^[ \t]*#[^\n]*$", "", text, flags=re.MULTILINE)
    text = re.sub(_MACROS, " ", text)
    text = re.sub(r"\b(?:GGML_)?DEPRECATED\s*\((.*?),\s*(?:\"[^\"]*\"\s*)+\)\s*;", r"\1;", text, flags=re.DOTALL)
    for statement in _statements(text):
        _read_statement(" ".join(statement.split()), headers)


def _as_c(lines: Sequence[str]) -> Iterator[str]:
    """The lines that a C compiler sees rather than a C++ one; other conditions are not decided, both branches stay."""
    branches: list[bool] = []
    for line in lines:
        directive = re.match(r"\s*#\s*(if\w*|el\w+|endif)\b(.*)", line)
        if directive:
            is_cplusplus = "__cplusplus" in directive[2]
            match directive[1]:
                case "ifndef":
                    branches.append(True)
                case "if" | "ifdef":
                    branches.append(not is_cplusplus)
                case "endif":
                    branches.pop()
                case _:
                    branches[-1] = True
        elif all(branches):
            yield line


def _statements(text: str) -> Iterator[str]:
    """Split at semicolons outside braces; the body of an inline function ends its statement too."""
    depth = begin = 0
    for i, char in enumerate(text):
        if char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0 and "(" in text[begin:i].partition("{")[0]:
                yield text[begin : i + 1]
                begin = i + 1
        elif char == ";" and depth == 0:
            yield text[begin:i]
            begin = i + 1


def _read_statement(text: str, headers: Headers) -> None:
    if match := re.fullmatch(r"(?:typedef )?enum ?(\w*) ?\{(.*)\} ?(\w*)", text):
        _read_enum(match[2], headers)
    elif match := re.fullmatch(r"(typedef )?struct ?(\w*) ?\{(.*)\} ?(\w*)", text):
        name = match[2] or match[4]
        headers.structs[name] = list(_read_fields(match[3]))
        if match[1]:
            headers.typedefs[match[4]] = f"struct {name}"
    elif match := re.fullmatch(r"typedef .*?\( ?\* ?(\w+) ?\) ?\(.*\)", text):
        headers.typedefs[match[1]] = text.removeprefix("typedef ")
    elif match := re.fullmatch(r"typedef (.*?)(\w+)", text):
        headers.typedefs[match[2]] = match[1].strip()
    elif match := re.fullmatch(r"([^={}]*?)(\w+) ?\((.*)\)", text):
        headers.functions[match[2]] = (match[1].strip(), [_without_name(a) for a in _arguments(match[3])])


def _read_enum(body: str, headers: Headers) -> None:
    value = -1
    for item in filter(None, (part.strip() for part in body.split(","))):
        name, _, explicit = (part.strip() for part in item.partition("="))
        value = _enum_value(explicit, headers) if explicit else value + 1
        headers.constants[name] = value


def _enum_value(expression: str, headers: Headers) -> int:
    if match := re.fullmatch(r"\(?(\d+) ?<< ?(\d+)\)?", expression):
        return int(match[1]) << int(match[2])
    total = 0
    for term in re.split(r"\||\+", expression):
        total += headers.value(term)
    return total


def _read_fields(body: str) -> Iterator[tuple[str, str]]:
    for declaration in filter(None, (part.strip() for part in body.split(";"))):
        if match := re.search(r"\(\*\s*(\w+)\)", declaration):
            yield match[1], declaration
            continue
        match = re.fullmatch(r"(.*?)(\w+) ?(\[.*\])?", declaration)
        if match:
            yield match[2], match[1].strip() + (match[3] or "")


def _arguments(text: str) -> Iterator[str]:
    """Split at commas outside parentheses; ``(void)`` and ``()`` have none."""
    depth = 0
    current = ""
    for char in text:
        depth += (char == "(") - (char == ")")
        if char == "," and depth == 0:
            yield current.strip()
            current = ""
        else:
            current += char
    if current.strip() not in ("", "void"):
        yield current.strip()


def _without_name(argument: str) -> str:
    """``const float * x`` to ``const float *``; an array is passed as a pointer."""
    if "(*" in argument.replace(" ", "") or argument == "...":
        return argument
    match = re.fullmatch(r"(.*[\s*])(\w+) ?(\[.*\])?", argument)
    if not match or match[2] in BASE_LETTERS:
        return argument
    if re.fullmatch(r"(const )?(struct|enum)", match[1].strip()):
        return argument
    return match[1].strip() + (" *" if match[3] else "")


def compare(name: str, declared: tuple[str, list[str]], headers: Headers) -> list[str]:
    """What is wrong with a declaration of a function, in words; empty when nothing is."""
    if name not in headers.functions:
        return [f"{name}: not in the headers"]
    result, arguments = declared
    true_result, true_arguments = headers.signature(name)
    problems = []
    if not _agree(result, true_result):
        problems.append(f"{name}: result is {result}, in C {true_result}")
    if len(arguments) != len(true_arguments):
        problems.append(f"{name}: {len(arguments)} arguments, in C {len(true_arguments)}")
    for i, (ours, theirs) in enumerate(zip(arguments, true_arguments, strict=False)):
        if not _agree(ours, theirs):
            problems.append(f"{name}: argument {i} is {ours}, in C {theirs}")
    return problems


def _agree(ours: str, theirs: str) -> bool:
    # Text that C only reads may also be passed as an address.
    return ours == theirs or (ours == "p" and theirs == "s")


def _as_in_ctypes(letter: str) -> str:
    """In a ctypes struct, size_t and uint64_t are one type where they have one size."""
    is_one = ctypes.sizeof(ctypes.c_size_t) == ctypes.sizeof(ctypes.c_uint64)
    return re.sub(r"^L", "z", letter) if is_one else letter


def compare_struct(name: str, declared: Sequence[tuple[str, str]], headers: Headers) -> list[str]:
    if name not in headers.structs:
        return [f"{name}: not in the headers"]
    true_fields = headers.fields(name)
    problems = []
    if len(declared) != len(true_fields):
        problems.append(f"{name}: {len(declared)} fields, in C {len(true_fields)}")
    for ours, theirs in zip(declared, true_fields, strict=False):
        if ours[0] != theirs[0] or not _agree(_as_in_ctypes(ours[1]), _as_in_ctypes(theirs[1])):
            problems.append(f"{name}: field {ours[0]} is {ours[1]}, in C {theirs[0]} is {theirs[1]}")
    return problems


def constant_name(name: str, prefixes: Sequence[str], headers: Headers, exceptions: Mapping[str, str]) -> str | None:
    """The C name behind a constant of ours, or None."""
    for ours, theirs in exceptions.items():
        if name.startswith(ours):
            name = theirs + name.removeprefix(ours)
    return next((prefix + name for prefix in prefixes if prefix + name in headers.constants), None)
