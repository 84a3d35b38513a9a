"""The tables of docs/compose.md: every pair of this repository's plugins, planned.

python -m tools.compose_page             # say whether the page is as it should be
python -m tools.compose_page --write     # write it

What stands between ``<!-- made: NAME -->`` and ``<!-- /made -->`` is made here; the rest of the page
is written by hand.
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
"""Of the pairs that a sample holds: others come with another seed, and with a new plugin."""

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "domain_tokens": {"domains": ["code", "text"]},
    "role_lr": {"embedding": 2.0},
}
"""Of plugins that do nothing without any."""


@dataclass(frozen=True)
class Outcomes:
    """What planning said."""

    needs: Mapping[str, tuple[str, ...]]  # plugin -> those without which it is refused
    refused: Mapping[tuple[str, str], Refusal]  # pairs, each with what its two need
    pairs: int  # that there are, the refused ones included


@cache
def outcomes(sampled: int | None = None) -> Outcomes:
    """Plan every pair with default options, for the model of preset tiny.

    Args:
        sampled: plan those that the page says are refused, and so many of all, drawn with :data:`SEED`.

    Raises:
        Refusal: a plugin is refused alone and beside each of the others.
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
    """Read the pairs that the page says are refused."""
    return {*re.findall(r"^\| `(\w+)`, `(\w+)` \| ", PATH.read_text("utf-8"), re.MULTILINE)}


def _needs(name: str, loaded: Mapping[str, LoadedPlugin], config: Config) -> tuple[str, ...]:
    """Nothing, or the first plugin beside which it can be planned."""
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
    """Say how many pairs there are, in a sentence."""
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
    """List each refused pair with the reason, and the way out as planning says it."""
    rows = [
        (f"`{a}`, `{b}`", refusal.what, str(refusal.fix or ""))
        for (a, b), refusal in found.refused.items()
    ]
    return table(("pair", "what planning says", "the way out"), rows)


def page(sampled: int | None = None) -> Page:
    """Return the page as :func:`outcomes` make it."""
    made = {"summary": summary, "needs": requirements, "refused": refusals}
    return Page(
        PATH, {name: lambda part=part: part(outcomes(sampled)) for name, part in made.items()}
    )


if __name__ == "__main__":
    main(__doc__, page())
