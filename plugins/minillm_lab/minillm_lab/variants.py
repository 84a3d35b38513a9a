"""Designs of an ablation: plugin sets, and the pairs of sets that measure a plugin's effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from minillm_core import Plan, PlanError, Refusal, build_plan
from minillm_core.studies import Loaded, LoadedPlugin

BASELINE, ALL = "baseline", "all"

MOST_TOGETHER = 2
"""Maximum number of plugins that are left out together with one that they build on."""


@dataclass(frozen=True)
class Variant:
    """A plugin set and its plan."""

    name: str  # "baseline", "+muon", "all", "-muon"
    plan: Plan


@dataclass(frozen=True)
class Comparison:
    """A comparison of two variants: ``having`` a plugin minus ``without`` it."""

    plugin: str
    having: str  # a variant's name
    without: str
    together: tuple[str, ...] = ()  # plugins that build on it, and are left out with it


@dataclass(frozen=True)
class Design:
    """The variants to run, and the pairs to compare."""

    kind: str  # "one at a time", "leave one out", "side by side"
    variants: tuple[Variant, ...]  # in the order of their runs
    comparisons: tuple[Comparison, ...]
    unplanned: Mapping[str, str]  # plugin -> why its effect cannot be measured
    pooled: bool = False  # whether intervals pool the noise of sets with similar losses


def one_at_a_time(loaded: Loaded, plugins: Sequence[LoadedPlugin], judged: Sequence[str]) -> Design:
    """Compare the company plus one judged plugin with the company alone, for each judged plugin.

    Args:
        loaded: settings that name all plugins.
        plugins: all of them: the judged and their company.
        judged: names, in the order of their runs.

    Raises:
        Refusal: one of these sets cannot be planned.
    """
    company = [one.name for one in plugins if one.name not in judged]
    variants = [variant(BASELINE, loaded, plugins, company)]
    for name in judged:
        try:
            variants.append(variant(f"+{name}", loaded, plugins, [*company, name]))
        except PlanError as error:
            ways = []
            if base := _base(name, loaded, plugins, company):
                ways.append(f"add --with {base}, and leave {base} out of --plugins")
            ways += ["--leave-one-out"] * _together(loaded, plugins)
            raise Refusal(
                f"'{name}' cannot be judged alone: {error.what}",
                where=error.where,
                fix=", or ".join(ways)
                or f"{error.fix}; in an ablation, by --with instead of --plugins",
            ) from error
    return Design(
        "one at a time",
        tuple(variants),
        tuple(Comparison(name, f"+{name}", BASELINE) for name in judged),
        {},
    )


def leave_one_out(loaded: Loaded, plugins: Sequence[LoadedPlugin], judged: Sequence[str]) -> Design:
    """Compare all plugins with all but each judged one.

    A plugin that others build on is left out together with them, at most :data:`MOST_TOGETHER`; where more
    build on it, it is listed in ``unplanned``. Intervals pool the noise of sets with similar losses: all but
    a plugin or two are the same in them.

    Args:
        loaded: settings that name all plugins.
        plugins: all of them.
        judged: names, in the order of their runs.

    Raises:
        Refusal: no judged plugin can be left out.
        PlanError: all plugins together cannot be planned.
    """
    names = [one.name for one in plugins]
    variants, comparisons = [variant(ALL, loaded, plugins, names)], []
    unplanned: dict[str, str] = {}
    for name in judged:
        try:
            without, together = _without(name, loaded, plugins)
        except PlanError as error:
            unplanned[name] = error.what
        else:
            variants.append(without)
            comparisons.append(Comparison(name, ALL, without.name, together))
    if not comparisons:
        first, why = next(iter(unplanned.items()))
        raise Refusal(
            "none of the plugins can be left out",
            where=f"without '{first}': {why}",
            fix="--one-at-a-time, --with the plugins that they build on",
        )
    return Design("leave one out", tuple(variants), tuple(comparisons), unplanned, pooled=True)


def _without(
    name: str, loaded: Loaded, plugins: Sequence[LoadedPlugin]
) -> tuple[Variant, tuple[str, ...]]:
    """Plan all plugins but one, and but those that build on it, which planning names; return these too.

    Raises:
        PlanError: of the plan without this one alone, if more build on it or none is named.
    """
    others = [one.name for one in plugins if one.name != name]
    left_out: set[str] = set()
    first: PlanError | None = None
    while True:
        kept = [one for one in others if one not in left_out]
        together = tuple(one for one in others if one in left_out)
        label = "".join(f"-{one}" for one in (name, *together))
        try:
            return variant(label, loaded, plugins, kept), together
        except PlanError as error:
            first = first or error
            building = {*kept}.intersection(error.plugins)
            left_out |= building
            if not building or len(left_out) > MOST_TOGETHER:
                raise first from None


def side_by_side(
    loaded: Loaded,
    plugins: Sequence[LoadedPlugin],
    beside: Mapping[str, Sequence[str]],
    reference: Sequence[str],
) -> Design:
    """Compare each judged plugin beside its own company; equal sets share their runs.

    Args:
        loaded: settings that name all plugins.
        plugins: all of them: the judged and their company.
        beside: judged plugin -> its company.
        reference: the set trained for several lengths.

    Raises:
        PlanError: one of the sets cannot be planned.
    """
    variants = {frozenset(reference): variant(BASELINE, loaded, plugins, reference)}
    comparisons = []
    for name, company in beside.items():
        names = []
        for active in (frozenset((*company, name)), frozenset(company)):
            if active not in variants:
                more, less = sorted(active - {*reference}), sorted({*reference} - active)
                label = "".join([*(f"+{one}" for one in more), *(f"-{one}" for one in less)])
                variants[active] = variant(label, loaded, plugins, sorted(active))
            names.append(variants[active].name)
        comparisons.append(Comparison(name, *names))
    return Design("side by side", tuple(variants.values()), tuple(comparisons), {})


def _base(
    name: str, loaded: Loaded, plugins: Sequence[LoadedPlugin], company: Sequence[str]
) -> str | None:
    """Find a named plugin whose company is enough for another one to be planned; None: no single one is."""
    for one in plugins:
        if one.name not in (name, *company):
            with suppress(PlanError):
                variant(name, loaded, plugins, [*company, one.name, name])
                return one.name
    return None


def _together(loaded: Loaded, plugins: Sequence[LoadedPlugin]) -> bool:
    """Return whether all plugins can be planned together, so that --leave-one-out can be suggested."""
    try:
        variant(ALL, loaded, plugins, [one.name for one in plugins])
    except PlanError:
        return False
    return True


def variant(
    name: str, loaded: Loaded, plugins: Sequence[LoadedPlugin], active: Sequence[str]
) -> Variant:
    """Plan a run with some of its plugins, dropping the options of the others.

    Args:
        name: of the set.
        loaded: settings that name all plugins.
        plugins: all of them, imported.
        active: names of the plugins in the set.

    Raises:
        PlanError: the plan cannot be resolved.
        PluginCodeError: a plugin's code raised.
    """
    options = {one: table for one, table in loaded.config.plugins.items() if one in active}
    config = loaded.config.model_copy(update={"plugins": options})
    specs = {one: spec for one, spec in loaded.specs.items() if one in active}
    chosen = [one for one in plugins if one.name in active]
    return Variant(name, build_plan(replace(loaded, config=config, specs=specs), chosen))
