"""Render the Jinja chat template of a model file, as Hugging Face's tokenizers do, in a sandbox with limits.

What transformers offers to templates is offered here: block trimming, ``break`` and ``continue``, ``raise_exception``,
``strftime_now``, ``tojson`` without HTML escaping, and ``generation`` blocks. The sandbox keeps a template from reaching
Python; the limits keep it from using up time or memory: code is generated with a step counted before each statement and
comparison, and every operator, filter and method that can make large values is accounted for in a Budget.
Knows nothing of roles or of which variables a conversation gets.
"""

from __future__ import annotations

import functools
import json
import re
import string
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace

from puna.errors import TemplateError
from puna.prompt.limits import Budget, check_template_length, count_chars

MAX_ERROR_CHARS = 500
MAX_INDENT = 64
MAX_STRIP_CHARS = 256
MAX_INTEGER_BITS = 4096
_MAX_WIDTH_DIGITS = 3
_TOO_WIDE = "a format with a computed width or one of four digits is not allowed"
_CHARS_PER_STEP = 1024  # of a search that may look at a character many times

_FILTERS = """
    abs attr capitalize count d default dictsort e escape first float format groupby indent int items join last length list lower
    map max min reject rejectattr replace reverse round safe select selectattr sort string sum title trim truncate unique
    upper urlencode wordcount
"""
_METHODS = """
    bit_length capitalize casefold copy count endswith find get index is_integer isalnum isalpha isascii isdecimal isdigit
    islower isnumeric isspace istitle isupper items join keys lower lstrip partition removeprefix removesuffix replace rfind
    rindex rpartition rsplit rstrip split splitlines startswith strip swapcase title upper values
"""
_ALLOWED_METHODS = frozenset(_METHODS.split())
_PLAIN_DATE = re.compile(r"(?:%%|%-?[A-Za-z]|[^%])*")
_PERCENT = re.compile(r"%%|%(?P<key>\((?P<end>[^()]*\))?)?[#0 +-]*(?P<width>\*|\d*)(?:\.(?P<precision>\*|\d*))?")
_WIDE = re.compile(r"\d{4}")
_SEARCHES_BACKWARDS = frozenset(("rfind", "rindex", "rpartition", "rsplit"))

_budget: ContextVar[Budget] = ContextVar("budget")


class TemplateRefusedError(TemplateError):
    """The template itself called ``raise_exception``."""


class _GenerationBlock(Extension):
    """``{% generation %}`` marks what the assistant wrote, for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012  # declared so by the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _CountingGenerator(CodeGenerator):
    """Generates code that reports its steps, and that makes lists, slices and joined text under supervision."""

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        super().blockvisit(self._counted(nodes), frame)

    def _counted(self, statements: Iterable[nodes.Node]) -> Iterator[nodes.Node]:
        self.writeline("environment.tick()")  # also where there is nothing else: an empty loop takes time too
        for statement in statements:
            self.writeline("environment.tick()", statement)
            yield statement

    def visit_Output(self, node: nodes.Output, frame: Frame) -> None:  # noqa: N802
        for child in node.nodes:
            if not isinstance(child, nodes.TemplateData):
                self.writeline("environment.tick()", child)
            super().visit_Output(nodes.Output([child], lineno=child.lineno), frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        self.write("(environment.tick() or ")
        super().visit_Compare(node, frame)
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self._call("concatenated", node.nodes, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        self.write("environment.admit(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self.write("environment.admit(")
        super().visit_Dict(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        if node.ctx != "load":
            super().visit_Tuple(node, frame)
            return
        self.write("environment.admit(")
        super().visit_Tuple(node, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        none = nodes.Const(None)
        self._call("sliced", [node.node, node.arg.start or none, node.arg.stop or none, node.arg.step or none], frame)

    def _call(self, method: str, arguments: Iterable[nodes.Node], frame: Frame) -> None:
        self.write(f"environment.{method}(")
        for argument in arguments:
            self.visit(argument, frame)
            self.write(", ")
        self.write(")")


class _ClosedNamespace(Namespace):
    """A namespace that prints as nothing in particular: its contents may refer to each other in circles."""

    def __repr__(self) -> str:
        return "<namespace>"


class _BoundFormat:
    """``str.format`` of one string, refusing widths that would fill memory."""

    def __init__(self, template: str, call: Callable[..., str]) -> None:
        self._template = template
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        _check_braces(self._template)
        budget = _budget.get()
        budget.text(len(self._template) + self._template.count("{") * budget.weight([args, kwargs]))
        return self._call(*args, **kwargs)


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _CountingGenerator
    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
            optimized=False,  # nothing is computed before a Budget watches
            finalize=self.printed,
        )
        self.filters = {name: _accounted(name, self.filters[name]) for name in _FILTERS.split()}
        self.filters["tojson"] = _accounted("tojson", _to_json)
        self.globals.clear()
        self.globals.update(
            {
                "range": safe_range,
                "dict": dict,
                "namespace": _ClosedNamespace,
                "raise_exception": _raise_exception,
                "strftime_now": _strftime_now,
            }
        )
        self._callables = tuple(self.globals.values())

    def tick(self) -> None:
        _budget.get().step()

    def admit(self, value: Any) -> Any:
        return _budget.get().admit(value)

    def printed(self, value: Any) -> str:
        text = str(value)
        _budget.get().text(len(text))
        return text

    def concatenated(self, *values: Any) -> str:
        texts = [str(value) for value in values]
        _budget.get().text(sum(map(len, texts)))
        return "".join(texts)

    def sliced(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        part = value[start:stop:step]
        if isinstance(part, str | list | tuple):
            _budget.get().text(len(part))
        return part

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget.get()
        budget.step()
        if operator == "*":
            _check_product(budget, left, right)
        elif operator == "**":
            _check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            _check_percent(budget, left, right)
        return budget.admit(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        return None if wrapped is None else _BoundFormat(value.__self__, wrapped)

    def is_safe_callable(self, obj: Any) -> bool:
        if isinstance(obj, Macro | LoopContext | Undefined | _BoundFormat):
            return True
        if isinstance(obj, types.BuiltinMethodType):
            return obj.__name__ in _ALLOWED_METHODS and not isinstance(obj.__self__, type | types.ModuleType)
        if isinstance(obj, types.MethodType):
            return isinstance(obj.__self__, LoopContext | jinja2.runtime.BlockReference)
        return any(obj is allowed for allowed in self._callables)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        budget = _budget.get()
        budget.step()
        if not __self.is_safe_callable(__obj):
            raise SecurityError(f"calling {getattr(__obj, '__name__', type(__obj).__name__)!r} is not allowed")
        if isinstance(__obj, types.BuiltinMethodType):
            args = _checked_arguments(budget, __obj.__name__, __obj.__self__, args, kwargs)
        return budget.admit(super().call(__context, __obj, *args, **kwargs))


def _accounted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that checks what it is about to make, and accounts for what it made."""
    n_hidden = 1 if hasattr(original, "jinja_pass_arg") else 0

    @functools.wraps(original)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.step()
        hidden, (value, *rest) = args[:n_hidden], args[n_hidden:]
        value, *rest = _checked_filter(budget, name, value, rest, kwargs)
        return budget.admit(original(*hidden, value, *rest, **kwargs))

    return filtered


def _checked_filter(budget: Budget, name: str, value: Any, rest: list[Any], kwargs: dict[str, Any]) -> list[Any]:
    given = [*rest, *kwargs.values()]
    if isinstance(value, Iterator) and name in ("join", "list", "string", "tojson"):
        value = budget.admit(_drained(budget, value))
    if name == "replace":
        _check_replace(budget, str(value), *[str(item) for item in given[:2]])
    elif name == "join":
        separator = max((len(item) for item in given if isinstance(item, str)), default=0)
        budget.text(budget.weight(value) + (len(value) * separator if isinstance(value, Sized) else 0))
    elif name == "format":
        _check_percent(budget, str(value), kwargs or tuple(rest))
    elif name in ("indent", "tojson"):
        _check_indent(budget, name, value, given)
    elif name == "trim":
        _check_strip(given)
    elif name == "sum" and not all(isinstance(item, str | int | float | None) for item in given):
        raise SecurityError("sum starts with a number")
    return [value, *rest]


def _drained(budget: Budget, items: Iterator[Any]) -> list[Any]:
    drained = []
    for item in items:
        budget.step()
        drained.append(item)
    return drained


def _checked_arguments(
    budget: Budget, name: str, owner: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    if not isinstance(owner, str):
        return args
    if name == "replace":
        _check_replace(budget, owner, *args[:2])
    elif name == "join" and args:
        items = _drained(budget, iter(args[0]))
        budget.text(budget.weight(items) + len(items) * len(owner))
        return (items,)
    elif name in ("strip", "lstrip", "rstrip"):
        _check_strip(args)
    elif name in _SEARCHES_BACKWARDS:
        # Such a search may compare all of what it looks for at each place, unlike one that goes forwards.
        texts = [item for item in (*args, *kwargs.values()) if isinstance(item, str)]
        _check_strip(texts)
        budget.step(len(owner) * max(map(len, texts), default=0) // _CHARS_PER_STEP)
    return args


def _check_replace(budget: Budget, text: str, old: Any = "", new: Any = "", *_: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        budget.text(len(text) + max(0, text.count(old) * (len(new) - len(old))))


def _check_strip(args: Iterable[Any]) -> None:
    if any(isinstance(item, str) and len(item) > MAX_STRIP_CHARS for item in args):
        raise SecurityError(f"more than {MAX_STRIP_CHARS} characters to strip or to look for from the end")


def _check_indent(budget: Budget, name: str, value: Any, given: list[Any]) -> None:
    widths = [len(item) if isinstance(item, str) else item for item in given if isinstance(item, str | int)]
    width = max(widths, default=4)
    if width > MAX_INDENT:
        raise SecurityError(f"an indent of {width} is more than {MAX_INDENT}")
    if name == "indent":
        text = str(value)
        budget.text(len(text) + text.count("\n") * width)


def _check_product(budget: Budget, left: Any, right: Any) -> None:
    for value, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(value, str | list | tuple):
            budget.text(max(0, times) * max(len(value), 1))
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_INTEGER_BITS:
        raise SecurityError(f"integers of more than {MAX_INTEGER_BITS} bits are not allowed")


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * max(right, 0) > MAX_INTEGER_BITS:
        raise SecurityError(f"integers of more than {MAX_INTEGER_BITS} bits are not allowed")


def _check_percent(budget: Budget, template: str, values: Any) -> None:
    for found in _PERCENT.finditer(template):
        widths = (found["width"] or "", found["precision"] or "")
        if any(width == "*" or len(width) > _MAX_WIDTH_DIGITS for width in widths) or (found["key"] and not found["end"]):
            raise SecurityError(_TOO_WIDE)
    times = template.count("%") if isinstance(values, Mapping) else 1
    budget.text(len(template) + times * budget.weight(values))


def _check_braces(template: str) -> None:
    """Errors: SecurityError for a width that would fill memory; ValueError for what is no format."""
    for _, _, spec, conversion in string.Formatter().parse(template):
        if "{" in (spec or "") + (conversion or "") or _WIDE.search(spec or ""):
            raise SecurityError(_TOO_WIDE)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefusedError(str(message))


def _strftime_now(format: str) -> str:
    if len(format) > 200 or not _PLAIN_DATE.fullmatch(format):
        raise SecurityError(f"the date format {format[:50]!r} is not allowed")
    return datetime.now().strftime(format)


_environment = _Environment()


@contextmanager
def _spending(budget: Budget) -> Iterator[None]:
    token = _budget.set(budget)
    try:
        yield
    finally:
        _budget.reset(token)


@functools.lru_cache(maxsize=32)
def _compiled(source: str) -> jinja2.Template:
    return _environment.from_string(source)


def render(source: str, variables: Mapping[str, Any], *, budget: Budget | None = None) -> str:
    """Render a template with plain data: lists, dicts with text keys, and what JSON knows.

    Errors: TemplateError naming the line when the template is malformed, fails, or goes beyond a limit; TemplateRefusedError
    with the template's own words when it calls ``raise_exception``.
    """
    check_template_length(source)
    if budget is None:
        budget = Budget(count_chars(variables.values()))
    with _spending(budget):
        try:
            return _collect(_compiled(source).generate(variables), budget)
        except Exception as error:  # a template can raise whatever Python can
            raise _explained(error) from error


def check(source: str) -> None:
    """Parse a template without rendering it.

    Errors: TemplateError naming the line.
    """
    check_template_length(source)
    with _spending(Budget()):
        try:
            _compiled(source)
        except Exception as error:  # the parser raises RecursionError and others besides its own
            raise _explained(error) from error


def _collect(pieces: Iterator[str], budget: Budget) -> str:
    parts: list[str] = []
    n_chars = 0
    for piece in pieces:
        parts.append(piece)
        n_chars += len(piece)
        if n_chars > budget.max_text:
            raise TemplateError(f"the template does too much: more than {budget.max_text} characters of output")
    return "".join(parts)


def _explained(error: Exception) -> TemplateError:
    if isinstance(error, TemplateRefusedError):
        return TemplateRefusedError(f"the chat template refuses these messages: {_shortened(error)}")
    line = error.lineno if isinstance(error, jinja2.TemplateSyntaxError) else _line_of(error)
    where = f"chat template, line {line}" if line else "chat template"
    if isinstance(error, TemplateError | jinja2.TemplateError | SecurityError):
        return TemplateError(f"{where}: {_shortened(error)}")
    if isinstance(error, RecursionError):
        return TemplateError(f"{where}: it is nested too deeply")
    if isinstance(error, MemoryError):
        return TemplateError(f"{where}: it is too large")
    return TemplateError(f"{where}: {type(error).__name__}: {_shortened(error)}")


def _shortened(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= MAX_ERROR_CHARS else text[: MAX_ERROR_CHARS - 3] + "..."


def _line_of(error: BaseException) -> int | None:
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
