"""Loads the plugins that a run names, and no others, and calls their hooks one by one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pluggy

from minillm_core.errors import PluginError
from minillm_core.install import pip_line
from minillm_core.plugins.find import FoundPlugin, find_all
from minillm_core.plugins.hookspecs import PROJECT, Hooks
from minillm_core.plugins.needs import unmet
from minillm_core.plugins.options import validated
from minillm_core.plugins.origin import Origin, digest_of
from minillm_core.plugins.plugin import Plugin
from minillm_core.text import plain

__all__ = ["LoadedPlugin", "Manager", "check_support", "load", "with_options"]


@dataclass(frozen=True)
class LoadedPlugin:
    """A plugin with its options, ready for its hooks to be called."""

    plugin: Plugin
    origin: Origin

    @classmethod
    def of(cls, name: str, plugin: Plugin) -> LoadedPlugin:
        """A plugin that was made in Python, under the name that it is to have."""
        file = inspect.getfile(type(plugin))
        source = f"{type(plugin).__module__}:{type(plugin).__qualname__}"
        return cls(plugin, Origin(name, None, None, source, file, digest_of(file), file))

    @property
    def name(self) -> str:
        """The name that activates the plugin."""
        return self.origin.name

    @property
    def distribution(self) -> str | None:
        """Who offers it; None for a single file."""
        return self.origin.distribution

    @property
    def version(self) -> str | None:
        """The distribution's version."""
        return self.origin.version

    @property
    def digest(self) -> str:
        """sha256 of the file that defines the class."""
        return self.origin.digest

    @property
    def source(self) -> str:
        """The entry point's value, or a single file as it was named."""
        return self.origin.source

    def contain(self, doing: str) -> AbstractContextManager[None]:
        """Run the plugin's code inside: ``with loaded.contain("forward of Gate"): ...``.

        Raises:
            PluginCodeError: the plugin's code raised.
        """
        return self.origin.contain(doing)

    def data(self) -> dict[str, Any]:
        """The plugin as a JSON object, for run.json."""
        return {
            "name": self.name,
            "distribution": self.distribution,
            "version": self.version,
            "source": self.source,
            "digest": self.digest,
            "options": self.plugin.options(),
        }


def load(
    specs: Mapping[str, str] | Iterable[str],
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[LoadedPlugin, ...]:
    """Import the plugins that are named and type their options; nothing else is imported.

    Args:
        specs: names or files (``./my_trick.py:MyTrick``); or name -> either, as
            :func:`minillm_core.config.load` gives them.
        options: name -> the options given.

    Returns:
        The plugins, sorted by name.

    Raises:
        ConfigError: nothing can be called that.
        PluginError: unknown, broken, named twice, of another hook API, or a wrong option.
        PluginCodeError: a plugin's own code raised while it was imported or its options checked.
    """
    found = find_all(specs.values() if isinstance(specs, Mapping) else specs)
    _refuse_twice(one.origin for one in found)
    given = options or {}
    loaded = [with_options(one, given.get(one.origin.name, {})) for one in found]
    loaded.sort(key=lambda one: one.name)
    by_class: dict[type[Plugin], str] = {}
    for one in loaded:
        other = by_class.setdefault(type(one.plugin), one.name)
        if other != one.name:
            raise PluginError(
                f"plugins '{other}' and '{one.name}' are the same class",
                where=one.source,
                fix="name one of them",
            )
    return tuple(loaded)


def check_support(plugins: Iterable[LoadedPlugin], backend: str, device: str) -> None:
    """Refuse plugins that cannot run where the run will: before the first step.

    Args:
        plugins: those that were loaded.
        backend: ``torch``, ``mlx`` or ``numpy``.
        device: ``cpu``, ``cuda:0``, ``mps``, ``gpu``.

    Raises:
        PluginError: one of them does not run on this backend, or on this kind of device; or a
            package that it requires is missing.
    """
    kind = device.partition(":")[0]
    for one in plugins:
        manifest = one.plugin.manifest
        needs = (
            ("backend", backend, manifest.backends),
            ("device", kind, manifest.devices or (kind,)),
        )
        for flag, chosen, served in needs:
            if chosen not in served:
                raise PluginError(
                    f"plugin '{one.name}' does not run on {flag} {chosen}: only on "
                    f"{', '.join(served)}",
                    where=one.origin.offered_by or one.source,
                    fix=f"--{flag} {served[0]}, or leave it out",
                )
        if lacking := unmet(manifest.requires):
            why = "; ".join(f"{need}: {reason}" for need, reason in lacking.items())
            raise PluginError(
                f"plugin '{one.name}' needs {why}",
                where=one.origin.offered_by or one.source,
                fix=f"{pip_line(*lacking)}; or leave it out",
            )


class Manager:
    """The plugins of one run, registered with pluggy, their hooks callable one by one.

    pluggy hands one object to all implementations of a hook; here each is called with arguments
    of its own, so that a builder knows its owner, in the order of the plugins' names.

    Raises:
        PluginError: pluggy finds a hook that does not fit its specification.
    """

    def __init__(self, plugins: Iterable[LoadedPlugin] = ()) -> None:
        self.plugins = tuple(sorted(plugins, key=lambda one: one.name))
        _refuse_twice(one.origin for one in self.plugins)
        self._registry = _Registry(PROJECT)
        self._registry.add_hookspecs(Hooks)
        for one in self.plugins:
            try:
                self._registry.register(one.plugin, one.name)
                self._registry.check_pending()
            except pluggy.PluginValidationError as error:
                raise PluginError(
                    f"plugin '{one.name}' has a hook that does not fit: {plain(str(error))}",
                    where=one.source,
                ) from error

    def implementing(self, hook: str) -> tuple[LoadedPlugin, ...]:
        """The plugins that implement ``hook``, sorted by name."""
        return tuple(one for one in self.plugins if hook in one.plugin.hooks)

    def call(self, hook: str, make_arguments: Callable[[LoadedPlugin], Mapping[str, Any]]) -> None:
        """Call each implementation of ``hook`` with what ``make_arguments`` makes for its plugin.

        Raises:
            PluginCodeError: an implementation raised.
            PluginError: an implementation returned something.
            MinillmError: what the core raised in answer to an implementation, as it is.
        """
        implementations = {
            one.plugin_name: one for one in getattr(self._registry.hook, hook).get_hookimpls()
        }
        for one in self.implementing(hook):
            implementation = implementations[one.name]
            arguments = make_arguments(one)
            taken = {name: arguments[name] for name in implementation.argnames}
            with one.contain(hook):
                result = implementation.function(**taken)
                if result is not None:
                    raise PluginError(
                        f"{one.origin.called}: {hook} returned {type(result).__name__}, and what "
                        "it returns is used for nothing",
                        fix=f"say it through the slots of '{', '.join(taken)}', and return nothing",
                    )


class _Registry(pluggy.PluginManager):
    """Looks for hooks among the names that the class found, not in all that pydantic adds."""

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        if isinstance(plugin, Plugin) and name not in type(plugin).hooks:
            return None
        return super().parse_hookimpl_opts(plugin, name)


def with_options(found: FoundPlugin, options: Mapping[str, Any]) -> LoadedPlugin:
    """Make the plugin with the options given.

    Raises:
        PluginError: an option is unknown, missing or ill-typed.
        PluginCodeError: the plugin's own check of its options raised.
    """
    with found.origin.contain("its options"):
        plugin = validated(found.cls, found.origin.name, options)
    return LoadedPlugin(plugin, found.origin)


def _refuse_twice(origins: Iterable[Origin]) -> None:
    seen: dict[str, Origin] = {}
    for one in origins:
        if other := seen.get(one.name):
            raise PluginError(
                f"plugin '{one.name}' is named twice",
                where=f"{other.source} and {one.source}",
                fix="name it once; two files of one name cannot be used together",
            )
        seen[one.name] = one
