"""The installed plugins and commands, read from entry-point metadata and source; none is imported."""

from __future__ import annotations

import ast
import email.parser
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, EntryPoint, EntryPoints, distributions
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from minillm_core.errors import PluginError
from minillm_core.plugins.manifest import RESERVED, Manifest, ManifestError, doc_summary, read_class
from minillm_core.text import nearest, plain

GROUP = "minillm.plugins"
COMMANDS = "minillm.commands"
_VALUE = re.compile(r"\s*([\w.]+)\s*:\s*(\w+)\s*")
_COMMAND = re.compile(r"[a-z][a-z0-9_-]*(\.[a-z][a-z0-9_-]*)*")


@dataclass(frozen=True)
class Offer:
    """An entry point of a distribution, and the facts read from its source without importing it."""

    name: str
    distribution: str
    version: str
    value: str  # "minillm_modded.paired_heads:PairedHeads"
    file: str | None = None  # path of the source that defines it
    summary: str = ""
    broken: str | None = None  # why it cannot be used
    unparsable: bool = False  # broken because its source is not Python

    group: ClassVar[str]
    kind: ClassVar[str]  # kind of object that the entry point names, in words

    @property
    def module(self) -> str:
        """The module that the entry point names."""
        return self.value.partition(":")[0].strip()

    @property
    def defined(self) -> str:
        """The class or function that the entry point names."""
        return self.value.partition(":")[2].strip()

    @property
    def offered_by(self) -> str:
        """Distribution and version."""
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True)
class PluginEntry(Offer):
    """An entry point of the group ``minillm.plugins``."""

    manifest: Manifest | None = None
    options: tuple[str, ...] = ()

    group: ClassVar[str] = GROUP
    kind: ClassVar[str] = "Class"

    @staticmethod
    def refused(name: str) -> str | None:
        """Return the reason why no plugin may have the name, or None."""
        return bad_name(name)

    @staticmethod
    def facts(source: bytes, name: str) -> dict[str, Any]:
        """Read manifest, summary and options of the class."""
        return vars(read_class(source, name))

    def data(self) -> dict[str, Any]:
        """Return the entry as a JSON object."""
        facts = asdict(self)
        manifest, broken = facts.pop("manifest") or {}, facts.pop("broken")
        del facts["unparsable"]
        return facts | {"broken": broken, "state": "broken" if broken else "ok", **manifest}


@dataclass(frozen=True)
class CommandEntry(Offer):
    """An entry point of the group ``minillm.commands``: a function, or a typer app."""

    group: ClassVar[str] = COMMANDS
    kind: ClassVar[str] = "function"

    @staticmethod
    def refused(name: str) -> str | None:
        """Return the reason why no command may have the name, or None."""
        if _COMMAND.fullmatch(name):
            return None
        return f"the name {name!a} is not a command's: a to z, digits, - and _; a dot after a group"

    @staticmethod
    def facts(source: bytes, name: str) -> dict[str, Any]:
        """Read the summary of the function."""
        return {"summary": doc_summary(source, name)}


_Entry = TypeVar("_Entry", PluginEntry, CommandEntry)


def entry_points(*, group: str) -> EntryPoints:
    """Return a group's entry points, of every distribution whose metadata can be read.

    ``importlib.metadata.entry_points`` reads all distributions at once: a single file that is not UTF-8,
    or a line that is not ``name = value``, would break every command.
    """
    return EntryPoints(_scan(group)[0])


def offered(group: str, name: str, what: str) -> EntryPoint | None:
    """Return the entry point of a name; None if no installed distribution offers it.

    Args:
        group: the group of entry points.
        name: the entry point's name.
        what: verb phrase of the error about several distributions: ``have the layout llama``.

    Raises:
        PluginError: several distributions offer it.
    """
    found = [one for one in entry_points(group=group) if one.name == name]
    if len({one.value for one in found}) > 1:
        raise PluginError(
            f"several distributions {what}",
            where=", ".join(sorted(one.value for one in found)),
            fix="uninstall the distribution that you do not need",
        )
    return found[0] if found else None


def unreadable() -> list[PluginEntry]:
    """Return the distributions whose metadata cannot be read: they may or may not offer plugins."""
    return _scan(GROUP)[1]


def _scan(group: str) -> tuple[list[EntryPoint], list[PluginEntry]]:
    points: list[EntryPoint] = []
    broken: list[PluginEntry] = []
    seen: set[str] = set()
    for one in distributions():
        folder = str(getattr(one, "_path", "an installed distribution"))
        if (name := _named(folder)) and name in seen:
            continue
        seen.add(name)
        try:
            points += _points(one, folder, group)
        except (ValueError, TypeError, OSError) as error:
            distribution, version = _by_folder(os.path.basename(folder))
            # importlib splits each line at "=" without checking that there is one
            why = "a line is not 'name = value'" if isinstance(error, TypeError) else str(error)
            reason = f"its entry_points.txt cannot be read: {plain(why)}"
            broken.append(PluginEntry("?", distribution, version, "", folder, broken=reason))
    return points, broken


@lru_cache(1024)
def _named(folder: str) -> str:
    """Return a distribution's name, from its folder's as importlib does, without reading metadata."""
    name = os.path.basename(folder).rpartition(".")[0].partition("-")[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def _points(one: Distribution, folder: str, group: str) -> Iterable[EntryPoint]:
    """Read a distribution's entry points of a group; an unchanged file is read once."""
    try:
        found = os.stat(f"{folder}/entry_points.txt")
    except OSError:  # there is none, or the distribution is in an archive
        return () if os.path.isdir(folder) else one.entry_points.select(group=group)
    return _parsed(folder, found.st_mtime_ns, found.st_size, group)


@lru_cache(4096)
def _parsed(folder: str, changed: int, size: int, group: str) -> tuple[EntryPoint, ...]:
    return tuple(Distribution.at(folder).entry_points.select(group=group))


def _by_folder(folder: str) -> tuple[str, str]:
    """Return name and version of a distribution, parsed from its folder's name."""
    name, _, version = folder.rpartition(".")[0].partition("-")
    return plain(name.replace("_", "-")) or "(nameless)", plain(version) or "(no version)"


def installed_names() -> set[str]:
    """Return the names of the installed plugins, broken ones included."""
    return {plain(name) for name in entry_points(group=GROUP).names}


def installed_plugins(only: str | Collection[str] | None = None) -> list[PluginEntry]:
    """Return every installed plugin, sorted by name, broken ones with the reason.

    For several names at once, the installed distributions are scanned once. Distributions that cannot
    be read are not included: see :func:`unreadable`.

    Args:
        only: read only the plugins of this name, or of these names.
    """
    names = (only,) if isinstance(only, str) else only
    return _installed(PluginEntry, lambda name: names is None or name in names)


def installed_commands(wanted: Callable[[str], bool]) -> list[CommandEntry]:
    """Return the commands that installed distributions offer, as :func:`installed_plugins`.

    Args:
        wanted: which names to read; a name has its groups before it, as in ``plugins.new``.
    """
    return _installed(CommandEntry, wanted)


def _installed(kind: type[_Entry], wanted: Callable[[str], bool]) -> list[_Entry]:
    points = entry_points(group=kind.group)
    entries = [_read(point, kind) for point in points if wanted(plain(point.name))]
    times = Counter(entry.name for entry in entries)
    entries.sort(key=lambda entry: (entry.name, entry.distribution, entry.value))
    return [entry if times[entry.name] == 1 else _clash(entry, entries) for entry in entries]


def bad_name(name: str) -> str | None:
    """Return the reason why no plugin may be called ``name``; None if it is valid."""
    if name in RESERVED:
        return f"the name '{name}' is reserved for {'the core' if name == 'core' else 'a table of settings'}"
    if not name.isidentifier() or not name.isascii():
        return f"the name {name!a} is not an identifier: letters a to z, digits and _ only"
    return None


def find_module(module: str) -> ModuleSpec | None:
    """Return the spec of a module without importing it or its parents.

    ``importlib.util.find_spec("pkg.mod")`` imports ``pkg``; calling the finders part by part, each
    with the parent's search locations, does not. The finders of editable installs are used as well.
    """
    parent, _, last = module.rpartition(".")
    path = None
    if parent:
        package = find_module(parent)
        if package is None or package.submodule_search_locations is None:
            return None
        path = list(package.submodule_search_locations)
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(module, path)
        except KeyError:  # a namespace inside a namespace looks for its parent in sys.modules
            spec = ModuleSpec(module, None, is_package=True)
            inner = [os.path.join(part, last) for part in path or []]
            spec.submodule_search_locations = [part for part in inner if os.path.isdir(part)]
        if spec is not None:
            return spec
    return None


def _read(point: EntryPoint, kind: type[_Entry]) -> _Entry:
    name, value = plain(point.name), plain(point.value)
    try:
        entry = kind(name, *_identity(point.dist), value)
    except (ValueError, OSError) as error:
        folder = str(getattr(point.dist, "_path", ""))
        entry = kind(name, *_by_folder(os.path.basename(folder)), value, folder)
        return replace(entry, broken=f"its METADATA cannot be read: {plain(str(error))}")
    if reason := kind.refused(name):
        return replace(entry, broken=reason)
    if not (match := _VALUE.fullmatch(point.value)):
        return replace(entry, broken=f"'{entry.value}' is not of the form module:{kind.kind}")
    module, defined = match.groups()
    spec = find_module(module)
    if spec is None or spec.origin is None:
        return replace(entry, broken=f"module not found: {module}")
    entry = replace(entry, file=spec.origin)
    if not spec.origin.endswith(".py") or not hasattr(spec.loader, "get_data"):
        return replace(entry, broken=f"module {module} is not Python source")
    try:
        facts = kind.facts(spec.loader.get_data(spec.origin), defined)  # type: ignore[union-attr]
    except SyntaxError as error:
        reason = f"syntax error, line {error.lineno}: {plain(error.msg)}"
        return replace(entry, broken=reason, unparsable=True)
    except (ManifestError, OSError) as error:
        return replace(entry, broken=plain(str(error)))
    return replace(entry, **facts)


def _identity(distribution: Distribution | None) -> tuple[str, str]:
    """Return name and version; only the headers of the metadata are parsed, and they may be missing."""
    text = None
    if distribution is not None:
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO")
    headers = email.parser.HeaderParser().parsestr((text or "").partition("\n\n")[0])
    return plain(headers.get("Name", "(nameless)")), plain(headers.get("Version", "(no version)"))


def _clash(entry: _Entry, entries: list[_Entry]) -> _Entry:
    rivals = sorted(e.offered_by for e in entries if e.name == entry.name and e is not entry)
    return replace(entry, broken=f"duplicate name: also offered by {', '.join(rivals)}")


def local_package(name: str, folder: Path) -> Path | None:
    """Return the package in ``folder`` or a subfolder whose pyproject.toml names the plugin, or None."""
    import tomllib  # `plugins list` starts without it

    for project in (folder / "pyproject.toml", *sorted(folder.glob("*/pyproject.toml"))):
        try:
            entry_points = tomllib.loads(project.read_text())["project"]["entry-points"]
            if name in entry_points[GROUP]:
                return project.parent
        except (OSError, ValueError, KeyError, TypeError):
            continue  # another project's pyproject.toml, which may be anything
    return None


_REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def missing_reference(reference: str) -> str | None:
    """Return why ``package.module:function`` does not exist; None if it does, or if only an import could tell.

    Nothing is imported: a kernel's module imports its framework, and a plan can be built without the
    framework installed.
    """
    if not _REFERENCE.fullmatch(reference):
        return "it is not of the form package.module:function"
    module, _, name = reference.partition(":")
    loaded = sys.modules.get(module)
    if loaded is not None:
        return None if hasattr(loaded, name) else _lacks(module, name, set(vars(loaded)))
    spec = find_module(module)
    if spec is None:
        return f"there is no module {module}"
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        names = set(_names(ast.parse(Path(spec.origin).read_bytes())))
    except (OSError, SyntaxError, ValueError):
        return None
    return None if names & {name, "*", "__getattr__"} else _lacks(module, name, names)


def _lacks(module: str, name: str, names: set[str]) -> str:
    close = nearest(name, names)
    return f"{module} has no {name}" + (f"; did you mean {close}?" if close else "")


def _names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module may define, conditional ones included: a superset."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
