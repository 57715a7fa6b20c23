"""Templates in the language of Go's text/template, as Modelfiles carry them: parse once, execute many times.

An interpreter for the whole of the language that templates use: actions, pipelines, variables, if, with, range, break,
continue, define, template and block. Missing keys of a map are nil, as Ollama runs it. Every step is counted and every
text accounted for in a Budget. Knows nothing of conversations; which variables there are is the caller's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from puna.errors import TemplateError
from puna.prompt import go_functions, go_syntax
from puna.prompt.go_syntax import (
    Action,
    Call,
    Chain,
    Const,
    Dot,
    Field,
    Function,
    If,
    Jump,
    Node,
    Operand,
    Pipe,
    Range,
    Text,
    Tree,
    Variable,
    With,
)
from puna.prompt.go_values import NO_VALUE, GoError, Struct, field, is_true, shown, type_name
from puna.prompt.limits import Budget, count_chars

MAX_CALL_DEPTH = 40


class GoTemplate:
    """A parsed template; immutable."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.fields = frozenset(_fields_of_tree(tree))

    @classmethod
    def parse(cls, source: str) -> GoTemplate:
        """Errors: TemplateError naming the line."""
        try:
            return cls(go_syntax.parse(source, go_functions.NAMES))
        except RecursionError as error:
            raise TemplateError("template: it is nested too deeply") from error

    def mentions(self, name: str) -> bool:
        """Whether a field or variable path contains *name*: ``Messages``, ``Tools``, ``Suffix``."""
        return name in self.fields

    def with_response(self) -> GoTemplate:
        """The same template with ``{{ .Response }}`` at its end."""
        response = Action(Pipe(((Field(("Response",)),),)), 0)
        return GoTemplate(Tree((*self._tree.root, response), self._tree.templates))

    def cut_after_response(self) -> GoTemplate:
        """The same template without all that follows the first action that prints ``.Response``."""
        nodes, _ = _cut(self._tree.root)
        return GoTemplate(Tree(nodes, self._tree.templates))

    def execute(self, variables: Mapping[str, Any], *, budget: Budget | None = None) -> str:
        """Render with *variables* as the fields of the root.

        Errors: TemplateError naming the line, when evaluation fails or goes beyond a limit.
        """
        execution = _Execution(self._tree, dict(variables), budget or Budget(count_chars(variables.values())))
        try:
            execution.run(self._tree.root, execution.root)
        except (GoError, TemplateError) as error:
            raise TemplateError(f"template, line {execution.line}: {error}") from error
        except RecursionError as error:
            raise TemplateError(f"template, line {execution.line}: it is nested too deeply") from error
        return "".join(execution.output)


class _Break(Exception):
    pass


class _Continue(Exception):
    pass


class _Execution:
    """One rendering: the output so far, and the variables in scope."""

    def __init__(self, tree: Tree, root: dict[str, Any], budget: Budget) -> None:
        self.tree = tree
        self.root = root
        self.budget = budget
        self.output: list[str] = []
        self.n_chars = 0
        self.variables: list[tuple[str, Any]] = [("$", root)]
        self.line = 1
        self.call_depth = 0

    def run(self, nodes: Iterable[Node], dot: Any) -> None:
        for node in nodes:
            self.line = node.line
            self.budget.step()
            match node:
                case Text(text):
                    self.write(text)
                case Action(pipe):
                    value = self.evaluate(pipe, dot)
                    if not pipe.names:
                        self.write(shown(value, NO_VALUE))
                case If() | With():
                    self.branch(node, dot)
                case Range():
                    self.loop(node, dot)
                case Call():
                    self.call_template(node, dot)
                case Jump(keyword):
                    raise _Break if keyword == "break" else _Continue

    def write(self, text: str) -> None:
        self.budget.text(len(text))
        self.n_chars += len(text)
        if self.n_chars > self.budget.max_text:
            raise GoError(f"the template does too much: more than {self.budget.max_text} characters of output")
        self.output.append(text)

    @contextmanager
    def scope(self) -> Iterator[None]:
        n_variables = len(self.variables)
        try:
            yield
        finally:
            del self.variables[n_variables:]

    def branch(self, node: If | With, dot: Any) -> None:
        with self.scope():
            value = self.evaluate(node.pipe, dot)
            if is_true(value):
                self.run(node.body, value if isinstance(node, With) else dot)
            else:
                self.run(node.orelse, dot)

    def loop(self, node: Range, dot: Any) -> None:
        with self.scope():
            value = self.evaluate(Pipe(node.pipe.commands), dot)
            is_empty = True
            for key, item in _pairs(value):
                is_empty = False
                self.budget.step()
                with self.scope():
                    self.set_loop_variables(node.pipe, key, item)
                    try:
                        self.run(node.body, item)
                    except _Continue:
                        continue
                    except _Break:
                        break
            if is_empty:
                self.run(node.orelse, dot)

    def set_loop_variables(self, pipe: Pipe, key: Any, item: Any) -> None:
        values = {0: (), 1: (item,), 2: (key, item)}[len(pipe.names)]
        for name, value in zip(pipe.names, values, strict=True):
            self.set_variable(name, value, pipe.is_declaration)

    def call_template(self, node: Call, dot: Any) -> None:
        value = self.evaluate(node.pipe, dot) if node.pipe is not None else None
        if self.call_depth == MAX_CALL_DEPTH:
            raise GoError(f"templates call each other more than {MAX_CALL_DEPTH} deep")
        outer = self.variables
        self.variables = [("$", value)]
        self.call_depth += 1
        self.run(self.tree.templates[node.name], value)
        self.call_depth -= 1
        self.variables = outer

    def set_variable(self, name: str, value: Any, is_declaration: bool) -> None:
        if is_declaration:
            self.variables.append((name, value))
            return
        for i in range(len(self.variables) - 1, -1, -1):
            if self.variables[i][0] == name:
                self.variables[i] = (name, value)
                return

    def evaluate(self, pipe: Pipe, dot: Any) -> Any:
        value = self.command(pipe.commands[0], dot, ())
        for command in pipe.commands[1:]:
            value = self.command(command, dot, (value,))
        for name in pipe.names:
            self.set_variable(name, value, pipe.is_declaration)
        return value

    def command(self, operands: Sequence[Operand], dot: Any, piped: tuple[Any, ...]) -> Any:
        self.budget.step()
        first, *others = operands
        if isinstance(first, Function):
            if first.name in ("and", "or"):
                return self.logic(first.name, others, dot, piped)
            return go_functions.call(first.name, self.budget, [*(self.operand(item, dot) for item in others), *piped])
        if others or piped:
            raise GoError("arguments for something that is no function")
        return self.operand(first, dot)

    def logic(self, name: str, operands: Sequence[Operand], dot: Any, piped: tuple[Any, ...]) -> Any:
        """``and`` and ``or``: evaluation stops at the operand that decides, and that operand is the value."""
        if not operands and not piped:
            raise GoError(f"wrong number of arguments for {name}: want at least 1, got 0")
        value: Any = None
        for item in operands:
            value = self.operand(item, dot)
            if is_true(value) == (name == "or"):
                return value
        return piped[0] if piped else value

    def operand(self, operand: Operand, dot: Any) -> Any:
        value: Any
        names: tuple[str, ...] = ()
        match operand:
            case Dot():
                value = dot
            case Const(value):
                pass
            case Field(names):
                value = dot
            case Variable(name, names):
                value = next(item for known, item in reversed(self.variables) if known == name)
            case Chain(pipe, names):
                value = self.evaluate(pipe, dot)
            case Function(name):
                value = self.command((operand,), dot, ())
        for name in names:
            value = field(value, name)
        return value


def _pairs(value: Any) -> Iterator[tuple[Any, Any]]:
    if value is None:
        return iter(())
    if isinstance(value, list):
        return enumerate(value)
    if isinstance(value, dict):
        return ((key, value[key]) for key in sorted(value))
    if isinstance(value, int) and not isinstance(value, bool):
        return ((i, i) for i in range(value))
    raise GoError(f"range can't iterate over a {value.name if isinstance(value, Struct) else type_name(value)}")


def _cut(nodes: tuple[Node, ...]) -> tuple[tuple[Node, ...], bool]:
    """Nodes up to the first that prints ``.Response``, and whether there is one."""
    kept: list[Node] = []
    for node in nodes:
        if isinstance(node, Action) and "Response" in _fields_of_pipe(node.pipe):
            return (*kept, node), True
        if isinstance(node, If | With | Range):
            body, is_found = _cut(node.body)
            if is_found:
                # the alternative is what is printed when there is nothing to answer yet: it ends here as well
                return (*kept, type(node)(node.pipe, body, node.orelse, node.line)), True
            orelse, is_found = _cut(node.orelse)
            if is_found:
                return (*kept, type(node)(node.pipe, node.body, orelse, node.line)), True
        kept.append(node)
    return tuple(kept), False


def _fields_of_tree(tree: Tree) -> Iterator[str]:
    yield from _fields_of_nodes(tree.root)
    for nodes in tree.templates.values():
        yield from _fields_of_nodes(nodes)


def _fields_of_nodes(nodes: Iterable[Node]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, Action | If | With | Range | Call) and node.pipe is not None:
            yield from _fields_of_pipe(node.pipe)
        if isinstance(node, If | With | Range):
            yield from _fields_of_nodes((*node.body, *node.orelse))


def _fields_of_pipe(pipe: Pipe) -> set[str]:
    found: set[str] = set()
    for command in pipe.commands:
        for operand in command:
            if isinstance(operand, Field | Variable | Chain):
                found.update(operand.names)
            if isinstance(operand, Chain):
                found |= _fields_of_pipe(operand.pipe)
    return found
