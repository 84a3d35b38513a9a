"""Distributions and plugins: met requirements, matching versions, and plugins that load."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import suppress
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion

from minillm_core.commands import pip_line
from minillm_core.inspection import (
    CORE,
    DISTRIBUTIONS,
    FRAMEWORKS,
    GROUP,
    entry_points,
    installed_plugins,
    unreadable,
    version_mix,
)
from minillm_lab.doctor.finding import Finding

FOR_NVIDIA = ("cuda",)
"""Extras that are useful only on other machines."""

READERS = ("transformers", "mlx-lm")


def package_findings(*, nvidia: bool) -> Iterator[Finding]:
    """Report the core, every distribution that offers plugins, and the plugins.

    Args:
        nvidia: whether an NVIDIA GPU is present; an extra called ``cuda`` is useful only with one.
    """
    core = _found(CORE)
    if core is None:
        yield Finding("minillm", "broken", f"{CORE} is not installed", pip_line(CORE))
        return
    offering = dict(_offering())
    others = [offering[name] for name in sorted(offering) if name != CORE]
    yield from _core(core)
    ours = [one for one in map(_found, sorted(DISTRIBUTIONS)) if one is not None]
    if mix := version_mix({one.name: one.version for one in ours}):
        yield Finding("minillm", "warning", *mix)
    for one in others:
        yield from _needs(one, () if nvidia else FOR_NVIDIA)
    yield from _plugins()
    yield from _readers()


def _offering() -> Iterator[tuple[str, Distribution]]:
    """Yield each distribution that offers plugins, with its name; skip unreadable metadata."""
    for point in entry_points(group=GROUP):
        with suppress(ValueError):  # its METADATA is not UTF-8
            if point.dist is not None:
                yield point.dist.name, point.dist


def _core(core: Distribution) -> Iterator[Finding]:
    lacking = [need for need in _requirements(core) if _unmet(need)]
    if not lacking:
        beside = ", ".join(f"{n.name} {_version(n.name)}" for n in _requirements(core))
        yield Finding(
            "minillm", "ok", f"{CORE} {core.version}" + (f", with {beside}" if beside else "")
        )
    for need in lacking:
        what = f"{CORE} {core.version} needs {need}: {_unmet(need)}"
        yield Finding("minillm", "broken", what, pip_line(str(need)))


def _needs(one: Distribution, useless: Container[str]) -> Iterator[Finding]:
    """Report unmet requirements of a plugin distribution and of its extras, except ``useless`` extras."""
    called = f"{one.name} {one.version}"
    for need in _requirements(one):
        if why := _unmet(need):
            what = f"{called} needs {need}: {why}"
            both = (one.name, CORE) if need.name == CORE else (str(need),)
            yield Finding(one.name, "warning", what, pip_line(*both, upgrade=need.name == CORE))
    optional = []
    for extra in one.metadata.get_all("Provides-Extra") or ():
        lacking = [need for need in _requirements(one, extra) if _unmet(need)]
        if not lacking or extra in useless:
            continue
        if extra not in FOR_NVIDIA:
            optional.append(extra)
            continue
        what = f"its extra '{extra}' needs {', '.join(map(str, lacking))}"
        yield Finding(one.name, "missing", what, pip_line(f"{one.name}[{extra}]"))
    if optional:
        what = f"for those who want {' or '.join(optional)}"
        yield Finding(one.name, "optional", what, pip_line(f"{one.name}[{','.join(optional)}]"))


def _plugins() -> Iterator[Finding]:
    entries = installed_plugins()
    sound = [entry for entry in entries if not entry.broken]
    yield Finding("plugins", "ok", f"{len(sound)} installed: minillm plugins list")
    for entry in entries:
        if entry.broken:
            what = f"'{entry.name}' of {entry.offered_by} cannot be used: {entry.broken}"
            line = pip_line(entry.distribution, upgrade=True)
            yield Finding("plugins", "warning", what, line)
    for entry in unreadable():
        what = f"{entry.file}: {entry.broken}"
        line = f"pip uninstall {entry.distribution}, or install it again"
        yield Finding("plugins", "warning", what, line)


def _readers() -> Iterator[Finding]:
    """Report the packages that open an exported model."""
    there = [f"{name} {_version(name)}" for name in READERS if _found(name)]
    if there:
        what = f"{', '.join(there)} can open what minillm export writes"
        yield Finding("export", "ok", what)
    else:
        what = f"neither {' nor '.join(READERS)} is here to open what minillm export writes"
        yield Finding("export", "missing", what, pip_line(READERS[0]))


def _requirements(one: Distribution, extra: str = "") -> Iterator[Requirement]:
    """Yield the requirements that apply here, without extras or of one extra; excludes frameworks."""
    for text in one.requires or ():
        try:
            need = Requirement(text)
        except InvalidRequirement:
            continue
        marker = need.marker
        always = marker is None or marker.evaluate({"extra": ""})
        wanted = marker is not None and marker.evaluate({"extra": extra}) and not always
        if (wanted if extra else always) and need.name not in FRAMEWORKS:
            need.marker = None
            yield need


def _unmet(need: Requirement) -> str | None:
    """Explain why a requirement is not met; None if it is."""
    found = _found(need.name)
    if found is None:
        return "it is not installed"
    try:
        met = need.specifier.contains(found.version, prereleases=True)
    except InvalidVersion:
        met = False
    return None if met else f"here is {found.version}"


def _version(name: str) -> str:
    found = _found(name)
    return found.version if found else "?"


def _found(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None
