"""The installed plugins, from entry-point metadata and source alone: none of them is imported."""

from __future__ import annotations

import email.parser
import os
import re
import sys
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, EntryPoint, entry_points
from typing import Any

from minillm_core.plugins.manifest import RESERVED, Manifest, ManifestError, read_class
from minillm_core.text import plain

__all__ = [
    "GROUP",
    "PluginEntry",
    "bad_name",
    "find_module",
    "installed_names",
    "installed_plugins",
]

GROUP = "minillm.plugins"
_VALUE = re.compile(r"\s*([\w.]+)\s*:\s*(\w+)\s*")


@dataclass(frozen=True)
class PluginEntry:
    """One entry point of the group ``minillm.plugins``, and what could be read without importing."""

    name: str
    distribution: str
    version: str
    value: str  # "minillm_modded.paired_heads:PairedHeads"
    file: str | None = None  # the source that defines the class, as the system has it
    summary: str = ""
    manifest: Manifest | None = None
    options: tuple[str, ...] = ()
    broken: str | None = None  # why it cannot be used
    unparsable: bool = False  # broken because its source is no Python

    @property
    def module(self) -> str:
        """The module that the entry point names."""
        return self.value.partition(":")[0].strip()

    @property
    def class_name(self) -> str:
        """The class that the entry point names."""
        return self.value.partition(":")[2].strip()

    @property
    def offered_by(self) -> str:
        """Distribution and version."""
        return f"{self.distribution} {self.version}"

    def data(self) -> dict[str, Any]:
        """The entry as a JSON object."""
        facts = asdict(self)
        manifest = facts.pop("manifest") or {}
        del facts["unparsable"]
        return facts | {"state": "broken" if self.broken else "ok", **manifest}


def installed_names() -> set[str]:
    """The names alone, broken ones included."""
    return {plain(name) for name in entry_points(group=GROUP).names}


def installed_plugins(only: str | Collection[str] | None = None) -> list[PluginEntry]:
    """Every installed plugin, sorted by name, the broken ones with their reason.

    Asked of several names at once, it looks through what is installed once.

    Args:
        only: read those of this name, or of these names, and leave the others alone.
    """
    names = (only,) if isinstance(only, str) else only
    points = entry_points(group=GROUP)
    entries = [_read(point) for point in points if names is None or plain(point.name) in names]
    times = Counter(entry.name for entry in entries)
    entries.sort(key=lambda entry: (entry.name, entry.distribution, entry.value))
    return [entry if times[entry.name] == 1 else _clash(entry, entries) for entry in entries]


def bad_name(name: str) -> str | None:
    """Why no plugin may be called ``name``; None if one may."""
    if name in RESERVED:
        return f"the name '{name}' is reserved for a table of settings"
    if not name.isidentifier():
        return f"the name '{name}' is no identifier: letters, digits and _ only"
    return None


def find_module(module: str) -> ModuleSpec | None:
    """Locate a module without importing it or its parents.

    ``importlib.util.find_spec("pkg.mod")`` imports ``pkg``; asking the finders part by part, each
    time with the parent's search locations, does not. The finders of editable installs are asked
    as well.
    """
    path: list[str] | None = None
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        if depth > 1 and path is None:
            return None
        spec = _find_part(".".join(parts[:depth]), path)
        if spec is None:
            return None
        locations = spec.submodule_search_locations
        path = None if locations is None else list(locations)
    return spec


def _find_part(name: str, path: list[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, path)
        except KeyError:  # a namespace inside a namespace looks for its parent in sys.modules
            spec = ModuleSpec(name, None, is_package=True)
            inner = [os.path.join(part, name.rpartition(".")[2]) for part in path or []]
            spec.submodule_search_locations = [part for part in inner if os.path.isdir(part)]
        if spec is not None:
            return spec
    return None


def _read(point: EntryPoint) -> PluginEntry:
    distribution, version = _identity(point.dist)
    entry = PluginEntry(plain(point.name), distribution, version, plain(point.value))
    if reason := bad_name(entry.name):
        return replace(entry, broken=reason)
    if not (match := _VALUE.fullmatch(point.value)):
        return replace(entry, broken=f"'{entry.value}' is not of the form module:Class")
    module, class_name = match.groups()
    spec = find_module(module)
    if spec is None or spec.origin is None:
        return replace(entry, broken=f"module not found: {module}")
    entry = replace(entry, file=spec.origin)
    if not spec.origin.endswith(".py") or not hasattr(spec.loader, "get_data"):
        return replace(entry, broken=f"module {module} is not Python source")
    try:
        facts = read_class(spec.loader.get_data(spec.origin), class_name)  # type: ignore[union-attr]
    except SyntaxError as error:
        reason = f"syntax error, line {error.lineno}: {plain(error.msg)}"
        return replace(entry, broken=reason, unparsable=True)
    except (ManifestError, OSError) as error:
        return replace(entry, broken=plain(str(error)))
    return replace(entry, summary=facts.summary, manifest=facts.manifest, options=facts.options)


def _identity(distribution: Distribution | None) -> tuple[str, str]:
    """Name and version; only the headers of the metadata are parsed, and they may be missing."""
    text = None
    if distribution is not None:
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO")
    headers = email.parser.HeaderParser().parsestr(text or "")
    return plain(headers.get("Name", "(nameless)")), plain(headers.get("Version", "(no version)"))


def _clash(entry: PluginEntry, entries: list[PluginEntry]) -> PluginEntry:
    rivals = sorted(e.offered_by for e in entries if e.name == entry.name and e is not entry)
    return replace(entry, broken=f"duplicate name: also offered by {', '.join(rivals)}")
