"""Every function, struct and constant that puna.native declares, against the headers of the compiled library.

A wrong letter in a table does not fail when it is written: it cuts an address to 32 bits or shifts every later argument,
and crashes somewhere else. So the tables are not trusted.
"""

from __future__ import annotations

import ctypes
import importlib
import pkgutil
import re
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import puna.native
from puna.gguf.types import TensorType, ValueType
from puna.native import llama
from puna.native.signature import LETTERS, split
from tests import needs
from tests.contract import c_headers
from tests.contract.c_headers import Headers

FILES = ("ggml.h", "ggml-alloc.h", "ggml-backend.h", "ggml-cpu.h", "ggml-rpc.h", "gguf.h", "llama.h", "mtmd.h", "mtmd-helper.h")
COMPILED = needs.compiled_library()
INCLUDE = COMPILED.include or Path()
HEADERS = c_headers.read(INCLUDE, FILES)
MODULES = [importlib.import_module(f"puna.native.{info.name}") for info in pkgutil.iter_modules(puna.native.__path__)]
C_NAME = re.compile(r"(ggml|gguf|llama|mtmd)_\w+")


def _tables() -> dict[str, str]:
    """Every ``{"c_name": "signature"}`` of every module."""
    found: dict[str, str] = {}
    for module in MODULES:
        for table in vars(module).values():
            if isinstance(table, dict) and table and all(isinstance(v, str) and C_NAME.fullmatch(k) for k, v in table.items()):
                found.update(table)
    return found


def _structs() -> dict[str, type[ctypes.Structure]]:
    """Those of the version that the headers are of."""
    found = {
        name: value
        for module in MODULES
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, ctypes.Structure) and C_NAME.fullmatch(name)
    }
    return {**found, **llama.structs_of(needs.version_of(COMPILED))}


def _constants(module: ModuleType) -> dict[str, int]:
    return {name: value for name, value in vars(module).items() if name.isupper() and type(value) is int}


FUNCTIONS = _tables()
STRUCTS = _structs()


def _letter(kind: Any) -> str:
    """The letter of a ctypes field, arrays as ``l[4]``."""
    if issubclass(kind, ctypes.Array):
        return f"{_letter(kind._type_)}[{kind._length_}]"
    if issubclass(kind, ctypes._Pointer):
        return "p"
    if issubclass(kind, ctypes.Structure):
        return f"{{{kind.__name__}}}"
    others = {ctypes.c_char: "char", ctypes.c_int8: "int8", ctypes.c_uint16: "uint16"}
    return others.get(kind) or next(letter for letter, candidate in LETTERS.items() if candidate is kind)


def _fields(struct: type[ctypes.Structure]) -> list[tuple[str, str]]:
    return [(item[0], _letter(item[1])) for item in struct._fields_]


def test_the_tables_were_found() -> None:
    assert len(FUNCTIONS) > 150
    assert {"ggml_mul_mat", "ggml_backend_sched_graph_compute", "llama_decode", "mtmd_tokenize"} <= set(FUNCTIONS)
    assert {"ggml_tensor", "llama_batch", "llama_context_params", "mtmd_input_text"} <= set(STRUCTS)


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_functions_agree_with_the_headers(name: str) -> None:
    assert c_headers.compare(name, split(FUNCTIONS[name]), HEADERS) == []


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_signatures_are_written_without_slips(name: str) -> None:
    result, arguments = split(FUNCTIONS[name])
    assert f"{result} {''.join(arguments)}" == FUNCTIONS[name]
    for code in (result, *arguments):
        assert code in LETTERS or code[1:-1] in STRUCTS


@pytest.mark.parametrize("name", sorted(STRUCTS))
def test_structs_agree_with_the_headers(name: str) -> None:
    assert c_headers.compare_struct(name, _fields(STRUCTS[name]), HEADERS) == []


@pytest.mark.parametrize("name", sorted(STRUCTS))
def test_pointers_with_a_declared_target_point_to_that(name: str) -> None:
    c_types = dict(HEADERS.structs[name])
    for field_name, kind, *_ in STRUCTS[name]._fields_:
        c_type = c_types[field_name]
        while issubclass(kind, ctypes._Pointer):
            kind, c_type = kind._type_, c_type.rstrip()[:-1]
            if not issubclass(kind, ctypes._Pointer):
                assert _letter(kind) == HEADERS.letter(c_type), field_name


def test_structs_have_the_compilers_sizes_and_offsets(tmp_path: Path) -> None:
    compiler = needs.c_compiler()
    lines = []
    for name, struct in STRUCTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof(struct {name}));')
        lines += [f'printf("{name}.{item[0]} %zu\\n", offsetof(struct {name}, {item[0]}));' for item in struct._fields_]
    source = tmp_path / "sizes.c"
    includes = "".join(f'#include "{name}"\n' for name in FILES)
    source.write_text(
        f"#include <stddef.h>\n#include <stdio.h>\n{includes}int main(void) {{\n" + "\n".join(lines) + "\nreturn 0;\n}\n"
    )
    program = tmp_path / "sizes"
    # -w: the headers declare deprecated functions, which is not what is tested.
    built = subprocess.run([compiler, "-w", "-I", INCLUDE, source, "-o", program], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    output = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    true = {name: int(value) for name, value in (line.split() for line in output.splitlines())}
    ours: dict[str, int] = {}
    for name, struct in STRUCTS.items():
        ours[name] = ctypes.sizeof(struct)
        ours |= {f"{name}.{item[0]}": getattr(struct, item[0]).offset for item in struct._fields_}
    assert ours == true


@pytest.mark.parametrize(
    ("module", "prefixes"),
    [("ggml", ("GGML_", "GGML_BACKEND_")), ("llama", ("LLAMA_",)), ("mtmd", ("MTMD_INPUT_",))],
    ids=["ggml", "llama", "mtmd"],
)
def test_constants_agree_with_the_headers(module: str, prefixes: tuple[str, ...]) -> None:
    constants = _constants(importlib.import_module(f"puna.native.{module}"))
    exceptions = {"FLASH_ATTN_": "FLASH_ATTN_TYPE_"} if module == "llama" else {}
    c_names = {name: c_headers.constant_name(name, prefixes, HEADERS, exceptions) for name in constants}
    assert [name for name, c_name in c_names.items() if c_name is None] == []
    assert constants == {name: HEADERS.constants[c_name] for name, c_name in c_names.items() if c_name}


def test_tensor_types_of_files_are_numbered_as_in_the_headers() -> None:
    theirs = {name.removeprefix("GGML_TYPE_"): n for name, n in HEADERS.constants.items() if name.startswith("GGML_TYPE_")}
    del theirs["COUNT"]
    assert {t.name: int(t) for t in TensorType} == theirs


def test_value_types_of_files_are_numbered_as_in_the_headers() -> None:
    theirs = {name.removeprefix("GGUF_TYPE_"): n for name, n in HEADERS.constants.items() if name.startswith("GGUF_TYPE_")}
    del theirs["COUNT"]
    assert {t.name: int(t) for t in ValueType} == theirs


@pytest.mark.parametrize(
    ("typedef", "c_type"),
    [
        ("ggml_log_callback", "void (*NAME)(enum ggml_log_level level, const char * text, void * user_data)"),
        ("ggml_abort_callback", "bool (*NAME)(void * data)"),
        ("llama_progress_callback", "bool (*NAME)(float progress, void * user_data)"),
        ("ggml_to_float_t", "void (*NAME) (const void * x, float * y, int64_t k)"),
        ("ggml_backend_dev_get_extra_bufts_t", "ggml_backend_buffer_type_t * (*NAME)(ggml_backend_dev_t device)"),
    ],
)
def test_callbacks_have_the_shape_they_are_called_with(typedef: str, c_type: str) -> None:
    assert HEADERS.typedefs[typedef] == c_type.replace("NAME", typedef)


def test_no_function_is_declared_outside_the_tables() -> None:
    sources = {path.name: path.read_text("utf-8") for path in Path(puna.native.__path__[0]).glob("*.py")}
    assert {name for name, text in sources.items() if re.search(r"\.(restype|argtypes) =", text)} == {
        "signature.py",
        "library.py",
    }
    assert re.findall(r"(\w+)\.restype =", sources["library.py"]) == ["version"]  # needed before the tables may be trusted


# ---- the comparer itself

EXAMPLE = """
#ifdef __cplusplus
extern "C" {
#endif
#define EX_MAX 4
#define EX_CALL(x) \\
    call(x)
typedef struct ex_thing * ex_thing_t;
typedef int32_t ex_token;
typedef bool (*ex_callback)(void * data, int n);
enum ex_kind { EX_KIND_NONE = -1, EX_KIND_A, EX_KIND_B, EX_KIND_FLAG = 1 << 3, EX_KIND_NEXT, };
struct ex_params {
    enum ex_kind kind; // a comment; with a semicolon
    int64_t ne[EX_MAX];
    int32_t op[64 / sizeof(int32_t)];
    ex_callback callback;
    void (*other)(int a, int b);
    const char * text;
    struct ex_thing * src[2];
    bool flag;
};
typedef struct ex_batch { ex_token * tokens; float x; } ex_batch;
    GGML_API struct ex_thing * ex_new(struct ex_params params, const char * name, size_t size);
    LLAMA_API DEPRECATED(ex_batch ex_get(
            const struct ex_thing * thing, /* commented, out */
            char * buffer, ex_token token, uint32_t n, float f, double d, bool flag, uint8_t c, uint64_t big),
        "use something (else), please");
static inline int ex_inline(int x) { return x; }
GGML_API void ex_fill(const int ids[EX_MAX], ex_thing_t thing, enum ex_kind kind, ex_callback callback, void (*f)(int, int));
GGML_API int64_t ex_count(void);
#ifdef __cplusplus
}
#endif
"""
EX = c_headers.parse(EXAMPLE)
RIGHT = {"ex_new": "p {ex_params}sz", "ex_get": "{ex_batch} ppiufdbcL", "ex_fill": "v ppipp", "ex_count": "l "}


@pytest.fixture
def example() -> Headers:
    return EX


@pytest.mark.parametrize(("name", "signature"), RIGHT.items())
def test_the_comparer_accepts_the_truth(example: Headers, name: str, signature: str) -> None:
    assert c_headers.compare(name, split(signature), example) == []


def _wrong_letters() -> list[tuple[str, str]]:
    """Each right signature with one letter replaced by each other letter, an argument dropped, or one added."""
    wrong = []
    for name, signature in RIGHT.items():
        result, arguments = split(signature)
        codes = [result, *arguments]
        for i, code in enumerate(codes):
            for other in (*LETTERS, "{ex_params}", "{ex_batch}"):
                if other == code or (code == "s" and other == "p"):
                    continue
                changed = [*codes[:i], other, *codes[i + 1 :]]
                wrong.append((name, f"{changed[0]} {''.join(changed[1:])}"))
        wrong.append((name, f"{signature}i"))
        if arguments:
            wrong.append((name, f"{result} {''.join(arguments[:-1])}"))
    return wrong


@pytest.mark.parametrize(("name", "signature"), _wrong_letters())
def test_the_comparer_finds_every_single_slip(example: Headers, name: str, signature: str) -> None:
    assert len(c_headers.compare(name, split(signature), example)) >= 1


def test_the_comparer_reports_unknown_names(example: Headers) -> None:
    assert c_headers.compare("ex_missing", split("v "), example) == ["ex_missing: not in the headers"]
    assert c_headers.compare_struct("ex_missing", [], example) == ["ex_missing: not in the headers"]


PARAMS = [
    ("kind", "i"),
    ("ne", "l[4]"),
    ("op", "i[16]"),
    ("callback", "p"),
    ("other", "p"),
    ("text", "p"),
    ("src", "p[2]"),
    ("flag", "b"),
]


def test_struct_fields_are_compared_in_order(example: Headers) -> None:
    assert c_headers.compare_struct("ex_params", PARAMS, example) == []
    swapped = [PARAMS[1], PARAMS[0], *PARAMS[2:]]
    assert len(c_headers.compare_struct("ex_params", swapped, example)) == 2
    assert c_headers.compare_struct("ex_params", PARAMS[:-1], example) == ["ex_params: 7 fields, in C 8"]
    wrong_length = [PARAMS[0], ("ne", "l[3]"), *PARAMS[2:]]
    assert c_headers.compare_struct("ex_params", wrong_length, example) == ["ex_params: field ne is l[3], in C ne is l[4]"]


def test_constants_are_read_from_enums_and_macros(example: Headers) -> None:
    expected = {"EX_MAX": 4, "EX_KIND_NONE": -1, "EX_KIND_A": 0, "EX_KIND_B": 1, "EX_KIND_FLAG": 8, "EX_KIND_NEXT": 9}
    assert example.constants == expected


def test_a_type_nobody_defined_is_an_error(example: Headers) -> None:
    with pytest.raises(KeyError, match="mystery"):
        example.letter("mystery_t")
