"""The plugins that a run names, and no others: their import, their options and the calls of their hooks."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from minillm_core.config.selection import FileSpec, Spec, check_name, spec_of
from minillm_core.errors import PluginError
from minillm_core.install import gpu_refusal, pip_line, unmet
from minillm_core.plugins import discover, first_party
from minillm_core.plugins.attribution import Origin, digest_of, root_of
from minillm_core.plugins.manifest import HOOK_API, ManifestError, plugin_classes, read_class
from minillm_core.plugins.options import validated
from minillm_core.plugins.plugin import Plugin
from minillm_core.text import few, nearest, plain


@dataclass(frozen=True)
class FoundPlugin:
    """An imported plugin class with its origin."""

    cls: type[Plugin]
    origin: Origin


def find(named: Spec) -> FoundPlugin:
    """Import one plugin's class.

    Args:
        named: the name of an installed plugin, or a FileSpec; a string never names a file.

    Raises:
        ConfigError: the text cannot be a plugin's name.
        PluginError: unknown, broken, of another hook API, or a first-party one of another version
            than the core.
        PluginCodeError: its module raised while it was imported.
    """
    return find_all((named,))[0]


def find_plugin(spec: str, *, where: str = "plugin") -> FoundPlugin:
    """Import one plugin's class, as :func:`find` does.

    Args:
        spec: a name, or a file and its class (``./my_trick.py:MyTrick``), as ``--plugins`` takes them.
        where: the place shown in errors.

    Returns:
        The class (``cls``) and its origin (``origin``).

    Raises:
        ConfigError: it is neither a name nor a file with a class, or its name is reserved.
        PluginError: unknown, broken, of another hook API, or of another version than the core.
        PluginCodeError: its module raised while it was imported.
    """
    return find(spec_of(spec, where=where))


def find_all(named: Iterable[Spec]) -> list[FoundPlugin]:
    """Import several plugins' classes in order, as :func:`find` does.

    The installed distributions are scanned once for all of them: with a hundred distributions a scan
    takes as long as a plugin's own import.
    """
    specs = list(named)
    for one in specs:
        check_name(one if isinstance(one, str) else one.name, where=f"plugin {plain(str(one))}")
    wanted = {one for one in specs if isinstance(one, str)}
    entries = discover.installed_plugins(only=wanted) if wanted else []
    offers = {name: [entry for entry in entries if entry.name == name] for name in wanted}
    ours = {name for name, found in offers.items() if name in first_party.FIRST_PARTY and not found}
    if len(ours) > 1:  # the refusal of a single one has a longer fix
        raise first_party.missing_plugins(ours)
    # several offers of one name are refused as such
    first_party.check_versions(
        found[0].distribution for found in offers.values() if len(found) == 1
    )
    return [
        _find_file(one) if isinstance(one, FileSpec) else _find_installed(one, offers[one])
        for one in specs
    ]


def _find_installed(name: str, entries: Sequence[discover.PluginEntry]) -> FoundPlugin:
    if not entries:
        raise _unknown(name)
    entry = entries[0]
    if refused := first_party.unusable(
        "plugin", name, entries, first_party.FIRST_PARTY.get(name, "")
    ):
        if len(entries) == 1:
            refused.fix = f"{refused.fix}; or leave it out"
        raise refused
    file = entry.file or entry.value
    whose, root = (entry.distribution, entry.version), root_of(entry.module, file)
    origin = Origin(name, *whose, entry.value, file, digest_of(file), root)
    return _import_class(origin, entry.defined, lambda: importlib.import_module(entry.module))


def _find_file(spec: FileSpec) -> FoundPlugin:
    name, text, class_name = spec.name, spec.file, spec.class_name
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
            fix=error.fix or (f"use {others}; or, {state}" if others else state),
        ) from error
    origin = Origin.of_file(name, str(spec), str(path))
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
    """Execute a single file as a module that references can name: at every load, never cached."""
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
    installed, ours = discover.installed_names(), first_party.FIRST_PARTY
    close = name if name in ours else nearest(name, installed | set(ours), 0.7)
    if (package := discover.local_package(name, Path())) is not None:
        fix = f"its package lies here and is not installed: {pip_line('-e', f'./{package}')}"
    elif specs := _in_file(name):
        fix = f"a file of that name lies here: --plugins {' or '.join(specs)}"
    elif close is None:
        fix = "minillm plugins list shows those that are installed"
    elif close in installed:
        fix = f"did you mean '{close}'?"
    else:
        question = "" if close == name else f"did you mean '{close}'? "
        fix = f"{question}{first_party.installing([ours[close]])}"
    lost = [one.file or one.distribution for one in discover.unreadable()]
    return PluginError(
        f"there is no plugin '{plain(name)}' here",
        where=f"looked among the plugins installed for {sys.executable}"
        + (f", but for what cannot be read: {few(lost)}" if lost else ""),
        fix=fix,
    )


def _in_file(name: str) -> list[str]:
    """Return the plugins in a file of this name in the current folder, as typed after ``--plugins``."""
    try:
        classes = plugin_classes(Path(f"{name}.py").read_bytes())
    except (OSError, SyntaxError):
        return []
    return [f"./{name}.py:{one}" for one in classes]


@dataclass(frozen=True)
class LoadedPlugin(Origin):
    """A plugin with its options, ready for its hooks to be called."""

    plugin: Plugin

    @classmethod
    def of(cls, name: str, plugin: Plugin) -> LoadedPlugin:
        """Return a loaded plugin for an instance made in Python, under the given name."""
        source = f"{type(plugin).__module__}:{type(plugin).__qualname__}"
        return cls.of_file(name, source, inspect.getfile(type(plugin)), plugin=plugin)

    @property
    def origin(self) -> Origin:
        """The plugin's origin: the object itself."""
        return self

    def call(self, hook: str, /, **arguments: Any) -> Any:
        """Call a hook with those of the arguments that its signature has: it may omit some."""
        implementation = getattr(self.plugin, hook)
        names = inspect.signature(implementation).parameters
        return implementation(**{name: arguments[name] for name in names})

    def data(self) -> dict[str, Any]:
        """Return the plugin as a JSON object, for run.json."""
        facts = ("name", "distribution", "version", "source", "digest")
        return {fact: getattr(self, fact) for fact in facts} | {"options": self.plugin.options()}


def load(
    specs: Mapping[str, Spec] | Iterable[Spec],
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[LoadedPlugin, ...]:
    """Import the named plugins and validate their options; nothing else is imported.

    Args:
        specs: names or FileSpecs; or name -> either, as :func:`minillm_core.config.load` returns them.
            A path as a string is refused.
        options: name -> the options given.

    Returns:
        The plugins, sorted by name.

    Raises:
        ConfigError: an invalid name.
        PluginError: unknown, broken, named twice, of another hook API, or a wrong option.
        PluginCodeError: a plugin's own code raised while it was imported or its options checked.
    """
    found = find_all(specs.values() if isinstance(specs, Mapping) else specs)
    _refuse_twice(one.origin for one in found)
    loaded = [with_options(one, (options or {}).get(one.origin.name, {})) for one in found]
    loaded.sort(key=lambda one: one.name)
    by_class: dict[type[Plugin], str] = {}
    for one in loaded:
        other = by_class.setdefault(type(one.plugin), one.name)
        if other != one.name:
            what = f"plugins '{other}' and '{one.name}' are the same class"
            raise PluginError(what, where=one.source, fix="name one of them")
    return tuple(loaded)


def check_support(plugins: Iterable[LoadedPlugin], backend: str, device: str) -> None:
    """Refuse plugins that cannot run on the run's backend and device, before the first step.

    Args:
        plugins: the loaded plugins.
        backend: ``torch``, ``mlx`` or ``numpy``.
        device: ``cpu``, ``cuda:0``, ``mps``, ``gpu``.

    Raises:
        PluginError: one of them does not run on this backend, this kind of device or this GPU; or a
            package that it requires is missing.
    """
    kind = device.partition(":")[0]
    for one in plugins:
        manifest, where = one.plugin.manifest, one.offered_by or one.source
        devices = ("device", kind, manifest.devices or (kind,))
        for flag, chosen, served in (("backend", backend, manifest.backends), devices):
            if chosen not in served:
                what = f"does not run on {flag} {chosen}: only on {', '.join(served)}"
                fix = f"--{flag} {served[0]}, or leave it out"
                raise PluginError(f"plugin '{one.name}' {what}", where=where, fix=fix)
        asked = kind == "cuda" and manifest.capability
        if asked and (reason := gpu_refusal(asked)):
            raise PluginError(f"plugin '{one.name}' {reason}", where=where, fix="leave it out")
        if lacking := unmet(manifest.requires):
            why = "; ".join(f"{need}: {reason}" for need, reason in lacking.items())
            fix = f"{pip_line(*lacking)}; or leave it out"
            raise PluginError(f"plugin '{one.name}' needs {why}", where=where, fix=fix)


class Manager:
    """The plugins of one run, sorted by name, and the calls of their hooks.

    Raises:
        PluginError: two of them have the same name.
    """

    def __init__(self, plugins: Iterable[LoadedPlugin] = ()) -> None:
        self.plugins = tuple(sorted(plugins, key=lambda one: one.name))
        _refuse_twice(self.plugins)

    def implementing(self, hook: str) -> tuple[LoadedPlugin, ...]:
        """Return the plugins that implement ``hook``, sorted by name."""
        return tuple(one for one in self.plugins if hook in one.plugin.hooks)

    def call(self, hook: str, make_arguments: Callable[[LoadedPlugin], Mapping[str, Any]]) -> None:
        """Call each implementation of ``hook`` with the arguments that ``make_arguments`` returns for its plugin.

        Raises:
            PluginCodeError: an implementation raised.
            PluginError: an implementation returned something.
            MinillmError: an error of the core caused by an implementation, unchanged.
        """
        for one in self.implementing(hook):
            arguments = make_arguments(one)
            with one.contain(hook):
                if (result := one.call(hook, **arguments)) is not None:
                    raise PluginError(
                        f"{one.called}: {hook} returned {type(result).__name__}, but return values "
                        "of hooks are not used",
                        fix=f"call the slots of '{', '.join(arguments)}', and return nothing",
                    )


def with_options(found: FoundPlugin, options: Mapping[str, Any]) -> LoadedPlugin:
    """Return the plugin with the options given.

    Raises:
        PluginError: an option is unknown, missing or ill-typed.
        PluginCodeError: the plugin's own check of its options raised.
    """
    with found.origin.contain("its options"):
        plugin = validated(found.cls, found.origin.name, options)
    return LoadedPlugin(**vars(found.origin), plugin=plugin)


def _refuse_twice(origins: Iterable[Origin]) -> None:
    seen: dict[str, Origin] = {}
    for one in origins:
        if other := seen.get(one.name):
            raise PluginError(
                f"plugin '{one.name}' is named twice",
                where=f"{other.source} and {one.source}",
                fix="name it once; a file names its plugin: give each class a file of another name",
            )
        seen[one.name] = one
