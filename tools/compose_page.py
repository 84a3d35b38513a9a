"""The tables of docs/compose.md: every pair of this repository's plugins, planned.

python -m tools.compose_page             # check that the page is up to date
python -m tools.compose_page --write     # write it

Text between ``<!-- made: NAME -->`` and ``<!-- /made -->`` is generated; the rest of the page is
written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from random import Random
from typing import Any

from minillm_core.backends.bind import kernel_preflight
from minillm_core.config.load import load as load_config
from minillm_core.config.schema import Config
from minillm_core.errors import Refusal
from minillm_core.plan import build_plan
from minillm_core.plugins.manager import LoadedPlugin, load
from tools.markdown import table
from tools.pages import Page, main
from tools.repository import ROOT, ours

__all__ = ["Outcomes", "listed", "outcomes", "page"]

PATH = ROOT / "docs" / "compose.md"

SEED = 18
"""Seed of the sampled pairs: another seed or a new plugin draws other pairs."""

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "domain_tokens": {"domains": ["code", "text"]},
    "role_lr": {"embedding": 2.0},
}
"""Options for plugins that have no effect at their defaults."""


@dataclass(frozen=True)
class Outcomes:
    """Results of planning every pair."""

    needs: Mapping[str, tuple[str, ...]]  # plugin -> plugins without which it is refused
    refused: Mapping[tuple[str, str], Refusal]  # pairs, each planned together with its requirements
    pairs: int  # number of pairs, including refused ones


@cache
def outcomes(sampled: int | None = None) -> Outcomes:
    """Plan every pair with default options, for the model of preset tiny.

    Args:
        sampled: plan the pairs that the page lists as refused, and this many of all, drawn with :data:`SEED`.

    Raises:
        Refusal: a plugin is refused alone and together with each of the others.
    """
    config = load_config(preset="tiny", default_preset=lambda: ("tiny", "test")).config
    loaded = {one.name: one for one in load(ours(), OPTIONS)}
    needs = {name: _needs(name, loaded, config) for name in loaded}
    refused, pairs = {}, list(combinations(loaded, 2))
    planned = {*pairs} if sampled is None else {*Random(SEED).sample(pairs, sampled), *listed()}
    for pair in (one for one in pairs if one in planned):
        names = {*pair, *(other for name in pair for other in needs[name])}
        try:
            _plan(names, loaded, config)
        except Refusal as refusal:
            refused[pair] = refusal
    return Outcomes({name: others for name, others in needs.items() if others}, refused, len(pairs))


def listed() -> set[tuple[str, str]]:
    """Read the pairs that the page lists as refused."""
    return {*re.findall(r"^\| `(\w+)`, `(\w+)` \| ", PATH.read_text("utf-8"), re.MULTILINE)}


def _needs(name: str, loaded: Mapping[str, LoadedPlugin], config: Config) -> tuple[str, ...]:
    """Return no plugins, or the first plugin with which it can be planned."""
    refusals = []
    for others in ((), *((other,) for other in loaded if other != name)):
        try:
            _plan({name, *others}, loaded, config)
        except Refusal as refusal:
            refusals.append(refusal)
        else:
            return others
    raise refusals[0]


def _plan(names: set[str], loaded: Mapping[str, LoadedPlugin], config: Config) -> None:
    kernel_preflight(build_plan(config, [loaded[name] for name in sorted(names)]))


def summary(found: Outcomes) -> str:
    """Summarise the number of pairs in a sentence."""
    return (
        f"{len(ours())} plugins make {found.pairs} pairs: {found.pairs - len(found.refused)} are "
        f"planned, {len(found.refused)} are refused."
    )


def requirements(found: Outcomes) -> str:
    """List which plugins build on which."""
    rows = [
        (f"`{name}`", ", ".join(f"`{other}`" for other in others))
        for name, others in found.needs.items()
    ]
    return table(("plugin", "needs"), rows)


def refusals(found: Outcomes) -> str:
    """List each refused pair with the error and its fix."""
    rows = [
        (f"`{a}`, `{b}`", refusal.what, str(refusal.fix or ""))
        for (a, b), refusal in found.refused.items()
    ]
    return table(("pair", "why planning refuses it", "fix"), rows)


def page(sampled: int | None = None) -> Page:
    """Generate the page from :func:`outcomes`."""
    made = {"summary": summary, "needs": requirements, "refused": refusals}
    return Page(
        PATH, {name: lambda part=part: part(outcomes(sampled)) for name, part in made.items()}
    )


if __name__ == "__main__":
    main(__doc__, page())
