"""The options of a plugin: how a class declares them, and how given values are checked and typed."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import annotated_types
from pydantic import Field, ValidationError
from pydantic.fields import FieldInfo

from minillm_core.errors import PluginError
from minillm_core.plugins.layers import Layers
from minillm_core.text import nearest, plain

if TYPE_CHECKING:
    from minillm_core.plugins.plugin import Plugin

__all__ = ["describe_option", "expected", "option", "validated"]

_P = TypeVar("_P", bound="Plugin")


def option(
    default: Any = ...,
    *,
    help: str,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    multiple_of: float | None = None,
    min_length: int | None = None,
    max_length: int | None = None,
    pattern: str | None = None,
) -> Any:
    """Declare an option of a plugin.

    ::

        width: int = option(12, ge=1, help="input features that the gate reads")

    Args:
        default: its value where none is given; without one the option is required.
        help: what it is, with its unit, for ``minillm plugins info``.
        ge: smallest value.
        gt: the value is larger than this.
        le: largest value.
        lt: the value is smaller than this.
        multiple_of: the value is a multiple of this.
        min_length: least number of characters or items.
        max_length: largest number of characters or items.
        pattern: regular expression that a string matches.
    """
    bounds = {"ge": ge, "gt": gt, "le": le, "lt": lt, "multiple_of": multiple_of}
    bounds |= {"min_length": min_length, "max_length": max_length, "pattern": pattern}
    given: dict[str, Any] = {key: bound for key, bound in bounds.items() if bound is not None}
    return Field(default, description=help, **given)


def validated(cls: type[_P], name: str, values: Mapping[str, Any]) -> _P:
    """Make the plugin ``name`` from the values that were given for its options, strictly typed.

    A TOML integer is not taken for a string, nor 1 for true: a value of the wrong type is a slip. TOML
    has no word for None, so that "none" is what is written where an option takes it.

    Raises:
        PluginError: an option is unknown, missing or ill-typed.
    """
    fields = cls.__pydantic_fields__
    for key in values:
        if key not in fields:
            raise _unknown(name, key, tuple(fields))
    try:
        document = json.dumps(
            {key: _read(fields[key].annotation, value) for key, value in values.items()},
            default=_not_json,
        )
        return cls.model_validate_json(document, strict=True)
    except ValidationError as error:
        raise _refusal(cls, name, values, error) from None


def describe_option(name: str, field: FieldInfo) -> dict[str, Any]:
    """One option as a JSON object: name, type in words, default, help."""
    described = {"name": name, "type": expected(field), "required": field.is_required()}
    if not field.is_required():
        described["default"] = _json(field.get_default(call_default_factory=True))
    return described | {"help": plain(field.description or "")}


def expected(field: FieldInfo) -> str:
    """What an option takes, in words: "an integer >= 1"."""
    return _bounded(field.annotation, field.metadata)


def _read(annotation: Any, value: Any) -> Any:
    return None if value == NONE and type(None) in typing.get_args(annotation) else value


def _bounded(annotation: Any, metadata: Sequence[Any]) -> str:
    words = _words(annotation)
    bounds = [text for item in metadata for text in _bounds(item)]
    if not bounds:
        return words
    return f"{words}{';' if words.startswith('a list') else ''} {', '.join(bounds)}"


def _bounds(item: Any) -> list[str]:
    if isinstance(item, annotated_types.GroupedMetadata | FieldInfo):
        parts = item.metadata if isinstance(item, FieldInfo) else item
        return [text for part in parts for text in _bounds(part)]
    found = ((text, getattr(item, key, None)) for key, text in _BOUNDS.items())
    return [text.format(value) for text, value in found if value is not None]


_BOUNDS = {
    "ge": ">= {}",
    "gt": "> {}",
    "le": "<= {}",
    "lt": "< {}",
    "multiple_of": "a multiple of {}",
    "min_length": "at least {} long",
    "max_length": "at most {} long",
    "pattern": "matching {}",
}

NONE = "none"
"""How None is typed."""

_WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    Layers: 'layers: "all", "every:2" or indices such as [0, -1]',
    type(None): NONE,
}


def _words(annotation: Any) -> str:
    if annotation in _WORDS:
        return _WORDS[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " or ".join(json.dumps(choice) for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(part) for part in arguments)
    if origin is typing.Annotated:
        return _bounded(arguments[0], arguments[1:])
    if origin is dict and arguments:
        return f"a table of {_words(arguments[1])} by {_words(arguments[0])}"
    if origin in (tuple, list) and arguments:
        if origin is list or arguments[-1] is Ellipsis:
            return f"a list, each item {_words(arguments[0])}"
        items = [_words(part) for part in arguments]
        told = f", each {items[0]}" if len({*items}) == 1 else f": {', '.join(items)}"
        return f"a list of {len(items)}{told}"
    return getattr(annotation, "__name__", str(annotation))


def _unknown(plugin: str, key: str, known: tuple[str, ...]) -> PluginError:
    close = nearest(key, known)
    if not known:
        fix = "leave it out: the plugin has no options"
    elif close:
        fix = f"did you mean {plugin}.{close}? known: {', '.join(known)}"
    else:
        fix = f"known: {', '.join(known)}"
    return PluginError(
        f"plugin '{plugin}' has no option '{plain(key)}'", where=f"{plugin}.{plain(key)}", fix=fix
    )


def _refusal(
    cls: type[Plugin], plugin: str, values: Mapping[str, Any], error: ValidationError
) -> PluginError:
    first = error.errors(include_url=False)[0]
    key = str(first["loc"][0]) if first["loc"] else ""
    reason = plain(first["msg"].removeprefix("Value error, "))
    field = cls.__pydantic_fields__.get(key)
    if field is None:  # a validator of the whole class
        return PluginError(
            f"plugin '{plugin}' does not take these options together: {reason}",
            where=", ".join(f"{plugin}.{k}={_toml(v)}" for k, v in values.items()),
            fix=f"minillm plugins info {plugin} shows its options",
        )
    where, takes = f"{plugin}.{key}", expected(field)
    if first["type"] == "missing" and len(first["loc"]) == 1:
        return PluginError(
            f"option '{key}' of plugin '{plugin}' is required: {takes}",
            where=where,
            fix=f"type {where}={_example(field, None)}",
        )
    if key not in values:
        return PluginError(
            f"the default of option '{key}' of plugin '{plugin}' is not valid: {reason}",
            where=where,
            fix=f"type {where}=VALUE ({takes}), and tell the plugin's authors",
        )
    given = values[key]
    if first["type"] in ("value_error", "assertion_error"):  # the author's or a type's own words
        takes += f" ({reason})"
    return PluginError(
        f"option '{key}' of plugin '{plugin}' is {_toml(given)}; it takes {takes}",
        where=where,
        fix=f"type {where}={_example(field, given)}",
    )


def _example(field: FieldInfo, given: Any) -> str:
    """A value that may be typed on the command line."""
    if field.annotation is str and given is not None and not isinstance(given, (dict, list)):
        return f"'\"{plain(str(given))}\"'"  # a number that should be a string needs TOML's quotes
    if not field.is_required():
        default = field.get_default(call_default_factory=True)
        return f"{NONE if default is None else _shell(_json(default))} (its default)"
    lowest = next((m.ge for m in field.metadata if getattr(m, "ge", None) is not None), 1)
    samples = {int: lowest, float: lowest, bool: True, str: "text", Layers: "all"}
    if typing.get_origin(field.annotation) is Literal:
        return _shell(typing.get_args(field.annotation)[0])
    return _shell(samples[field.annotation]) if field.annotation in samples else "VALUE"


def _shell(value: Any) -> str:
    """A value as it is typed: a bare word, or TOML within quotes where a shell would split it."""
    text = value if isinstance(value, str) else _toml(value)
    return f"'{text}'" if set(text) & set(' []{}"*?$') else text


def _toml(value: Any) -> str:
    try:
        return plain(json.dumps(_json(value), ensure_ascii=False), limit=60)
    except (TypeError, ValueError):
        return plain(str(value), limit=60)


def _json(value: Any) -> Any:
    if isinstance(value, Layers):
        return value.data()
    return list(value) if isinstance(value, tuple) else value


def _not_json(value: Any) -> Any:
    """TOML knows dates, JSON does not: such a value arrives as a string."""
    return value.data() if isinstance(value, Layers) else str(value)
