"""Keys that do not exist, and what was probably meant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from minillm_core.config.origins import SECTIONS, TOP, Setting
from minillm_core.errors import ConfigError
from minillm_core.text import nearest

__all__ = ["is_known", "known_keys", "refusal"]

SLIP = 2
"""Letters more or fewer that are a slip of the finger: ``save_steps`` did not mean ``steps``."""

ELSEWHERE = {
    "save": "checkpoint.every",
    "checkpoint": "checkpoint.every",
    "eval": "eval.every",
    "val": "eval.every",
    "logging": "log.every",
    "batch": "train.rows",
}
"""A word of other programs' settings -> what it is here."""


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
        listed = f"tables: {', '.join(SECTIONS)}; others: {', '.join(TOP)}"
        fix = _anywhere(key) or _of_a_word(key, listed)
    return ConfigError(what, where=setting.where, fix=fix)


def _in_section(section: str, name: str) -> tuple[str, str]:
    names = SECTIONS[section].model_fields
    listed = f"{section} has: {', '.join(names)}"
    if not name:
        inside = ", ".join(f"{section}.{field}" for field in names)
        return f"'{section}' is a table of settings, not one setting", inside
    meant = _near(name, names)
    fix = f"{section}.{meant}" if meant else _anywhere(name) or _of_a_word(name, listed)
    return f"there is no setting '{section}.{name}'", fix


def _in_stranger(section: str, name: str, plugins: Iterable[str]) -> tuple[str, str]:
    """A table that is no section and no plugin of this run."""
    add = f"if '{section}' is a plugin, add --plugins {section}"
    tables = f"the tables are {', '.join(SECTIONS)}"
    meant = nearest(section, [*SECTIONS, *plugins])
    if meant and name:
        close = nearest(name, SECTIONS[meant].model_fields) if meant in SECTIONS else name
        meant = f"{meant}.{close or name}"
    return (
        f"'{section}' is neither a table of settings nor a plugin of this run",
        f"{meant}; or, {add}" if meant else f"{tables}; {add}",
    )


def _near(name: str, names: Iterable[str]) -> str | None:
    """The one that was meant, if it was a slip of the finger."""
    return nearest(name, [one for one in names if abs(len(one) - len(name)) <= SLIP])


def _of_a_word(name: str, listed: str) -> str:
    """What is there, after the setting that a word of the name points at."""
    hints = [ELSEWHERE[word] for word in name.split("_") if word in ELSEWHERE]
    return "; ".join([*dict.fromkeys(hints), listed])


def _anywhere(name: str) -> str | None:
    """The full keys of the settings called ``name`` or nearly so, whatever their table."""
    by_name: dict[str, list[str]] = {}
    for key in known_keys():
        by_name.setdefault(key.rpartition(".")[2], []).append(key)
    meant = _near(name, by_name)
    return " or ".join(by_name[meant]) if meant else None
