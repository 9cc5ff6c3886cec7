"""The environment of transformers' chat templates with bounds on time and memory: a template is a stranger's program.

Jinja's sandbox keeps a template from reading and changing what it should not; it lets it run for ever and fill all
memory. Here everything that can repeat (loops, calls) counts and looks at the processor time, and everything that makes
text, lists or numbers larger says first how large. Each rendering has a budget of both; exceeding it is a UserError.
"""

from __future__ import annotations

import functools
import re
import threading
import time
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from transformers.utils import chat_template_utils

from meshtune.errors import UserError

SECONDS = 5.0  # of processor time for one rendering; the longest conversations take some hundredths
CHARACTERS = 256_000_000  # made in one rendering, intermediate texts included
PER_INPUT = 64  # and as many for each character of a very long conversation
LONGEST_TEMPLATE = 1 << 20
NODE = 64  # characters that a list, a mapping or a number counts as
ENTRY = 16  # and a text in one of them, added to its own
WIDTH = 10_000  # of a field in a format; wider ones are refused
BITS = 4096  # of a whole number
CHECK = 64  # steps between two looks at the clock
ENCODINGS = frozenset("utf-8 utf8 utf-16 utf-32 ascii latin-1 latin1 iso-8859-1".split())


class TemplateLimitError(UserError):
    """A chat template that takes more time or memory than any conversation needs."""

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None):
        super().__init__(what, where=where, fix=fix or "set model.chat_template to another template")


class _Budget(threading.local):
    """The remaining budget of this thread's rendering; outside one (constants while compiling) the same limits hold."""

    characters: int = CHARACTERS
    steps: int = 0
    end: float = float("inf")
    extension: Callable[[], int] | None = None


_BUDGET = _Budget()


def render(template: Any, variables: Mapping[str, Any]) -> str:
    """Renders a template of a BoundedEnvironment. Raises as templates do, and TemplateLimitError."""
    budget = _BUDGET
    budget.characters, budget.steps, budget.end = CHARACTERS, 0, time.thread_time() + SECONDS
    budget.extension = lambda: PER_INPUT * _weight(variables.get("messages"), limit=1 << 40)
    try:
        return template.render(variables)
    finally:
        budget.extension, budget.characters, budget.end = None, CHARACTERS, float("inf")


def bounded_environment() -> BoundedEnvironment:
    """An environment with all that transformers gives to chat templates."""
    original = chat_template_utils._compile_jinja_template("").environment
    environment = BoundedEnvironment(
        trim_blocks=original.trim_blocks,
        lstrip_blocks=original.lstrip_blocks,
        extensions=[type(extension) for extension in original.extensions.values()],
    )
    environment.globals.update(original.globals)
    del environment.globals["lipsum"]
    environment.filters.update({name: _bounded_filter(name, call) for name, call in original.filters.items()})
    return environment


class _Generator(CodeGenerator):
    """Writes the Python of a template, with a step in every loop and a charge for every list, mapping and text."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        node.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("step"), lineno=node.lineno))
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join_values((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def _visit_charged(self, visit: Callable[[Any, Frame], None], node: nodes.Node, frame: Frame) -> None:
        self.write("environment.charge_value(")
        visit(node, frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._visit_charged(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._visit_charged(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._visit_charged(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self.write("environment.charge_slice(")
            super().visit_Getitem(node, frame)
            self.write(")")
        else:
            super().visit_Getitem(node, frame)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a budget of time and memory for each rendering."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any):
        super().__init__(finalize=_finalize, **options)

    def compile(self, source: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(source, str) and len(source) > LONGEST_TEMPLATE:
            raise TemplateLimitError(f"the chat template has {len(source):,} characters")
        return super().compile(source, *arguments, **options)

    @property
    def step(self) -> None:
        _step()

    def concat(self, pieces: Iterable[str]) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        pieces = list(pieces)
        _charge(sum(map(len, pieces)))
        return "".join(pieces)

    def join_values(self, values: tuple[Any, ...]) -> str:
        _charge(sum(map(_weight, values)))
        return "".join(map(str, values))

    def charge_value(self, value: Any) -> Any:
        _charge(_weight(value))
        return value

    def charge_slice(self, value: Any) -> Any:
        _charge(len(value) if isinstance(value, str | bytes) else _weight(value))
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if type(left) is str and type(right) is str:
                _charge(len(left) + len(right))
                return left + right
            if not isinstance(left, int | float):
                _charge(_weight(left) + _weight(right))
        elif operator == "*":
            _check_product(left, right)
        elif operator == "%":
            if isinstance(left, str | bytes):
                _check_format(left, right)
        elif isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > BITS:
            raise TemplateLimitError("the chat template makes a number of more than a thousand digits")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _step()
        kind = type(__obj)
        if kind is types.BuiltinMethodType and type(owner := __obj.__self__) in (str, bytes, int):
            args = _check_method(owner, __obj.__name__, args, kwargs)
        elif kind is types.FunctionType and hasattr(__obj, "__wrapped__"):  # the sandbox's own str.format
            _check_format(__obj.__wrapped__.__self__, (args, kwargs))
        value = super().call(__context, __obj, *args, **kwargs)
        if type(value) in (list, dict, tuple):
            _charge(_weight(value))
        return value


def _step() -> None:
    budget = _BUDGET
    budget.steps += 1
    if not budget.steps % CHECK and time.thread_time() > budget.end:
        raise TemplateLimitError(f"the chat template takes more than {SECONDS:.0f} s for one conversation")


def _charge(characters: int) -> None:
    budget = _BUDGET
    budget.characters -= characters
    if budget.characters < 0:
        if budget.extension is not None:
            extension, budget.extension = budget.extension, None
            budget.characters += extension()
        if budget.characters < 0:
            raise TemplateLimitError("the chat template makes more text than any conversation needs")


def _weight(value: Any, limit: int | None = None) -> int:
    """The characters that a value takes when it is written, about; a value that a list holds twice counts twice."""
    if isinstance(value, str | bytes):
        return len(value)
    total, waiting = 0, [value]
    limit = _BUDGET.characters if limit is None else limit
    while waiting and total <= limit:
        value = waiting.pop()
        if isinstance(value, str | bytes):
            total += len(value) + ENTRY
        elif isinstance(value, dict):
            total += NODE
            waiting += value.keys()
            waiting += value.values()
        elif isinstance(value, list | tuple | set | frozenset):
            total += NODE
            waiting += value
        elif isinstance(value, Namespace):
            raise TemplateLimitError("the chat template puts a namespace into a text, a list or a mapping")
        else:
            total += NODE
    return total


def _finalize(value: Any) -> Any:
    if type(value) is not str:
        _charge(_weight(value))
    return value


def _check_product(left: Any, right: Any) -> None:
    number, factor = (left, right) if isinstance(left, int) else (right, left)
    if isinstance(factor, int) and isinstance(number, int):
        if number.bit_length() + factor.bit_length() > BITS:
            raise TemplateLimitError("the chat template makes a number of more than a thousand digits")
    elif isinstance(number, int) and not isinstance(factor, float):
        _charge(max(0, number) * _weight(factor))


def _check_format(text: str | bytes, values: Any) -> None:
    """Bounds what a format writes: widths of at most WIDTH, every field all of the values."""
    text = text if isinstance(text, str) else text.decode("latin-1")
    if re.search(r"\d{5}|%[^a-zA-Z%]*\*|\{[^{}]*\{", text):
        raise TemplateLimitError("the chat template has a format with a width that is computed, or very large")
    fields = text.count("%") + text.count("{")
    _charge(len(text) + fields * (WIDTH + _weight(values)))


def _check_method(
    owner: str | bytes | int, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Charges what a method of a text or a number makes; returns its arguments, with a list in place of an iterator."""
    if isinstance(owner, int):
        _charge(sum(abs(value) for value in (*args, *kwargs.values()) if isinstance(value, int)))
        return args
    length = len(owner)
    if name in ("ljust", "rjust", "center", "zfill"):
        _charge(sum(abs(value) for value in args if isinstance(value, int)))
    elif name == "expandtabs":
        _charge(
            (length + 1) * max(8, *(abs(value) for value in (*args, *kwargs.values()) if isinstance(value, int)), 0)
        )
    elif name == "replace":
        _charge(_replaced_length(owner, *args[:2]))
    elif name == "join" and args:
        args = ([*args[0]] if not isinstance(args[0], str | bytes) else args[0], *args[1:])
        _charge(_weight(args[0]) + length * len(args[0]))
    elif name == "translate":
        table = args[0] if args and isinstance(args[0], dict) else {}
        _charge(length * max(map(_weight, table.values()), default=1))
    elif name in ("split", "rsplit", "splitlines"):
        separator = args[0] if args and isinstance(args[0], type(owner)) and args[0] else None
        _charge(length + NODE * (owner.count(separator) if separator is not None else length // 2))  # pyright: ignore
    elif name in ("encode", "decode"):
        encoding = str((*args, *kwargs.values(), "utf-8")[0]).lower().replace("_", "-")
        if encoding not in ENCODINGS:
            raise LookupError(f"unknown encoding: {encoding}")
        _charge(4 * length)
    else:
        _charge(length)
    return args


def _replaced_length(text: Any, old: Any = "", new: Any = "") -> int:
    if not isinstance(old, str | bytes) or not isinstance(new, str | bytes) or len(new) <= len(old):
        return len(text)
    return len(text) + text.count(old) * (len(new) - len(old))


# Filters whose result is no larger than what they are given, or comes bit by bit.
PLAIN_FILTERS = frozenset(
    """
    abs attr capitalize count d default dictsort first float int items last length lower map max min random reject
    rejectattr reverse round safe select selectattr trim upper
    """.split()
)


def _bounded_filter(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that charges what it makes: all that it is given, times the numbers and lengths of its arguments."""
    if name in PLAIN_FILTERS:
        return call
    skip = 1 if hasattr(call, "jinja_pass_arg") else 0

    @functools.wraps(call)
    def charge_and_call(*args: Any, **kwargs: Any) -> Any:
        _step()
        value = _charge_filter(name, args[skip], args[skip + 1 :], kwargs)
        return call(*args[:skip], value, *args[skip + 1 :], **kwargs)

    return charge_and_call


def _charge_filter(name: str, value: Any, options: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Charges what a filter makes of `value`; returns the value, with a list in place of an iterator."""
    if name == "replace":
        value = str(value) if not isinstance(value, str) else value
        _charge(_replaced_length(value, *options[:2], **{k: v for k, v in kwargs.items() if k in ("old", "new")}))
        return value
    if name == "format":
        _check_format(str(value), (options, kwargs))
        return value
    if name == "sum" and any(isinstance(option, list | tuple) for option in (*options, *kwargs.values())):
        raise TemplateLimitError("the chat template sums lists")
    if not isinstance(value, str | bytes | Mapping | list | tuple) and isinstance(value, Iterable):
        value = [*value]
    factor = 1
    for option in (*options, *kwargs.values()):
        factor += abs(option) if isinstance(option, int) else _weight(option)
    if name in ("escape", "e", "forceescape", "title", "urlencode", "urlize", "wordcount", "xmlattr"):
        factor *= 12
    _charge(factor * _weight(value))
    return value
