"""Chat templates, run in jinja2's sandbox with a bounded compute budget.

The language is that of Transformers: trimmed blocks, ``break`` and ``continue``, ``raise_exception``,
``strftime_now``, a ``tojson`` that escapes no HTML, and ``{% generation %}``, which changes nothing
here. The sandbox isolates a template from Python but does not bound its work. So every loop iteration,
call and character written, and the size of everything searched, compared or sorted, is charged to a
budget, and operations that could build a text of any length at once are refused or checked
beforehand.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from datetime import date
from itertools import islice
from typing import Any, ClassVar

from jinja2 import TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from minillm_core import DataError

LARGEST = 1 << 20
"""Maximum characters of a template."""

STEPS = 600_000
"""Budget of loop iterations, calls and filters per conversation."""

CHARACTERS = 1 << 26
"""Budget of characters per conversation, including intermediate texts."""

_ITEMS = 8
"""Items of a list that are charged as one step."""

_TEXT = 512
"""Characters of a text that are charged as one step."""

_CHEAP = frozenset(["length", "count", "first", "last", "default", "d", "string"])
"""Filters whose cost does not grow with the size of their input."""

_WIDEST = 64  # maximum columns of an indent or a field
_LONGEST = 10_000  # maximum of any other number passed to a filter
_WIDE = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{3,})")
_REFUSED_CALLS = frozenset(
    ["center", "expandtabs", "format", "format_map", "ljust", "rjust", "translate", "zfill"]
)
_REFUSED_FILTERS = ("center", "pprint", "random", "urlize", "wordwrap", "xmlattr")


class ChatRefusedError(Exception):
    """A conversation rejected by its template; rejections are counted by ``reason``."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Sandbox:
    """A compiled template.

    Args:
        source: the template, Jinja.
        today: the date formatted by ``strftime_now``; None: the current date.

    Raises:
        DataError: the template is invalid or too large.
    """

    def __init__(self, source: str, today: date | None = None) -> None:
        self._environment = environment = _Environment(today)
        if len(source) > LARGEST:
            raise DataError(
                f"the chat template has {len(source):,} characters; {LARGEST:,} are allowed",
                where="the chat template",
                fix="use another template",
            )
        try:
            tree = _Counting().visit(environment.parse(source))
            tree.set_environment(environment)
            code = environment.compile(tree)
            made = environment.template_class.from_code(
                environment, code, dict(environment.globals)
            )
        except SecurityError as error:
            raise _refused(error) from error
        except (TemplateError, RecursionError, SyntaxError, MemoryError) as error:
            line = getattr(error, "lineno", None)
            raise DataError(
                f"the chat template cannot be read: {_words(error)}",
                where=f"the chat template, line {line}" if line else "the chat template",
                fix="give a Jinja template, as chat_template in a tokenizer_config.json is",
            ) from error
        self._template = made

    def render(self, variables: Mapping[str, Any]) -> str:
        """Render a conversation.

        Args:
            variables: JSON: ``messages``, ``tools``, ``add_generation_prompt`` and others.

        Raises:
            ChatRefusedError: the template raised an error, explicitly or from missing data.
            DataError: a forbidden operation, or the budget is exceeded.
        """
        self._environment.budget = Budget()
        try:
            return "".join(self._template.generate(**variables))
        except SecurityError as error:
            raise _refused(error) from error
        except (RecursionError, MemoryError) as error:
            raise _refused(error) from error
        except TemplateError as error:
            raise ChatRefusedError(f"the template says: {_words(error)}") from error
        except Exception as error:  # any error of a template's expression on this chat
            raise ChatRefusedError(f"the template fails: {_words(error)}") from error


class Budget:
    """The remaining compute budget of a template for one conversation."""

    def __init__(self) -> None:
        self.steps, self.characters = STEPS, CHARACTERS

    def step(self, count: int = 1) -> None:
        """Charge ``count`` steps.

        Raises:
            SecurityError: the budget is exhausted.
        """
        self.steps -= count
        if self.steps < 0:
            raise SecurityError(f"it makes more than {STEPS:,} steps for one conversation")

    def write(self, count: int) -> None:
        """Charge ``count`` characters, or items of a list.

        Raises:
            SecurityError: the budget is exhausted.
        """
        self.characters -= count
        if self.characters < 0:
            raise SecurityError(f"it makes more than {CHARACTERS:,} characters of one conversation")

    def took(self, made: Any) -> Any:
        """Charge the size of a created value, and return it."""
        if isinstance(made, str | list | tuple | dict):
            self.write(len(made))
        return made


class _Generation(Extension):
    """The block that marks answers for Transformers; here its content is rendered, the mark ignored."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Counting(NodeTransformer):
    """A transformer that wraps loops, concatenations, comparisons and slices in the budget's filters."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise SecurityError("it has a recursive loop")
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_each")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_joined")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _filtered(node.expr, "_read")
        for one in node.ops:
            one.expr = _filtered(one.expr, "_read")
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "_read") if isinstance(node.arg, nodes.Slice) else node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)  # so that it passes `finalize`


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Namespace(Namespace):
    """A namespace that refuses names with a leading underscore, like that of Transformers."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may set `self`
        own, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(own, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"it sets {name!r} in a namespace")


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, today: date | None) -> None:
        @pass_context
        def finalize(context: Any, value: Any) -> str:
            text = str(value)
            self.budget.write(len(text))
            return text

        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=finalize,
            optimized=False,  # no constant folding: compilation runs nothing
            extensions=[_Generation, loopcontrols],
        )
        self.budget = Budget()
        for name in _REFUSED_FILTERS:
            del self.filters[name]
        more = {"tojson": _tojson, "join": self._join, "replace": self._replace}
        more |= {"format": self._format}
        self.filters = {
            name: self._bounded(name, function) for name, function in (self.filters | more).items()
        }
        self.filters |= {"_each": self._each, "_joined": self._joined, "_read": self._read}
        self.tests = {name: self._tested(function) for name, function in self.tests.items()}
        self.globals = {
            name: self.globals[name] for name in ("range", "dict", "cycler", "joiner")
        } | {
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": lambda format: (today or date.today()).strftime(format[:_LONGEST]),
        }

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.budget.step()
        name, text = getattr(__obj, "__name__", ""), getattr(__obj, "__self__", None)
        if isinstance(text, str | list | tuple):
            __self._read(text)
        if name in _REFUSED_CALLS:
            raise SecurityError(f"it calls {name}, which no chat template needs")
        if isinstance(text, str) and name in ("replace", "join"):
            own = {
                key: one for key, one in kwargs.items() if not key.startswith("_")
            }  # not jinja2's
            return (
                __self._replace(text, *args, **own)
                if name == "replace"
                else __self._join(*args, text)
            )
        return __self.budget.took(super().call(__context, __obj, *args, **kwargs))

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        raise SecurityError(f"it reads {attribute!r} of {type(obj).__name__}, which is unsafe")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sized = next((one for one in (left, right) if isinstance(one, str | list | tuple)), None)
        if operator == "**":
            raise SecurityError("it raises to a power, which no chat template needs")
        if operator == "*" and sized is None:
            for one in (left, right):
                if isinstance(one, int) and one.bit_length() > 512:
                    raise SecurityError("it multiplies large numbers")
        if operator == "*" and sized is not None:
            times = right if sized is left else left
            self.budget.write(len(sized) * max(times, 0) if isinstance(times, int) else 0)
        if operator == "%" and isinstance(left, str):
            return self._format(left, *(right if isinstance(right, tuple) else (right,)))
        return self.budget.took(super().call_binop(context, operator, left, right))

    def _each(self, items: Iterable[Any]) -> list[Any]:
        found = list(islice(items, self.budget.steps + 1))
        self.budget.step(len(found))
        return found

    def _gone_through(self, value: Any) -> Any:
        """Charge steps for the items that a filter reads; those of an iterator as it is consumed."""
        return self._counted(value) if isinstance(value, Iterator) else self._read(value)

    def _read(self, value: Any) -> Any:
        """Charge steps for a value that is compared, searched or copied whole, and return it."""
        if isinstance(value, Sized):
            self.budget.step(len(value) // (_TEXT if isinstance(value, str) else _ITEMS))
        return value

    def _tested(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a Jinja test: charge the size of its arguments."""

        @functools.wraps(function)
        def tested(*args: Any, **kwargs: Any) -> Any:
            return function(*map(self._read, args), **kwargs)

        return tested

    def _counted(self, items: Iterator[Any]) -> Iterator[Any]:
        for number, item in enumerate(items):
            self.budget.step(number % _ITEMS == 0)
            yield item

    def _joined(self, parts: Iterable[Any]) -> str:
        return self._join(parts, "")

    def _join(self, parts: Iterable[Any], between: Any = "", attribute: str | None = None) -> str:
        if attribute is not None:
            parts = (self.getitem(part, attribute) for part in parts)
        between, texts = str(between), []
        for part in parts:
            texts.append(str(part))
            self.budget.write(len(texts[-1]) + len(between))
        return between.join(texts)

    def _replace(self, text: Any, old: str, new: str, count: int = -1) -> str:
        text, old, new = str(text), str(old), str(new)
        times = text.count(old) if count is None or count < 0 else min(text.count(old), count)
        self.budget.write(len(text) + times * len(new))
        return text.replace(old, new, -1 if count is None else count)

    def _format(self, text: Any, *args: Any, **kwargs: Any) -> str:
        if _WIDE.search(str(text)):
            raise SecurityError("it formats a field of any width")
        return self.budget.took(str(text) % (kwargs or args))

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter: charge its work to the budget, and refuse large numbers."""
        first = 2 if getattr(function, "jinja_pass_arg", None) is not None else 1
        largest = _WIDEST if name in ("indent", "tojson") else _LONGEST

        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self.budget.step()
            if name not in _CHEAP:
                args = (*args[: first - 1], *map(self._gone_through, args[first - 1 :]))
            for one in (*args[first:], *kwargs.values()):
                if isinstance(one, int | float) and abs(one) > largest:
                    raise SecurityError(f"it gives {name} the number {one:.6g}")
                texts = one if isinstance(one, tuple | list) else [one]
                if name in ("indent", "tojson") and sum(len(str(t)) for t in texts) > _WIDEST:
                    raise SecurityError(f"it gives {name} a text of any length")
            return self.budget.took(function(*args, **kwargs))

        return bounded


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _words(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200] or type(error).__name__


def _refused(error: BaseException) -> DataError:
    return DataError(
        f"the chat template is refused: {_words(error)}",
        where="the chat template",
        fix="use a template that you trust, or the built-in ones: chatml, plain",
    )
