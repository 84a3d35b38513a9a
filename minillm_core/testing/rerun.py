"""The command that runs one check again, alone, as a shell takes it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minillm_core.config.values import read_value

if TYPE_CHECKING:
    from minillm_core.testing.subject import Subject

__all__ = ["PAIRS", "as_typed", "rerun"]

PAIRS = 5
"""Other plugins that one is paired with where nobody says how many."""


def rerun(subject: Subject, check: str) -> str:
    """``minillm plugins check``, with the plugin, options and backend of ``subject``."""
    words = [subject.spec]
    words += [f"{subject.name}.{key}={as_typed(value)}" for key, value in subject.options.items()]
    if len(subject.asked) == 1:
        words += ["--backend", *subject.asked]
    if subject.pairs != PAIRS:
        words += ["--pairs", "all" if subject.pairs is None else str(subject.pairs)]
    return shlex.join(["minillm", "plugins", "check", *words, "--only", check])


def as_typed(value: Any) -> str:
    """A value as it is typed behind ``key=``: read again, it is the same."""
    if isinstance(value, str) and value == value.strip() and read_value(value) == value:
        return value
    return _toml(value)


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's are TOML's
