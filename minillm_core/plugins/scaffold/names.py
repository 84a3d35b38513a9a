"""What a new plugin is called, everywhere that it has a name."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass

from minillm_core.errors import PluginError
from minillm_core.plugins.discover import bad_name, find_module, installed_plugins
from minillm_core.text import plain

__all__ = ["Names", "checked"]

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


@dataclass(frozen=True)
class Names:
    """The names of one plugin, made of the one that was given."""

    given: str  # head-gate or head_gate

    @property
    def plugin(self) -> str:
        """What ``--plugins`` takes, and the module's name: head_gate."""
        return self.given.replace("-", "_")

    @property
    def package(self) -> str:
        """The import package: minillm_head_gate."""
        return f"minillm_{self.plugin}"

    @property
    def distribution(self) -> str:
        """What pip calls it, and the folder's name: minillm-head-gate."""
        return f"minillm-{self.given}"

    @property
    def class_name(self) -> str:
        """HeadGate."""
        return "".join(part.capitalize() for part in self.plugin.split("_"))


def checked(given: str) -> Names:
    """The names of a plugin that may be called so.

    Raises:
        PluginError: nothing can be called that, or something is already.
    """
    names = Names(given)
    reason = bad_name(names.plugin)
    if reason is None and not _NAME.fullmatch(names.plugin):
        reason = "a name is small letters a-z, digits and _ between them, a letter first"
    if reason is None and keyword.iskeyword(names.plugin):
        reason = f"'{names.plugin}' is a word of Python's"
    if reason is None and names.plugin == "reference":
        reason = "reference.py is the file that the plugin is compared with"
    if reason is not None:
        raise PluginError(
            f"a new plugin cannot be called '{plain(given)}': {reason}",
            where=f"minillm plugins new {plain(given)}",
            fix="such as: minillm plugins new head_gate",
        )
    _refuse_taken(names)
    return names


def _refuse_taken(names: Names) -> None:
    for entry in installed_plugins(only=names.plugin):
        raise PluginError(
            f"a plugin '{names.plugin}' is installed already, by {entry.offered_by}",
            where=entry.file or entry.value,
            fix=f"choose another name; or pip uninstall {entry.distribution}",
        )
    if (spec := find_module(names.package)) is not None:
        raise PluginError(
            f"there is a package {names.package} already: Python would find either of the two",
            where=spec.origin or names.package,
            fix="choose another name",
        )
