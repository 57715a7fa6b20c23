"""The syntax of Go's text/template: source text in, a tree out.

Knows nothing of values. Variables, functions and templates that do not exist are errors here, as in Go.
Source: the documentation of Go's text/template package.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from puna.errors import TemplateError
from puna.prompt.limits import check_template_length

MAX_DEPTH = 40


@dataclass(frozen=True)
class Dot:
    pass


@dataclass(frozen=True)
class Const:
    value: str | int | float | bool | None


@dataclass(frozen=True)
class Field:
    names: tuple[str, ...]


@dataclass(frozen=True)
class Variable:
    name: str  # with its dollar sign; a bare dollar is the root
    names: tuple[str, ...]


@dataclass(frozen=True)
class Function:
    name: str


@dataclass(frozen=True)
class Chain:
    """Fields of a parenthesised pipeline."""

    pipe: Pipe
    names: tuple[str, ...]


Operand = Dot | Const | Field | Variable | Function | Chain


@dataclass(frozen=True)
class Pipe:
    commands: tuple[tuple[Operand, ...], ...]
    names: tuple[str, ...] = ()  # variables that receive the value
    is_declaration: bool = False


@dataclass(frozen=True)
class Text:
    text: str
    line: int


@dataclass(frozen=True)
class Action:
    pipe: Pipe
    line: int


@dataclass(frozen=True)
class If:
    pipe: Pipe
    body: tuple[Node, ...]
    orelse: tuple[Node, ...]
    line: int


@dataclass(frozen=True)
class With:
    pipe: Pipe
    body: tuple[Node, ...]
    orelse: tuple[Node, ...]
    line: int


@dataclass(frozen=True)
class Range:
    pipe: Pipe
    body: tuple[Node, ...]
    orelse: tuple[Node, ...]
    line: int


@dataclass(frozen=True)
class Call:
    """``{{ template "name" pipeline }}``"""

    name: str
    pipe: Pipe | None
    line: int


@dataclass(frozen=True)
class Jump:
    """``{{ break }}`` or ``{{ continue }}``"""

    keyword: str
    line: int


Node = Text | Action | If | With | Range | Call | Jump

_BRANCHES: dict[str, type[If] | type[With] | type[Range]] = {"if": If, "with": With, "range": Range}


@dataclass(frozen=True)
class Token:
    kind: str  # a group of _TOKEN
    text: str
    line: int
    follows_space: bool


_TOKEN = re.compile(
    r"""(?P<string>"(?:\\.|[^"\\\n])*")
      | (?P<raw>`[^`]*`)
      | (?P<char>'(?:\\.[^']*|[^'\\\n])')
      | (?P<number>[+-]?(?:0[xX][0-9a-fA-F_]+|0[bB][01_]+|0[oO][0-7_]+|\d[\d_]*(?:\.\d*)?(?:[eE][+-]?\d+)?))
      | (?P<field>\.[A-Za-z_]\w*)
      | (?P<dot>\.)
      | (?P<variable>\$\w*)
      | (?P<word>[A-Za-z_]\w*)
      | (?P<mark>:=|[=|(),])""",
    re.VERBOSE,
)
_ESCAPED = re.compile(
    r"""(?:[^\\]|\\(?:[abfnrtv\\'"]|[0-7]{3}|x[0-9a-fA-F]{2}|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|U000[0-9a-fA-F]{5}))*"""
)
_COMMENT = re.compile(r"/\*.*?\*/(?P<end>\s+-\}\}|\s*\}\})", re.DOTALL)
_TRIMMED_END = re.compile(r"\s+-\}\}")
_END = re.compile(r"\s*\}\}")
_SPACE = re.compile(r"\s*")
_KEYWORDS = frozenset(["if", "else", "end", "range", "with", "define", "block", "template", "break", "continue"])


@dataclass(frozen=True)
class _Part:
    """Text between actions, or the tokens of one action."""

    line: int
    text: str = ""
    tokens: tuple[Token, ...] | None = None


def _fail(line: int, what: str) -> NoReturn:
    raise TemplateError(f"template, line {line}: {what}")


def _split(source: str) -> Iterator[_Part]:
    position, line, trims = 0, 1, False
    while True:
        begin = source.find("{{", position)
        text = source[position:] if begin < 0 else source[position:begin]
        text_line, line = line, line + text.count("\n")
        if trims:
            text = text.lstrip(" \t\r\n")
        if begin < 0:
            if text:
                yield _Part(text_line, text)
            return
        inside = begin + 2
        if source[inside : inside + 1] == "-" and source[inside + 1 : inside + 2].isspace():
            text, inside = text.rstrip(" \t\r\n"), inside + 1
        if text:
            yield _Part(text_line, text)
        tokens, position, trims = _action(source, inside, line)
        if tokens is not None:
            yield _Part(line, tokens=tuple(tokens))
        line += source.count("\n", begin, position)


def _action(source: str, position: int, line: int) -> tuple[list[Token] | None, int, bool]:
    """The tokens of one action (None for a comment), where it ends, and whether it trims what follows."""
    begin = _SPACE.match(source, position)
    assert begin is not None
    if source.startswith("/*", begin.end()):
        comment = _COMMENT.match(source, begin.end())
        if comment is None:
            _fail(line, "unclosed comment, or one that does not end its action")
        return None, comment.end(), "-" in comment["end"]
    tokens: list[Token] = []
    while True:
        for pattern, trims in ((_TRIMMED_END, True), (_END, False)):
            end = pattern.match(source, position)
            if end is not None:
                return tokens, end.end(), trims
        space = _SPACE.match(source, position)
        assert space is not None
        line += source.count("\n", position, space.end())
        found = _TOKEN.match(source, space.end())
        if found is None or found.lastgroup is None:
            rest = source[space.end() : space.end() + 10]
            _fail(line, f"unexpected {rest!r} in an action" if rest else "unclosed action")
        tokens.append(Token(found.lastgroup, found.group(), line, space.end() > position or not tokens))
        line += found.group().count("\n")
        position = found.end()


@dataclass
class Tree:
    """A parsed template: its own nodes, and the templates it defines."""

    root: tuple[Node, ...]
    templates: dict[str, tuple[Node, ...]] = field(default_factory=dict)


def parse(source: str, functions: Sequence[str]) -> Tree:
    """Parse a template that may use *functions*.

    Errors: TemplateError naming the line.
    """
    check_template_length(source)
    parser = _Parser(list(_split(source)), frozenset(functions))
    root, end = parser.nodes(())
    assert end is None
    for name, line in parser.called:
        if name not in parser.templates:
            _fail(line, f"template {name!r} is not defined")
    return Tree(root, parser.templates)


class _Scope:
    """Variables in the order of their declarations; the same name may be declared again further in."""

    def __init__(self) -> None:
        self._names = ["$"]
        self._n_declared = Counter(self._names)

    def __contains__(self, name: str) -> bool:
        return self._n_declared[name] > 0

    @property
    def size(self) -> int:
        return len(self._names)

    def declare(self, names: Sequence[str]) -> None:
        self._names += names
        self._n_declared.update(names)

    def forget(self, size: int) -> None:
        self._n_declared.subtract(self._names[size:])
        del self._names[size:]


class _Parser:
    def __init__(self, parts: list[_Part], functions: frozenset[str]) -> None:
        self.parts = parts
        self.position = 0
        self.functions = functions
        self.templates: dict[str, tuple[Node, ...]] = {}
        self.called: list[tuple[str, int]] = []
        self.variables = _Scope()
        self.depth = 0
        self.range_depth = 0

    def nodes(self, ends: tuple[str, ...]) -> tuple[tuple[Node, ...], _Action | None]:
        """Nodes up to an action that begins with one of *ends* (none: up to the end of the source), and that action."""
        nodes: list[Node] = []
        while self.position < len(self.parts):
            part = self.parts[self.position]
            self.position += 1
            if part.tokens is None:
                nodes.append(Text(part.text, part.line))
                continue
            action = _Action(self, part)
            if action.keyword in ends:
                return tuple(nodes), action
            node = self.node(action)
            if node is not None:
                nodes.append(node)
        if ends:
            _fail(self.parts[-1].line if self.parts else 1, "unexpected end of the template: {{end}} is missing")
        return tuple(nodes), None

    def node(self, action: _Action) -> Node | None:
        node: Node | None = None
        match action.keyword:
            case "if" | "with" | "range" as keyword:
                node = _BRANCHES[keyword](*self.branch(action), action.line)
            case "define":
                self.define(action)
            case "block":
                node = self.block(action)
            case "template":
                node = self.call(action)
            case "break" | "continue":
                node = self.jump(action)
            case "else" | "end" as keyword:
                _fail(action.line, f"unexpected {{{{{keyword}}}}}")
            case _:
                node = Action(action.pipe(is_whole=True), action.line)
        return node

    def jump(self, action: _Action) -> Jump:
        action.finish()
        if not self.range_depth:
            _fail(action.line, f"{action.keyword} outside a range")
        return Jump(action.keyword, action.line)

    def branch(self, action: _Action) -> tuple[Pipe, tuple[Node, ...], tuple[Node, ...]]:
        """Condition, body and alternative of if, with and range."""
        keyword = action.keyword
        n_variables = self.variables.size
        self.enter(action.line)
        self.range_depth += keyword == "range"
        pipe = action.pipe(is_whole=True, is_range=keyword == "range")
        body, end = self.nodes(("else", "end"))
        assert end is not None
        self.range_depth -= keyword == "range"
        orelse: tuple[Node, ...] = ()
        if end.keyword == "else":
            orelse = self.alternative(end, keyword)
        else:
            end.finish()
        self.depth -= 1
        self.variables.forget(n_variables)
        return pipe, body, orelse

    def alternative(self, action: _Action, keyword: str) -> tuple[Node, ...]:
        following = action.peek()
        if following is not None and following.text == keyword and keyword in ("if", "with"):
            action.begin_again()
            kind = If if keyword == "if" else With
            return (kind(*self.branch(action), action.line),)
        action.finish()
        orelse, end = self.nodes(("end",))
        assert end is not None
        end.finish()
        return orelse

    def enter(self, line: int) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            _fail(line, f"nested more than {MAX_DEPTH} deep")

    def define(self, action: _Action) -> None:
        name = action.name()
        action.finish()
        if self.depth:
            _fail(action.line, "define inside another block")
        self.templates[name] = self.definition()

    def definition(self) -> tuple[Node, ...]:
        outer, outer_ranges = self.variables, self.range_depth
        self.variables, self.range_depth = _Scope(), 0
        self.depth += 1
        body, end = self.nodes(("end",))
        assert end is not None
        end.finish()
        self.depth -= 1
        self.variables, self.range_depth = outer, outer_ranges
        return body

    def block(self, action: _Action) -> Call:
        name = action.name()
        pipe = action.pipe(is_whole=True)
        self.enter(action.line)
        self.depth -= 1
        self.templates.setdefault(name, self.definition())
        return Call(name, pipe, action.line)

    def call(self, action: _Action) -> Call:
        name = action.name()
        pipe = action.pipe(is_whole=True) if action.peek() is not None else None
        self.called.append((name, action.line))
        return Call(name, pipe, action.line)


class _Action:
    """The tokens of one action, read from left to right."""

    def __init__(self, parser: _Parser, part: _Part) -> None:
        assert part.tokens is not None
        self.parser = parser
        self.tokens = part.tokens
        self.position = 0
        self.line = part.line
        self.keyword = ""
        self.begin_again()
        if not self.keyword and not self.tokens:
            _fail(self.line, "an empty action")

    def begin_again(self) -> None:
        """Read the next word as the action's keyword, if it is one."""
        token = self.peek()
        self.keyword = token.text if token is not None and token.kind == "word" and token.text in _KEYWORDS else ""
        self.position += bool(self.keyword)

    def peek(self, ahead: int = 0) -> Token | None:
        index = self.position + ahead
        return self.tokens[index] if index < len(self.tokens) else None

    def fail(self, token: Token | None) -> NoReturn:
        where = f"unexpected {token.text!r}" if token is not None else "unexpected end"
        _fail(token.line if token is not None else self.line, f"{where} in {self.keyword or 'an action'}")

    def finish(self) -> None:
        if self.peek() is not None:
            self.fail(self.peek())

    def name(self) -> str:
        token = self.peek()
        if token is None or token.kind not in ("string", "raw"):
            self.fail(token)
        self.position += 1
        return _unquoted(token)

    def is_mark(self, text: str, ahead: int = 0) -> bool:
        token = self.peek(ahead)
        return token is not None and token.kind == "mark" and token.text == text

    def pipe(self, *, is_whole: bool = False, is_range: bool = False) -> Pipe:
        names, is_declaration = self.targets(is_range)
        commands = [self.command()]
        while self.is_mark("|"):
            self.position += 1
            commands.append(self.command())
            if isinstance(commands[-1][0], Const | Dot):
                _fail(self.line, "a pipeline goes on with something that is no function")
        if is_whole:
            self.finish()
        if is_declaration:
            self.parser.variables.declare(names)
        return Pipe(tuple(commands), names, is_declaration)

    def targets(self, is_range: bool) -> tuple[tuple[str, ...], bool]:
        first = self.peek()
        if first is None or first.kind != "variable":
            return (), False
        names = [first.text]
        n_tokens = 1
        if is_range and self.is_mark(",", 1):
            second = self.peek(2)
            if second is None or second.kind != "variable":
                self.fail(second)
            names.append(second.text)
            n_tokens = 3
        if not (self.is_mark(":=", n_tokens) or self.is_mark("=", n_tokens)):
            if n_tokens > 1:
                self.fail(self.peek(n_tokens))
            return (), False
        is_declaration = self.is_mark(":=", n_tokens)
        self.position += n_tokens + 1
        if not is_declaration:
            for name in names:
                self.check_variable(name)
        return tuple(names), is_declaration

    def check_variable(self, name: str) -> None:
        if name not in self.parser.variables:
            _fail(self.line, f"undefined variable {name!r}")

    def command(self) -> tuple[Operand, ...]:
        operands: list[Operand] = []
        while (token := self.peek()) is not None and not (token.kind == "mark" and token.text in "|)"):
            if operands and not token.follows_space:
                self.fail(token)
            operands.append(self.operand(token))
        if not operands:
            self.fail(self.peek())
        return tuple(operands)

    def operand(self, token: Token) -> Operand:
        self.position += 1
        operand: Operand
        match token.kind:
            case "dot":
                operand = Dot()
            case "field":
                operand = Field((token.text[1:], *self.fields()))
            case "variable":
                self.check_variable(token.text)
                operand = Variable(token.text, self.fields())
            case "string" | "raw" | "char" | "number":
                operand = _constant(token)
            case "word":
                operand = self.word(token)
            case "mark" if token.text == "(":
                operand = self.parenthesis(token)
            case _:
                self.fail(token)
        return operand

    def word(self, token: Token) -> Operand:
        constants = {"true": True, "false": False, "nil": None}
        if token.text in constants:
            return Const(constants[token.text])
        if token.text not in self.parser.functions:
            _fail(token.line, f"function {token.text!r} is not defined")
        return Function(token.text)

    def parenthesis(self, token: Token) -> Chain:
        self.parser.enter(token.line)
        pipe = self.pipe()
        self.parser.depth -= 1
        if not self.is_mark(")"):
            self.fail(self.peek())
        self.position += 1
        return Chain(pipe, self.fields())

    def fields(self) -> tuple[str, ...]:
        """Fields that follow without a space."""
        names = []
        while (token := self.peek()) is not None and token.kind == "field" and not token.follows_space:
            names.append(token.text[1:])
            self.position += 1
        return tuple(names)


def _constant(token: Token) -> Const:
    if token.kind == "number":
        return Const(_number(token))
    text = _unquoted(token)
    return Const(ord(text) if token.kind == "char" else text)


def _unquoted(token: Token) -> str:
    if token.kind == "raw":
        return token.text[1:-1].replace("\r", "")
    if _ESCAPED.fullmatch(token.text):
        value = ast.literal_eval(token.text)  # the escapes that Go knows mean the same in Python
        if isinstance(value, str) and (token.kind == "string" or len(value) == 1):
            return value
    _fail(token.line, f"malformed constant {token.text}")


def _number(token: Token) -> int | float:
    text = token.text.replace("_", "")
    if len(text) > 40:
        _fail(token.line, "a number of more than 40 characters")
    try:
        return int(text, 0) if not text.lstrip("+-").startswith("0") or len(text.lstrip("+-")) == 1 else _prefixed(text)
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        _fail(token.line, f"malformed number {token.text}")
    return value if set(text) & set(".eE") else int(value)


def _prefixed(text: str) -> int:
    """A number that begins with zero: 0x1F, 0b1, 0o7, and 017, which is octal in Go."""
    digits = text.lstrip("+-")
    value = int(digits, 8) if digits.isdigit() else int(digits, 0)
    return -value if text.startswith("-") else value
