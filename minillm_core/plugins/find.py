"""Imports the class of one plugin that was named: an installed one, or a single file."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from minillm_core.config.selection import name_of
from minillm_core.errors import PluginError
from minillm_core.install import pip_line
from minillm_core.plugins.api import HOOK_API
from minillm_core.plugins.begun import begun
from minillm_core.plugins.discover import PluginEntry, installed_names, installed_plugins
from minillm_core.plugins.first_party import FIRST_PARTY
from minillm_core.plugins.lacking import installing, lacking
from minillm_core.plugins.manifest import ManifestError, plugin_classes, read_class
from minillm_core.plugins.origin import Origin, digest_of, root_of
from minillm_core.plugins.plugin import Plugin
from minillm_core.text import nearest, plain

__all__ = ["FoundPlugin", "find", "find_all"]


@dataclass(frozen=True)
class FoundPlugin:
    """A plugin's class, imported, and where it came from."""

    cls: type[Plugin]
    origin: Origin


def find(named: str) -> FoundPlugin:
    """Import one plugin's class.

    Args:
        named: a name of an entry point, or a file and its class: ``./my_trick.py:MyTrick``.

    Raises:
        ConfigError: nothing can be called that.
        PluginError: unknown, broken, or of another hook API.
        PluginCodeError: its module raised while it was imported.
    """
    return find_all((named,))[0]


def find_all(named: Iterable[str]) -> list[FoundPlugin]:
    """Import several plugins' classes, one after the other; as :func:`find`.

    What is installed is looked through once for all of them: with a hundred distributions it
    takes as long as a plugin's own import.
    """
    names = [(name_of(one, where=f"plugin {plain(one)}"), one) for one in named]
    wanted = {name for name, one in names if name == one}
    entries = installed_plugins(only=wanted) if wanted else []
    ours = wanted & FIRST_PARTY.keys() - {entry.name for entry in entries}
    if len(ours) > 1:  # of a single one more can be said
        raise lacking(ours)
    return [
        _find_installed(name, [entry for entry in entries if entry.name == name])
        if name == one
        else _find_file(name, one)
        for name, one in names
    ]


def _find_installed(name: str, entries: Sequence[PluginEntry]) -> FoundPlugin:
    if not entries:
        raise _unknown(name)
    entry = entries[0]
    if len(entries) > 1:
        offers = " and ".join(other.offered_by for other in entries)
        raise PluginError(
            f"plugin '{name}' is offered by {offers}",
            where=", ".join(other.value for other in entries),
            fix=f"pip uninstall {entries[-1].distribution}",
        )
    if entry.broken and not entry.unparsable:  # what cannot be parsed is left to Python to refuse
        raise PluginError(
            f"plugin '{name}' of {entry.offered_by} cannot be used: {entry.broken}",
            where=entry.file or entry.value,
            fix=f"{pip_line(entry.distribution, upgrade=True)}; or leave it out",
        )
    file = entry.file or entry.value
    origin = Origin(
        name,
        entry.distribution,
        entry.version,
        entry.value,
        file,
        digest_of(file),
        root_of(entry.module, file),
    )
    return _import_class(origin, entry.class_name, lambda: importlib.import_module(entry.module))


def _find_file(name: str, named: str) -> FoundPlugin:
    text, _, class_name = named.rpartition(":")
    path = Path(text).absolute()
    if not path.is_file():
        raise PluginError(
            f"there is no file {plain(text)}",
            where=f"looked for {plain(str(path), limit=4096)}",
            fix="give the path from the current folder: --plugins ./my_trick.py:MyTrick",
        )
    try:
        with suppress(SyntaxError):  # raised again, with its place, when the file is run
            read_class(path.read_bytes(), class_name)
    except ManifestError as error:
        there = [one for one in plugin_classes(path.read_bytes()) if one != class_name]
        state = f"in the file: class {class_name}(Plugin, api={HOOK_API})"
        others = " or ".join(f"{plain(text)}:{one}" for one in there)
        raise PluginError(
            f"plugin '{name}', class {class_name}: {error.what}",
            where=str(path),
            fix=error.fix or (f"it has {others}; or, {state}" if others else state),
        ) from error
    origin = Origin(name, None, None, named, str(path), digest_of(str(path)), str(path))
    return _import_class(origin, class_name, lambda: _run_file(name, path))


def _import_class(
    origin: Origin, class_name: str, import_module: Callable[[], ModuleType]
) -> FoundPlugin:
    with origin.contain("import"):
        cls = getattr(import_module(), class_name, None)
    if not (isinstance(cls, type) and issubclass(cls, Plugin)):
        raise PluginError(
            f"{origin.called}: {class_name} does not extend Plugin",
            where=origin.file,
            fix=f"from minillm_core import Plugin; class {class_name}(Plugin, api=1)",
        )
    return FoundPlugin(cls, origin)


def _run_file(name: str, path: Path) -> ModuleType:
    """Run a single file as a module that references can name: anew at every load, never cached."""
    module = ModuleType(f"minillm_file_{name}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    try:
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[module.__name__]
        raise
    return module


def _unknown(name: str) -> PluginError:
    installed = installed_names()
    close = name if name in FIRST_PARTY else nearest(name, installed | set(FIRST_PARTY))
    if (package := begun(name, Path())) is not None:
        fix = f"its package lies here and is not installed: {pip_line('-e', f'./{package}')}"
    elif specs := _in_file(name):
        fix = f"a file of that name lies here: --plugins {' or '.join(specs)}"
    elif close is None:
        fix = "minillm plugins list shows those that are installed"
    elif close in installed:
        fix = f"did you mean '{close}'?"
    else:
        question = "" if close == name else f"did you mean '{close}'? "
        fix = f"{question}{installing({close})}"
    return PluginError(
        f"there is no plugin '{plain(name)}' here",
        where=f"looked among the plugins installed for {sys.executable}",
        fix=fix,
    )


def _in_file(name: str) -> list[str]:
    """The plugins of a single file of this name in the current folder, as they are named."""
    try:
        classes = plugin_classes(Path(f"{name}.py").read_bytes())
    except (OSError, SyntaxError):
        return []
    return [f"./{name}.py:{one}" for one in classes]
