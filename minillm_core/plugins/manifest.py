"""The facts that a plugin's class or a command's function declares, read with ``ast`` without importing it.

Standard library only: ``minillm plugins list`` must start fast and run no plugin's code.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeGuard

from minillm_core.text import plain

HOOK_API = 1
"""The version of the hook API; a change that can break a plugin increments it, with a CHANGELOG line."""

BACKENDS = ("torch", "mlx", "numpy")
RESERVED = frozenset(
    {"model", "train", "eval", "checkpoint", "data", "log", "mesh", "plugins", "core"}
)
"""Names of the tables of a run's settings, which no plugin may have."""


class ManifestError(ValueError):
    """A mistake in a class statement, in a few words; and the fix, if known."""

    def __init__(self, what: str, fix: str | None = None) -> None:
        super().__init__(f"{what}: {fix}" if fix else what)
        self.what, self.fix = what, fix


@dataclass(frozen=True)
class Manifest:
    """The keywords of ``class Name(Plugin, api=1, ...)``."""

    api: int
    backends: tuple[str, ...] = BACKENDS  # the backends that it runs on
    devices: tuple[str, ...] = ()  # kinds of device: "cpu", "cuda", "mps", "gpu"; empty: any
    capability: str = ""  # compute capability of NVIDIA GPUs: "==9.0", ">=8.9"; empty: any
    identity_at_init: bool = False  # the model's output is unchanged before the first step
    discrete: bool = False  # its output jumps at a choice (routing): rounding may decide it
    surrogate: bool = False  # it rounds and uses a surrogate gradient (straight-through)
    export: str | None = None  # the layout that the model fits with this plugin
    task: bool = False  # it provides the training data: --task may name it
    unweighted: bool = False  # its on_batch adds no weights of positions
    requires: tuple[str, ...] = ()  # pip requirements that its hooks import

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> Manifest:
        """Check the keywords and fill in the defaults.

        Raises:
            ManifestError: ``api`` is missing or of another version, a keyword is unknown or ill-typed.
        """
        if "api" not in keywords:
            raise ManifestError(f"states no hook API: write class Name(Plugin, api={HOOK_API})")
        if keywords["api"] != HOOK_API or type(keywords["api"]) is not int:
            api = keywords["api"]
            newer = "install a newer minillm" if type(api) is int and api > HOOK_API else None
            raise ManifestError(f"written for hook API {api!r}; this minillm has {HOOK_API}", newer)
        for key, value in keywords.items():
            if key not in _EXPECTED:
                raise ManifestError(f"unknown keyword '{key}'; known: {', '.join(_EXPECTED)}")
            expected, fits = _EXPECTED[key]
            if not fits(value):
                raise ManifestError(f"keyword {key}={value!r} should be {expected}")
        checked: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in keywords.items()}
        return cls(**checked)


def _some(fits: Callable[[Any], Any]) -> Callable[[Any], bool]:
    """Return a test for a non-empty tuple or list whose items all fit."""
    return lambda value: (
        isinstance(value, (tuple, list)) and len(value) > 0 and all(map(fits, value))
    )


_TOP_LEVEL = re.compile(rb"^[^\s)#]", re.MULTILINE)
_REQUIREMENT = re.compile(r"[A-Za-z0-9][\w.-]*(\[[\w, -]+\])?[\w\s<>=!~.,*+-]*")


def _is_requirement(value: Any) -> bool:
    """Return whether ``value`` has the form of a pip requirement; versions are compared before a run."""
    return isinstance(value, str) and _REQUIREMENT.fullmatch(value) is not None


_DEVICES = ("cpu", "cuda", "mps", "gpu")
_EXPECTED: dict[str, tuple[str, Any]] = {
    "api": (f"{HOOK_API}", lambda value: value == HOOK_API),
    "backends": (f"a tuple of some of {', '.join(BACKENDS)}", _some(BACKENDS.__contains__)),
    "devices": (f"a tuple of some of {', '.join(_DEVICES)}", _some(_DEVICES.__contains__)),
    "capability": ('like "==9.0" or ">=8.9"', lambda v: re.fullmatch(r"(==|>=)\d+\.\d+", str(v))),
    **dict.fromkeys(
        ("identity_at_init", "discrete", "surrogate", "task", "unweighted"),
        ("True or False", lambda value: isinstance(value, bool)),
    ),
    "export": (
        "the name of a layout, or None",
        lambda v: v is None or (isinstance(v, str) and v.isidentifier()),
    ),
    "requires": (
        'a tuple of requirements for pip, such as ("tensorboard>=2.16",)',
        _some(_is_requirement),
    ),
}
"""Keyword -> its expected value in words, and a test for it."""


@dataclass(frozen=True)
class ClassFacts:
    """The facts about a plugin's class that its source declares."""

    manifest: Manifest
    summary: str
    options: tuple[str, ...]


@cache  # keyed by the source text: a changed file is read again
def read_class(source: bytes, name: str) -> ClassFacts:
    """Read the class ``name``, defined at the top level of ``source``.

    Raises:
        SyntaxError: Python cannot parse the source.
        ManifestError: the class is missing, or its declarations cannot be read or used.
    """
    found = [node for node in _classes(source) if node.name == name]
    if not found:
        raise ManifestError(f"its module defines no class {name}")
    node = found[-1]
    return ClassFacts(
        manifest=Manifest.of(_keywords(node)),
        summary=summary(ast.get_docstring(node)),
        options=tuple(_options(node)),
    )


def plugin_classes(source: bytes) -> list[str]:
    """Return the classes of ``source`` that declare a hook API.

    Raises:
        SyntaxError: Python cannot parse the source.
    """
    return [
        node.name
        for node in _classes(source)
        if any(keyword.arg == "api" for keyword in node.keywords)
    ]


def doc_summary(source: bytes, name: str) -> str:
    """Return the summary of a command: the first line of its function's docstring.

    For a typer app: the first line of the callback's docstring, or the app's ``help``. Of a function only
    its own lines are parsed, since a help page reads every installed command; an import finds other errors.

    Raises:
        SyntaxError: Python cannot parse the source.
        ManifestError: ``source`` defines no such function or app at its top level.
    """
    _, found, own = (b"\n" + source).rpartition(b"\ndef %s(" % name.encode())
    if found:
        end = _TOP_LEVEL.search(own)
        with suppress(SyntaxError):  # a text of several lines may have cut the function short
            (node,) = _body(found.lstrip() + own[: end and end.start()])
            if isinstance(node, ast.FunctionDef) and (docstring := ast.get_docstring(node)):
                return summary(docstring)
    body = _body(source)
    for node in reversed(body):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return summary(ast.get_docstring(node))
        if isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets):
            functions = (one for one in body if isinstance(one, ast.FunctionDef))
            decorated = ((one, ast.unparse(by)) for one in functions for by in one.decorator_list)
            of_app = (one for one, by in decorated if by.startswith(f"{name}.callback("))
            callbacks = map(ast.get_docstring, of_app)
            keywords = node.value.keywords if isinstance(node.value, ast.Call) else []
            texts = (one.value for one in keywords if one.arg == "help")
            given = (one.value for one in texts if isinstance(one, ast.Constant))
            return summary(str(next(given, next(callbacks, None) or "")))
    raise ManifestError(f"its module defines no function or typer app {name}")


def _classes(source: bytes) -> list[ast.ClassDef]:
    return [node for node in _body(source) if isinstance(node, ast.ClassDef)]


def _body(source: bytes) -> list[ast.stmt]:
    """Parse the statements of a module.

    Raises:
        SyntaxError: Python cannot parse it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes such as "\d"
        try:
            return ast.parse(source).body
        except (ValueError, RecursionError, MemoryError) as error:  # null bytes; nested too deep
            raise SyntaxError(plain(str(error)) or type(error).__name__) from error


def summary(docstring: str | None) -> str:
    """Return the first line of a docstring."""
    return plain((docstring or "").strip().split("\n", 1)[0])


def _keywords(node: ast.ClassDef) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for keyword in node.keywords:
        try:
            values[keyword.arg or ""] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
            shown = f"keyword '{keyword.arg}'" if keyword.arg else "a ** keyword"
            raise ManifestError(
                f"{shown} is not a literal (line {keyword.value.lineno})"
            ) from error
    return values


def _options(node: ast.ClassDef) -> list[str]:
    for item in node.body:
        if isinstance(item, ast.Assign) and _is_option(item.value):
            name = ast.unparse(item.targets[0])
            raise ManifestError(
                f"option '{name}' states no type (line {item.lineno})",
                f"{name}: {_type_of(item.value)} = option(...)",
            )
    return [
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and not item.target.id.startswith("_")
        and "ClassVar" not in ast.unparse(item.annotation)
    ]


def _is_option(value: ast.expr) -> TypeGuard[ast.Call]:
    called = value.func if isinstance(value, ast.Call) else None
    return getattr(called, "id", getattr(called, "attr", None)) == "option"


def _type_of(option: ast.Call) -> str:
    """Return the type's name for a default that is a literal number, string or boolean."""
    default = option.args[0] if option.args else None
    kind = type(default.value) if isinstance(default, ast.Constant) else None
    return kind.__name__ if kind in (bool, int, float, str) else "TYPE"
