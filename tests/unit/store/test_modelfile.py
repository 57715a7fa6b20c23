from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from puna.errors import FileFormatError
from puna.store.models import modelfile
from puna.store.models.modelfile import Instruction, Modelfile

COMMANDS = (
    'command must be one of "from", "license", "template", "system", "adapter", "draft", "renderer", "parser", '
    '"parameter", "message", or "requires"'
)


def commands(text: str) -> list[tuple[str, str, str]]:
    return [(item.keyword, item.name, item.value) for item in modelfile.parse(text).instructions]


def test_a_whole_file() -> None:
    text = '''# a comment
FROM  llama3
  adapter ./lora.gguf

PARAMETER stop "<|end|>"
parameter stop stop # not a comment
PARAMETER temperature 0.7
PARAMETER num_ctx 8192
PARAMETER use_mmap false
TEMPLATE """{{ .System }}
# {{ "quoted" }}
"""
SYSTEM "You are
kind."
MESSAGE user Why?
MESSAGE assistant """Because "so"."""
LICENSE MIT
LICENSE Apache
RENDERER qwen3-coder
PARSER qwen3
REQUIRES v0.14.0
'''
    parsed = modelfile.parse(text)
    assert parsed.values("from") == ["llama3"]
    assert parsed.last("adapter") == "./lora.gguf"
    assert parsed.parameters == {
        "stop": ["<|end|>", "stop # not a comment"],
        "temperature": 0.7,
        "num_ctx": 8192,
        "use_mmap": False,
    }
    assert parsed.last("template") == '{{ .System }}\n# {{ "quoted" }}\n'
    assert parsed.last("system") == "You are\nkind."
    assert parsed.messages == [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": 'Because "so".'}]
    assert parsed.values("license") == ["MIT", "Apache"]
    assert (parsed.last("renderer"), parsed.last("parser"), parsed.requires) == ("qwen3-coder", "qwen3", "0.14.0")
    assert parsed.last("draft") == ""


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("plain", "plain"),
        ("  two words \t", "two words"),
        ('"quoted"', "quoted"),
        ('" outer "', " outer "),
        ('""', ""),
        ('""""""', ""),
        ('"""a"""', "a"),
        ('"""a "b" c"""', 'a "b" c'),
        ('"""a\nb"""', "a\nb"),
        ('"a\r\nb"', "a\r\nb"),
        ("'single'", "'single'"),
        ('say "hi"', 'say "hi"'),
        ('"a" and "b"', 'a" and "b'),
        (r'"a\"', "a\\"),
        ("# no comment", "# no comment"),
        ('"""one""" more\nend"""', 'one""" more\nend'),
        ("zero\u200dwidth", "zerowidth"),
        ("tab\there", "tab\there"),
    ],
)
def test_values(value: str, expected: str) -> None:
    assert commands(f"FROM x\nSYSTEM {value}\n")[-1] == ("system", "", expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no FROM line"),
        ("SYSTEM hi", "no FROM line"),
        ("# FROM x", "no FROM line"),
        ("FROM", "unexpected EOF"),
        ("FROM \nSYSTEM x", r"\(line 1\): unexpected EOF"),
        ("FROM x\n\nBADCOMMAND y", r"\(line 3\): " + COMMANDS),
        ("FROM x\r\nwhat?", r"\(line 2\): " + COMMANDS),
        ("FROM x\r9", r"\(line 2\): " + COMMANDS),
        ("FROMx", r"\(line 1\): " + COMMANDS),
        ('FROM x\nSYSTEM "open\nstill', r"\(line 2\): unexpected EOF"),
        ('FROM x\nSYSTEM """', r"\(line 2\): unexpected EOF"),
        ("FROM x\nPARAMETER", "unexpected EOF"),
        ("FROM x\nPARAMETER stop", r"\(line 2\): unexpected EOF"),
        ("FROM x\nPARAMETER colour red", r"\(line 2\): unknown parameter 'colour'"),
        ("FROM x\nPARAMETER num_ctx many", r"\(line 2\): invalid int value \[many\]"),
        ("FROM x\nPARAMETER num_ctx 1.5", r"\(line 2\): invalid int value \[1.5\]"),
        ("FROM x\nPARAMETER num_ctx 99999999999999999999", r"\(line 2\): invalid int value"),
        ("FROM x\nPARAMETER temperature nan", r"\(line 2\): invalid float value \[nan\]"),
        ("FROM x\nPARAMETER temperature 1e999", r"\(line 2\): invalid float value"),
        ("FROM x\nPARAMETER use_mmap maybe", r"\(line 2\): invalid bool value \[maybe\]"),
        ("FROM x\nMESSAGE robot hi", r'\(line 2\): message role must be one of "system", "user", or "assistant"'),
        ("FROM x\nREQUIRES new", r"\(line 2\): requires must be a valid semver \(e.g. 0.14.0\)"),
    ],
)
def test_errors_name_the_line(text: str, message: str) -> None:
    with pytest.raises(FileFormatError, match="^" + message):
        modelfile.parse(text)


def test_deprecated_parameters_are_accepted_and_named() -> None:
    parsed = modelfile.parse("FROM x\nPARAMETER low_vram 1\nPARAMETER top_k 5")
    assert parsed.parameters == {"top_k": 5}
    assert parsed.deprecated == ["low_vram"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encodings(encoding: str) -> None:
    assert modelfile.decode("FROM ü\n".encode(encoding)) == "FROM ü\n"


def test_bytes_that_are_no_text() -> None:
    with pytest.raises(FileFormatError, match="not UTF-8 text"):
        modelfile.decode(b"FROM \xff")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("plain", "plain"),
        ('in "the" middle', 'in "the" middle'),
        (" outer", '" outer"'),
        ("two\nlines", '"two\nlines"'),
        ('two\n"lines"', '"""two\n"lines""""'),
        ("", '""'),
        ('"first', '""""first"""'),
    ],
)
def test_quoting(value: str, expected: str) -> None:
    assert modelfile.quote(value) == expected


def is_expressible(value: str) -> bool:
    """Nothing can stand for a value with a line that ends as its quotes do, or for what no screen shows."""
    text = "".join(c if c.isprintable() or c in "\t\r\n" else "" for c in value)
    mark = '"""' if '"' in value else '"'
    lines = value.replace("\r", "\n").split("\n")
    return text == value and not any(line.rstrip().endswith(mark) for line in lines[:-1])


values = st.text(st.sampled_from('ab #"\n\r\t ü.'), max_size=30).filter(is_expressible)
instructions = st.one_of(
    st.builds(Instruction, st.sampled_from(["system", "template", "license", "adapter", "renderer"]), values),
    st.builds(Instruction, st.just("message"), values, st.sampled_from(modelfile.ROLES)),
    st.builds(Instruction, st.just("parameter"), values, st.just("stop")),
)


@given(st.lists(instructions, max_size=5))
def test_what_is_written_is_read_back(found: list[Instruction]) -> None:
    written = Modelfile((Instruction("from", "x"), *found))
    assert [(i.keyword, i.name, i.value) for i in modelfile.parse(str(written)).instructions] == [
        (i.keyword, i.name, i.value) for i in written.instructions
    ]


@given(st.text(max_size=200) | st.text('FROMSYSTEM "\n#\r\t', max_size=100))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        parsed = modelfile.parse(text)
    except FileFormatError:
        return
    assert parsed.values("from")


def test_many_unclosed_lines_take_no_time() -> None:
    """A quote that is never closed must not be searched for anew from every line."""
    with pytest.raises(FileFormatError, match="never closed"):
        modelfile.parse('FROM x\nSYSTEM "' + "a\n" * 200_000)
