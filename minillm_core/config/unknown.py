"""Keys that do not exist, and what was probably meant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from minillm_core.config.origins import SECTIONS, TOP, Setting
from minillm_core.errors import ConfigError
from minillm_core.text import nearest

__all__ = ["is_known", "known_keys", "refusal"]


def known_keys() -> list[str]:
    """Every key of the config, those of plugins apart."""
    inside = [f"{name}.{key}" for name, model in SECTIONS.items() for key in model.model_fields]
    return [*TOP, *inside]


def is_known(key: str) -> bool:
    """Whether ``key`` is a setting of the config."""
    section, _, name = key.partition(".")
    return name in SECTIONS[section].model_fields if section in SECTIONS else key in TOP


def refusal(key: str, setting: Setting, plugins: Iterable[str]) -> ConfigError:
    """Why ``key`` is refused: the nearest name, or the plugin that this run does not name.

    Args:
        key: a dotted key that :func:`is_known` does not know.
        setting: what was given for it.
        plugins: the plugins of the run.
    """
    section, _, name = key.partition(".")
    if section in SECTIONS:
        what, fix = _in_section(section, name)
    elif section in plugins:
        what, fix = f"'{key}' is a plugin: its options are {key}.option", f"{key}.option=value"
    elif name or isinstance(setting.value, Mapping):
        what, fix = _in_stranger(section, name, plugins)
    else:
        what = f"there is no setting '{key}'"
        fix = _anywhere(key) or f"tables: {', '.join(SECTIONS)}; others: {', '.join(TOP)}"
    return ConfigError(what, where=setting.where, fix=fix)


def _in_section(section: str, name: str) -> tuple[str, str]:
    names = SECTIONS[section].model_fields
    if not name:
        first = ", ".join(f"{section}.{field}" for field in list(names)[:4])
        return f"'{section}' is a table of settings, not one setting", f"{first}, ..."
    meant = nearest(name, names)
    fix = f"{section}.{meant}" if meant else _anywhere(name)
    return f"there is no setting '{section}.{name}'", fix or f"{section} has: {', '.join(names)}"


def _in_stranger(section: str, name: str, plugins: Iterable[str]) -> tuple[str, str]:
    """A table that is no section and no plugin of this run."""
    add = f"if '{section}' is a plugin, add --plugins {section}"
    meant = nearest(section, [*SECTIONS, *plugins])
    if meant and name:
        close = nearest(name, SECTIONS[meant].model_fields) if meant in SECTIONS else name
        meant = f"{meant}.{close or name}"
    return (
        f"'{section}' is neither a table of settings nor a plugin of this run",
        f"{meant}; or, {add}" if meant else add,
    )


def _anywhere(name: str) -> str | None:
    """The full keys of the settings called ``name`` or nearly so, whatever their table."""
    by_name: dict[str, list[str]] = {}
    for key in known_keys():
        by_name.setdefault(key.rpartition(".")[2], []).append(key)
    meant = nearest(name, by_name)
    return " or ".join(by_name[meant]) if meant else None
