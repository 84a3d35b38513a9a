"""Values: read from ``key=value``, checked against the schema, and described in plain words."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from datetime import date, datetime, time
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError

from minillm_core.config.origins import SECTIONS, Setting
from minillm_core.config.schema import Config
from minillm_core.errors import ConfigError

__all__ = ["check_option", "describe", "expected", "purpose", "read_value", "show", "validated"]


def read_value(text: str) -> Any:
    """The value of a ``key=value``: as TOML, or else the text itself.

    Dates stay text: no setting is one, and a path may look like one.
    """
    try:
        document = tomllib.loads(f"value = {text}")
        (value,) = tomllib.loads(f"value = [{text}]")["value"]  # one value, and no comment after it
    except (tomllib.TOMLDecodeError, ValueError):
        return text
    if (
        len(document) > 1
        or text.rstrip().endswith(",")
        or isinstance(value, date | datetime | time)
    ):
        return text
    return value


def show(value: Any) -> str:
    """A value as a person would type it in TOML, cut to one short line."""
    if isinstance(value, bool):
        shown = str(value).lower()
    elif isinstance(value, list | tuple):
        shown = f"[{', '.join(show(item) for item in value)}]"
    elif isinstance(value, Mapping):
        shown = f"{{{', '.join(f'{key} = {show(item)}' for key, item in value.items())}}}"
    else:
        shown = f'"{value}"' if isinstance(value, str) else str(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def describe(schema: Mapping[str, Any]) -> str:
    """What a JSON schema asks for, in plain words."""
    if "anyOf" in schema:
        return " or ".join(describe(part) for part in schema["anyOf"] if part.get("type") != "null")
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    kind = schema.get("type")
    if kind == "array":
        if "prefixItems" in schema:
            return f"a list of {len(schema['prefixItems'])} numbers"
        return "a text or a list of texts"
    words = {
        "integer": "a whole number",
        "number": "a number",
        "string": "a text",
        "boolean": "true or false",
    }
    return words.get(str(kind), "a value") + _bounds(schema)


def _bounds(schema: Mapping[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f" from {low:g} to {high:.10g}"
    if low is not None:
        return f" of at least {low:g}"
    above = schema.get("exclusiveMinimum")
    return f" above {above:g}" if above is not None else ""


def _schema(key: str) -> Mapping[str, Any]:
    section, _, name = key.rpartition(".")
    return _properties(SECTIONS[section] if section else Config)[name]


@cache
def _properties(model: type[BaseModel]) -> Mapping[str, Any]:
    return model.model_json_schema()["properties"]


def expected(key: str) -> str:
    """What ``key`` takes, in plain words."""
    return describe(_schema(key))


def purpose(key: str) -> str:
    """What ``key`` is for: its description in the schema, or nothing."""
    return _schema(key).get("description", "")


def validated(settings: Mapping[str, Setting], plugins: Mapping[str, Mapping[str, Any]]) -> Config:
    """The config that the settings make.

    Args:
        settings: dotted key of a section or the top level -> its setting; all keys are known.
        plugins: plugin -> its options as given.

    Raises:
        ConfigError: a value is of the wrong type or out of its range, or one is missing.
    """
    for key, setting in settings.items():
        if not _finite(setting.value):
            raise _wrong(key, setting)
    tree: dict[str, Any] = {name: {} for name in SECTIONS}
    for key, setting in settings.items():
        section, _, name = key.rpartition(".")
        (tree[section] if section else tree)[name] = _lists(key, setting.value)
    tree["plugins"] = {name: dict(options) for name, options in plugins.items()}
    try:
        return Config.model_validate(tree, strict=True)
    except ValidationError as error:
        key = next(_keys(error))
        if key in settings:
            raise _wrong(key, settings[key]) from None
        raise ConfigError(f"{key} has no value", fix=f"{key}=... ({purpose(key)})") from None


def check_option(key: str, setting: Setting) -> None:
    """Refuse what no plugin's option can be; its type is checked when the plugin is known.

    Raises:
        ConfigError: a key of more than two parts, or a number that JSON cannot hold.
    """
    plugin, _, option = key.partition(".")
    name, _, inner = option.partition(".")
    if inner:
        raise ConfigError(
            f"{key} has too many parts: a plugin's options are NAME.option",
            where=setting.where,
            fix=f"{plugin}.{name}={{{inner} = ...}}",
        )
    if not _finite(setting.value):
        raise ConfigError(
            f"{key} must be a finite number, not {show(setting.value)}", where=setting.where
        )


def _keys(error: ValidationError) -> Iterator[str]:
    for problem in error.errors(include_url=False):
        path = [str(part) for part in problem["loc"]]
        yield ".".join(path[:2] if path[0] in SECTIONS else path[:1])


def _wrong(key: str, setting: Setting) -> ConfigError:
    return ConfigError(
        f"{key} must be {expected(key)}, not {show(setting.value)}",
        where=setting.where,
        fix=f"{key}: {purpose(key)}" if purpose(key) else None,
    )


def _lists(key: str, value: Any) -> Any:
    """TOML's lists as the schema's tuples; one text where several may stand."""
    schema = _schema(key)
    if schema.get("type") != "array":
        return value
    if isinstance(value, str) and "prefixItems" not in schema:
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _finite(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_finite, value))
    if isinstance(value, Mapping):
        return all(map(_finite, value.values()))
    return not isinstance(value, float) or math.isfinite(value)
