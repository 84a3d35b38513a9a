"""References: a class or function named as ``module:qualname``, so that a plan is data.

Hooks pass references and JSON arguments, never closures: a plan can then be hashed, printed,
diffed and rebuilt.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from minillm_core.errors import PluginCodeError


class Function(NamedTuple):
    """A function that a plugin put into a slot, as data."""

    owner: str
    reference: str  # module:qualname
    arguments: tuple[tuple[str, Any], ...] = ()

    def call(self, *given: Any) -> Any:
        """Call the function with the slot's arguments and its own."""
        return resolve(self.reference)(*given, **dict(self.arguments))

    def broken(self, what: str, fix: str, did: str = "broke the rows in") -> PluginCodeError:
        """Return the error for a result that cannot be used."""
        name = self.reference.rpartition(":")[2]
        return PluginCodeError(self.owner, name, did=did, where=what, fix=fix)


def reference_of(target: Any) -> str:
    """Return ``module:qualname`` of a class or function.

    Raises:
        ValueError: a lambda, a local function, an instance or its method: it cannot be resolved
            from its name.
    """
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if not module or not name or "<" in name or not _found_again(target, f"{module}:{name}"):
        fix = "hand in a class or function of a module (no lambda, no closure, no instance)"
        raise ValueError(f"{target!r} cannot be referred to: {fix}")
    return f"{module}:{name}"


def _found_again(target: Any, reference: str) -> bool:
    try:
        return resolve(reference) == target
    except (ImportError, AttributeError):
        return False


def resolve(reference: str) -> Any:
    """Return the object that ``reference`` names; import its module if necessary."""
    module, _, name = reference.partition(":")
    target: Any = importlib.import_module(module)
    for part in name.split("."):
        target = getattr(target, part)
    return target


def place_of(function: Any) -> str | None:
    """Return the file and line of a function or method; None if it is not written in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code and f"{code.co_filename}:{code.co_firstlineno}"


def takes(method: Callable[..., Any], names: Iterable[str]) -> bool:
    """Return whether a method can be called with arguments of these names alone."""
    try:
        inspect.signature(method).bind(None, **dict.fromkeys(names))
    except TypeError:
        return False
    return True


def json_arguments(arguments: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Convert arguments to sorted pairs, and lists to tuples, so that they can be hashed.

    Raises:
        ValueError: a value is not JSON, or is a mapping: pass its items as separate arguments.
    """
    for key, value in arguments.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"argument {key}={value!r} is not JSON: a plan holds data") from error
    return tuple(sorted((key, _hashable(key, value)) for key, value in arguments.items()))


def _hashable(key: str, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(key, item) for item in value)
    if isinstance(value, Mapping):
        raise ValueError(f"argument {key}: {value!r} is a mapping: give each item a name")
    return value
