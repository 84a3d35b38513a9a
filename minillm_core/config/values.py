"""Values of settings and of plugin options: parsed from text, shown and described by the same rules."""

from __future__ import annotations

import json
import math
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from typing import Any, Literal

from annotated_types import GroupedMetadata
from pydantic.fields import FieldInfo

from minillm_core.text import plain

NONE = "none"
"""The spelling of None."""
LIMITS = ("ge", "gt", "le", "lt", "multiple_of", "min_length", "max_length", "pattern")
"""The supported bounds of a value, by pydantic's names."""


def read_value(text: str) -> Any:
    """Parse the value of a ``key=value`` as TOML; return the text itself if it is not TOML.

    Dates stay text: no setting is a date, and a path may look like one.
    """
    try:
        document = tomllib.loads(f"value = {text}")
        (value,) = tomllib.loads(f"value = [{text}]")["value"]  # one value, and no comment after it
    except (ValueError, RecursionError):
        return text
    if (
        len(document) > 1
        or text.rstrip().endswith(",")
        or isinstance(value, date | datetime | time)
    ):
        return text
    return value


def show(value: Any, most: int = 60) -> str:
    """Return a value as typed in TOML, cut to one line of ``most`` characters."""
    if isinstance(value, bool):
        shown = str(value).lower()
    elif isinstance(value, list | tuple):
        shown = f"[{', '.join(show(item, most) for item in value)}]"
    elif isinstance(value, Mapping):
        given = {key: item for key, item in value.items() if item is not None}
        shown = f"{{{', '.join(f'{key} = {show(item, most)}' for key, item in given.items())}}}"
    elif isinstance(value, str):
        shown = plain(json.dumps(value, ensure_ascii=False))
    else:
        shown = plain(str(value))
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."


def is_number(value: Any) -> bool:
    """Return whether a value is a number and :func:`is_finite`; booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and is_finite(value)


def is_finite(value: Any) -> bool:
    """Return whether a value contains no NaN, no infinity and no integer of more than 64 bits."""
    if isinstance(value, list | tuple):
        return all(map(is_finite, value))
    if isinstance(value, Mapping):
        return all(map(is_finite, value.values()))
    if isinstance(value, int):
        return value.bit_length() < 64
    return not isinstance(value, float) or math.isfinite(value)


@dataclass(frozen=True)
class Words:
    """The words that describe types and bounds.

    Attributes:
        kinds: type -> its name; an empty name is left out of a union.
        choices: function that names the values of a Literal.
        items: function that names a list, from the names of its items and whether its length is free.
        bounded: function that adds bounds, by the names in :data:`LIMITS`, to the name of a type.
    """

    kinds: Mapping[Any, str]
    choices: Callable[[Sequence[Any]], str]
    items: Callable[[Sequence[str], bool], str]
    bounded: Callable[[str, Mapping[str, Any]], str]


def describe(field: FieldInfo, words: Words) -> str:
    """Describe the values that a setting or an option accepts."""
    return words.bounded(_kind(field.annotation, words), limits(field.metadata))


def limits(metadata: Iterable[Any]) -> dict[str, Any]:
    """Return the bounds of a field, by the names in :data:`LIMITS`, from pydantic's metadata."""
    found: dict[str, Any] = {}
    for item in metadata:
        if isinstance(item, GroupedMetadata | FieldInfo):
            found |= limits(item.metadata if isinstance(item, FieldInfo) else item)
        else:
            values = {key: getattr(item, key, None) for key in LIMITS}
            found |= {key: value for key, value in values.items() if value is not None}
    return found


def _kind(annotation: Any, words: Words) -> str:
    if annotation in words.kinds:
        return words.kinds[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return words.choices(arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(filter(None, (_kind(part, words) for part in arguments)))
    if origin is typing.Annotated:
        return words.bounded(_kind(arguments[0], words), limits(arguments[1:]))
    if origin is dict and arguments:
        return f"a table of {_kind(arguments[1], words)} by {_kind(arguments[0], words)}"
    if origin in (tuple, list) and arguments:
        parts = [_kind(part, words) for part in arguments if part is not Ellipsis]
        return words.items(parts, origin is list or Ellipsis in arguments)
    return getattr(annotation, "__name__", str(annotation))
