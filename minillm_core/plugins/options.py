"""The options of a plugin: declared by its class, validated by the same rules as settings."""

from __future__ import annotations

import json
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import Field, ValidationError
from pydantic.fields import FieldInfo

from minillm_core.config.values import NONE, Words, describe, limits, show
from minillm_core.errors import PluginError
from minillm_core.plugins.layers import Layers
from minillm_core.text import did_you_mean, plain

if TYPE_CHECKING:
    from minillm_core.plugins.plugin import Plugin

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
    again: bool = False,
    search: Sequence[Any] = (),
) -> Any:
    """Declare an option of a plugin.

    ::

        width: int = option(12, ge=1, help="input features that the gate reads")

    Args:
        default: the value if none is given; without a default the option is required.
        help: description with the unit, for ``minillm plugins info``.
        ge: smallest value.
        gt: the value is larger than this.
        le: largest value.
        lt: the value is smaller than this.
        multiple_of: the value is a multiple of this.
        min_length: least number of characters or items.
        max_length: largest number of characters or items.
        pattern: regular expression that a string matches.
        again: a value other than the default must be typed again to resume a run; it is never
            taken from run.json alone, which may come from another person. For options that send
            data to other machines.
        search: values that ``minillm search`` may try, numbers in ascending order.
    """
    bounds = {"ge": ge, "gt": gt, "le": le, "lt": lt, "multiple_of": multiple_of}
    bounds |= {"min_length": min_length, "max_length": max_length, "pattern": pattern}
    given: dict[str, Any] = {key: bound for key, bound in bounds.items() if bound is not None}
    extra = {"again": again, "search": [*search]} if again or search else None
    given |= {"json_schema_extra": extra} if extra else {}
    return Field(default, description=help, **given)


def named_again(plugin: Plugin) -> list[str]:
    """Return the options with ``again`` whose values are not the defaults."""
    found = []
    for name, field in type(plugin).__pydantic_fields__.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get("again"):
            default = field.get_default(call_default_factory=True)
            found += [name] if getattr(plugin, name) != default else []
    return found


def validated(cls: type[_P], name: str, values: Mapping[str, Any]) -> _P:
    """Return the plugin ``name`` with the given option values, strictly typed.

    An integer is not converted to a string, nor 1 to true: a value of the wrong type is an error. TOML
    has no None, so "none" is written if an option accepts it.

    Raises:
        PluginError: an option is unknown, missing or ill-typed.
    """
    fields = cls.__pydantic_fields__
    for key in values:
        if key not in fields:
            raise _unknown(name, key, tuple(fields))
    try:
        document = json.dumps(
            {key: _typed(fields[key], value) for key, value in values.items()},
            default=lambda value: value.data() if isinstance(value, Layers) else str(value),
        )
        return cls.model_validate_json(document, strict=True)
    except ValidationError as error:
        raise _refusal(cls, name, values, error) from None


def describe_option(name: str, field: FieldInfo) -> dict[str, Any]:
    """Return one option as a JSON object: name, type in words, default, help."""
    described = {"name": name, "type": expected(field), "required": field.is_required()}
    if not field.is_required():
        described["default"] = _json(field.get_default(call_default_factory=True))
    return described | {"help": plain(field.description or "")}


def expected(field: FieldInfo) -> str:
    """Describe the values that an option accepts: "an integer >= 1"."""
    return describe(field, _WORDS)


def _typed(field: FieldInfo, value: Any) -> Any:
    """Convert the word ``none`` to None, if the option accepts None."""
    return None if value == NONE and type(None) in typing.get_args(field.annotation) else value


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


def _items(parts: Sequence[str], any_number: bool) -> str:
    if any_number:
        return f"a list, each item {parts[0]}"
    each = f", each {parts[0]}" if len({*parts}) == 1 else f": {', '.join(parts)}"
    return f"a list of {len(parts)}{each}"


def _bounded(kind: str, limits: Mapping[str, Any]) -> str:
    bounds = ", ".join(_BOUNDS[name].format(value) for name, value in limits.items())
    return f"{kind}{';' if kind.startswith('a list') else ''} {bounds}" if bounds else kind


_WORDS = Words(
    kinds={
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "a string",
        Layers: 'layers: "all", "every:2" or indices such as [0, -1]',
        type(None): NONE,
    },
    choices=lambda values: " or ".join(json.dumps(value) for value in values),
    items=_items,
    bounded=_bounded,
)


def _unknown(plugin: str, key: str, known: tuple[str, ...]) -> PluginError:
    fix = f"known: {', '.join(known)}" if known else "leave it out: the plugin has no options"
    fix = did_you_mean(key, known, f"{plugin}.") + fix
    what, where = f"plugin '{plugin}' has no option '{plain(key)}'", f"{plugin}.{plain(key)}"
    return PluginError(what, where=where, fix=fix)


def _refusal(
    cls: type[Plugin], plugin: str, values: Mapping[str, Any], error: ValidationError
) -> PluginError:
    first = error.errors(include_url=False)[0]
    key = str(first["loc"][0]) if first["loc"] else ""
    reason = plain(first["msg"].removeprefix("Value error, "))
    field = cls.__pydantic_fields__.get(key)
    if field is None:  # a validator of the whole class
        what = f"plugin '{plugin}' does not take these options together: {reason}"
        where = ", ".join(f"{plugin}.{k}={show(_json(v))}" for k, v in values.items())
        return PluginError(
            what, where=where, fix=f"minillm plugins info {plugin} shows its options"
        )
    where, takes, given = f"{plugin}.{key}", expected(field), values.get(key)
    what, fix = f"option '{key}' of plugin '{plugin}' is", f"type {where}={_example(field, given)}"
    if first["type"] == "missing" and len(first["loc"]) == 1:
        what = f"{what} required: {takes}"
    elif key not in values:
        what = f"the default of option '{key}' of plugin '{plugin}' is not valid: {reason}"
        fix = f"type {where}=VALUE ({takes}), and tell the plugin's authors"
    else:
        if first["type"] in ("value_error", "assertion_error"):  # a validator's message
            takes += f" ({reason})"
        what = f"{what} {show(_json(given))}; it takes {takes}"
    return PluginError(what, where=where, fix=fix)


def _example(field: FieldInfo, given: Any) -> str:
    """Return an example value as typed on the command line."""
    if field.annotation is str and not isinstance(given, (type(None), str, dict, list)):
        return f"'\"{plain(str(given))}\"'"  # a number that should be a string needs TOML's quotes
    if not field.is_required():
        default = field.get_default(call_default_factory=True)
        return f"{NONE if default is None else _shell(_json(default))} (its default)"
    lowest = limits(field.metadata).get("ge", 1)
    samples = {int: lowest, float: lowest, bool: True, str: "text", Layers: "all"}
    if typing.get_origin(field.annotation) is Literal:
        return _shell(typing.get_args(field.annotation)[0])
    return _shell(samples[field.annotation]) if field.annotation in samples else "VALUE"


def _shell(value: Any) -> str:
    """Return a value as typed in a shell: a bare word, or quoted TOML if a shell would split it."""
    text = value if isinstance(value, str) else show(value)
    return f"'{text}'" if set(text) & set(' []{}"*?$|<>&;()') else text


def _json(value: Any) -> Any:
    if isinstance(value, Layers):
        return value.data()
    return list(value) if isinstance(value, tuple) else value
