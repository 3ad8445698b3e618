"""A Jinja environment for chat templates, which are strangers' programs.

Jinja's own sandbox keeps a template from Python's internals and from changing what it is given.
This one also bounds what a template may take: how many steps it runs and for how long, how long its
texts grow and how much text it makes in all, and how many parts a value has, those of its parts
included: one operation on a value that holds the last one twice, forty times over, would not end.

The rest is as Hugging Face's transformers has it, for which chat templates are written. This is the
one place that uses jinja2, an optional package; import it inside functions only.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, wraps
from itertools import islice
from time import monotonic
from typing import Any

from jinja2 import Template, TemplateRuntimeError, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

# Far more than a conversation needs: each item of a loop, each call and each filter is a step, and
# so is the making of so many characters.
MOST_STEPS = 300_000
CHARACTERS_A_STEP = 1024
MOST_SECONDS = 10.0
LONGEST_TEXT = 1 << 24
MOST_PARTS = 1 << 20
LARGEST_WIDTH = 1_000_000
LARGEST_POWER_BITS = 4096
# Functions that write one of their arguments once for each part of another, and how often at most.
_MULTIPLYING = {
    "expandtabs", "indent", "join", "replace", "tojson", "translate", "urlize", "wordwrap"
}  # fmt: skip
LARGEST_PRODUCT = 1 << 28


@dataclass
class _Budget:
    steps: int
    ends_at: float


_budget: ContextVar[_Budget] = ContextVar("budget")

_CONTAINERS = (dict, list, tuple)


def render(text: str, variables: dict[str, Any]) -> str:
    """Return what a template makes of its variables.

    Raises
    ------
    Exception
        Whatever the template runs into: a fault of its own, of what it is given, or a bound.
    """
    token = _budget.set(_Budget(MOST_STEPS, monotonic() + MOST_SECONDS))
    try:
        pieces, length = [], 0
        for piece in _compiled(text).generate(variables):
            pieces.append(piece)
            length += len(_of_bounded_length(piece))
            if length > LONGEST_TEXT:
                raise TemplateRuntimeError(f"it writes more than {LONGEST_TEXT} characters")
        return "".join(pieces)
    finally:
        _budget.reset(token)


@lru_cache(maxsize=16)
def _compiled(text: str) -> Template:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols, _GenerationBlock],
    )
    tree = _WithinBounds().visit(environment.parse(text))
    for loop in tree.find_all(nodes.For):
        loop.iter = _filtered(loop.iter, "items_within_bounds")
    for concatenation in list(tree.find_all(nodes.Concat)):
        concatenation.nodes = [_filtered(node, "within_bounds") for node in concatenation.nodes]
    return environment.from_string(tree)


class _WithinBounds(NodeTransformer):
    """Lets lists, tuples and dictionaries that a template writes out be checked when it runs."""

    def visit_List(self, node: nodes.List | nodes.Dict | nodes.Tuple) -> nodes.Node:
        return _filtered(self.generic_visit(node), "of_bounded_parts")

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        is_value = node.ctx == "load"  # not names to be set
        return self.visit_List(node) if is_value else self.generic_visit(node)


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _GenerationBlock(Extension):
    """``{% generation %}``, with which templates mark what an assistant said; read past here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.filters["tojson"] = _to_json
        self.filters = {name: _bounded(name, each) for name, each in self.filters.items()}
        self.filters["items_within_bounds"] = _items_within_bounds
        self.filters["within_bounds"] = _of_bounded_length
        self.filters["of_bounded_parts"] = _of_bounded_parts
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        del self.globals["lipsum"]

    def call(self, context: Context, called: Any, /, *arguments: Any, **named: Any) -> Any:
        _take_steps(1)
        text = getattr(called, "__self__", None)
        if isinstance(text, str):
            _check_widths(arguments, named)
            _check_product(called.__name__, (text, *arguments, *named.values()))
        return _of_bounded_length(super().call(context, called, *arguments, **named))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _take_steps(1)
        _check_operands(operator, left, right)
        return _of_bounded_length(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped


def _take_steps(count: int) -> None:
    budget = _budget.get()
    budget.steps -= count
    if budget.steps < 0:
        raise TemplateRuntimeError(f"it takes more than {MOST_STEPS} steps")
    if monotonic() > budget.ends_at:
        raise TemplateRuntimeError(f"it takes more than {MOST_SECONDS:g} seconds")


def _items_within_bounds(items: Iterable[Any]) -> list[Any]:
    """Return what a loop goes over; each item is a step when its turn comes."""
    return _Items(islice(items, MOST_STEPS + 1))


class _Items(list[Any]):
    """A list, of which the template asks for the length too."""

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            _take_steps(1)
            yield item


def _of_bounded_length(value: Any) -> Any:
    if isinstance(value, str | list | tuple):
        if len(value) > LONGEST_TEXT:
            raise TemplateRuntimeError(f"it makes a text of more than {LONGEST_TEXT} characters")
        _take_steps(len(value) // CHARACTERS_A_STEP)
    return _of_bounded_parts(value)


def _of_bounded_parts(value: Any) -> Any:
    """Return a value, if all that is nested in it, each time it is, has few parts."""
    if not isinstance(value, _CONTAINERS):
        return value
    parts: dict[int, int] = {}  # of each container, by its id
    waiting: list[Any] = [value]
    while waiting:
        container = waiting[-1]
        nested = [part for part in _values_of(container) if isinstance(part, _CONTAINERS)]
        unknown = [part for part in nested if id(part) not in parts]
        waiting += unknown
        if not unknown:
            waiting.pop()
            parts[id(container)] = len(container) + sum(parts[id(part)] for part in nested)
            if parts[id(container)] > MOST_PARTS:
                raise TemplateRuntimeError(f"it makes a value of more than {MOST_PARTS} parts")
    _take_steps(len(parts) // CHARACTERS_A_STEP)
    return value


def _values_of(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that counts as a step and makes no long text from a short one."""

    @wraps(function)  # with its marks, by which Jinja knows what to pass
    def bounded(*arguments: Any, **named: Any) -> Any:
        _take_steps(1)
        # the first that is no context or environment is the value, which may be any number
        _check_widths(arguments[1:], named)
        _check_product(name, (*arguments, *named.values()))
        if name == "format":
            _check_format(arguments[0])
        return _of_bounded_length(function(*arguments, **named))

    return bounded


def _check_widths(arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    for argument in (*arguments, *named.values()):
        if isinstance(argument, int) and argument > LARGEST_WIDTH:
            raise TemplateRuntimeError(f"it asks for a text of {argument} characters")


def _check_product(name: str, arguments: tuple[Any, ...]) -> None:
    """Refuse what would be far too long before it is made."""
    if name not in _MULTIPLYING:
        return
    counts = [argument for argument in arguments[1:] if isinstance(argument, int)]
    *_, second, largest = sorted([1, 1, *map(_length, arguments), *counts])
    if second * largest > LARGEST_PRODUCT:
        raise TemplateRuntimeError("it makes a text that is too long")


def _length(value: Any) -> int:
    """Return how long a text is, or of how many parts another value."""
    if isinstance(value, dict):
        return sum(map(_length, value.values()))
    return len(value) if isinstance(value, str | list | tuple) else 1


def _check_format(text: Any) -> None:
    if isinstance(text, str) and re.search(r"\d{7}|%[^a-zA-Z%]*\*|\{[^}]*\{", text):
        raise TemplateRuntimeError("it formats to a width that is too large")


def _check_operands(operator: str, left: Any, right: Any) -> None:
    if operator == "%":
        _check_format(left)
    if operator == "*":
        for text, count in ((left, right), (right, left)):
            is_repeated = isinstance(text, str | list | tuple) and isinstance(count, int)
            if is_repeated and len(text) * count > LONGEST_TEXT:
                raise TemplateRuntimeError(f"it repeats a text {count} times")
    if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length()
        if bits > LARGEST_POWER_BITS:
            raise TemplateRuntimeError("it computes a number that is too large")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON; Jinja's own filter of this name writes it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
