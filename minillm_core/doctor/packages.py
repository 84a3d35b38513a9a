"""Distributions and plugins: what they need is there, they are of one version, none is broken."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution, entry_points

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion

from minillm_core.doctor.finding import Finding
from minillm_core.install import FRAMEWORKS, pip_line
from minillm_core.plugins.discover import GROUP, installed_plugins
from minillm_core.plugins.first_party import FIRST_PARTY

__all__ = ["CORE", "package_findings"]

CORE = "minillm-core"

FOR_NVIDIA = ("cuda",)
"""Extras that no other machine has a use for."""

READERS = ("transformers", "mlx-lm")

OURS = {CORE, *(requirement.partition("[")[0] for requirement in FIRST_PARTY.values())}


def package_findings(*, nvidia: bool) -> Iterator[Finding]:
    """Of the core, of every distribution that offers plugins, and of the plugins.

    Args:
        nvidia: one of its GPUs is here; an extra called ``cuda`` is of use with one alone.
    """
    core = _found(CORE)
    if core is None:
        yield Finding("minillm", "broken", f"{CORE} is not installed", pip_line(CORE))
        return
    offering = {
        point.dist.name: point.dist for point in entry_points(group=GROUP) if point.dist is not None
    }
    others = [offering[name] for name in sorted(offering) if name != CORE]
    yield from _core(core)
    yield from _versions(core, [one for one in others if one.name in OURS])
    for one in others:
        yield from _needs(one, () if nvidia else FOR_NVIDIA)
    yield from _plugins()
    yield from _readers()


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


def _versions(core: Distribution, ours: Iterable[Distribution]) -> Iterator[Finding]:
    """Ours are released together."""
    other = [one for one in ours if one.version != core.version]
    if other:
        them = ", ".join(f"{one.name} {one.version}" for one in other)
        names = (core.name, *(one.name for one in other))
        what = f"{them} beside {CORE} {core.version}: they are made for each other's version"
        yield Finding("minillm", "warning", what, pip_line(*names, upgrade=True))


def _needs(one: Distribution, useless: Container[str]) -> Iterator[Finding]:
    """What a distribution of plugins requires, and what its extras would, but for useless ones."""
    called = f"{one.name} {one.version}"
    for need in _requirements(one):
        if why := _unmet(need):
            what = f"{called} needs {need}: {why}"
            both = (one.name, CORE) if need.name == CORE else (str(need),)
            yield Finding(one.name, "warning", what, pip_line(*both, upgrade=need.name == CORE))
    for extra in one.metadata.get_all("Provides-Extra") or ():
        lacking = [need for need in _requirements(one, extra) if _unmet(need)]
        if lacking and extra not in useless:
            what = f"its extra '{extra}' needs {', '.join(map(str, lacking))}"
            yield Finding(one.name, "missing", what, pip_line(f"{one.name}[{extra}]"))


def _plugins() -> Iterator[Finding]:
    entries = installed_plugins()
    sound = [entry for entry in entries if not entry.broken]
    yield Finding("plugins", "ok", f"{len(sound)} installed: minillm plugins list")
    for entry in entries:
        if entry.broken:
            what = f"'{entry.name}' of {entry.offered_by} cannot be used: {entry.broken}"
            line = pip_line(entry.distribution, upgrade=True)
            yield Finding("plugins", "warning", what, line)


def _readers() -> Iterator[Finding]:
    """What opens an exported model, for those who want it."""
    there = [f"{name} {_version(name)}" for name in READERS if _found(name)]
    if there:
        what = f"{', '.join(there)} can open what minillm export writes"
        yield Finding("export", "ok", what)
    else:
        what = f"neither {' nor '.join(READERS)} is here to open what minillm export writes"
        yield Finding("export", "missing", what, pip_line(READERS[0]))


def _requirements(one: Distribution, extra: str = "") -> Iterator[Requirement]:
    """Those that count here, without or with one extra alone; frameworks are looked at apart."""
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
    """Why a requirement is not met; None where it is."""
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
