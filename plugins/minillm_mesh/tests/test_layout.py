"""Sharding of updates: every row once, balanced, and equal on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import minillm_core as minillm
from minillm_core.inspection import Group, Member
from minillm_core.optim.follow import Follow
from minillm_core.optim.stage import Rule, Stage
from minillm_mesh.layout import Layout, cost, cuttable, layout, uneven

ELEMENT = Rule("adamw", "core", (("precondition", "core", Stage("a:b", (("m", "like"),))),))
NARROW = Rule("small", "core", (("precondition", "core", Stage("a:b", (("m", "like:int8"),))),))
SCALAR = Rule("prodigy", "x", (("scale", "x", Stage("a:b", (("d", "scalar"),))),))
MATRIX = Rule("muon", "x", (("orthogonalise", "x", Stage("a:b", (("m", "like"),), "matrix")),))
SHAPES = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)


@st.composite
def groups(draw: st.DrawFn) -> list[Group]:
    """Draw parameter groups of a model; a follower has its leader's shape."""
    found: list[Group] = []
    for number in range(draw(st.integers(1, 6))):
        rule, shape = draw(st.sampled_from([ELEMENT, NARROW, SCALAR, MATRIX])), draw(SHAPES)
        count = draw(st.integers(1, 5)) if rule.stacked else 1
        names = [f"{number}.{i}" for i in range(count)]
        found.append(Group(rule, tuple(Member(name, shape, 1.0, 1.0) for name in names)))
        if not rule.stacked and draw(st.booleans()):
            follow = Follow("x", names[0], 0.5, "x")
            after = Member(f"{number}.after", shape, 1.0, 1.0, follows=follow)
            found.append(Group(rule, (after,)))
    return found


def members(those: Iterable[Group]) -> dict[str, Member]:
    return {member.name: member for group in those for member in group.members}


@given(groups(), st.integers(1, 9), st.booleans())
def test_every_row_has_one_owner(those: list[Group], ranks: int, weights: bool) -> None:
    found = layout(those, ranks, weights=weights)
    assert len(found) == ranks
    for name, member in members(those).items():
        owned = np.zeros(member.shape, int)
        for share in found:
            for part in share:
                if part.name == name:
                    taken = part.of(owned) if member.shape else owned
                    assert taken.shape == part.shape
                    taken += 1  # a view
        assert np.all(owned == 1), name


@given(groups(), st.integers(1, 9), st.booleans())
def test_only_what_may_be_cut_is_cut_and_followers_as_their_leaders(
    those: list[Group], ranks: int, weights: bool
) -> None:
    found, known = layout(those, ranks, weights=weights), members(those)
    may = {m.name for group in those for m in group.members if cuttable(group, m)}
    for share in found:
        parts = {part.name: part for part in share}
        for name, part in parts.items():
            assert part.first is None or (name in may and len(known[name].shape) > 1)
            if follows := known[name].follows:
                leader = parts[follows.leader]
                assert (leader.first, leader.shape) == (part.first, part.shape)


@given(groups(), st.integers(1, 9))
def test_the_largest_share_is_bounded(those: list[Group], ranks: int) -> None:
    """Greedy assignment: no rank has more than the mean plus one indivisible unit."""
    found, known = layout(those, ranks), members(those)
    of = {m.name: group for group in those for m in group.members}
    leader = {name: m.follows.leader if m.follows else name for name, m in known.items()}
    may = {
        name
        for name in known
        if all(cuttable(of[n], known[n]) for n in known if leader[n] == leader[name])
    }
    time = [sum(cost(of[p.name]) for p in share if p.name not in may) for share in found]
    units: dict[str, float] = {}
    for name in known.keys() - may:
        units[leader[name]] = units.get(leader[name], 0.0) + cost(of[name])
    assert max(time) <= sum(time) / ranks + max(units.values(), default=0.0) + 1e-6
    # elements: the uncuttable ones, or the mean plus two rows
    sizes = [sum(part.size for part in share) for share in found]
    whole = [sum(p.size for p in share if p.name not in may) for share in found]
    a_row = max((prod(known[name].shape[1:]) for name in may), default=0) * 2
    assert max(sizes) <= max(max(whole), sum(sizes) / ranks) + 2 * a_row + 1


@given(groups(), st.integers(1, 9))
def test_it_is_the_same_wherever_it_is_computed(those: list[Group], ranks: int) -> None:
    again = [Group(group.rule, group.members) for group in those]
    assert layout(those, ranks) == layout(again, ranks)


def planned(plugins: str, ranks: int) -> tuple[minillm.Plan, Layout]:
    plan = minillm.build_plan(minillm.load(preset="gpt2-124m", plugins=plugins or None))
    return plan, layout(plan.groups, ranks)


@pytest.mark.parametrize("plugins", ["", "muon", "muon,normuon"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_124m_is_divided_evenly(plugins: str, ranks: int) -> None:
    plan, found = planned(plugins, ranks)
    assert uneven(found) < 1.001
    if plugins:  # the matrices of 12 layers by their time
        of = {m.name: group for group in plan.groups for m in group.members}
        time = [sum(cost(of[p.name]) for p in share if of[p.name].rule.stacked) for share in found]
        assert max(time) * ranks / sum(time) < 1.03


def test_a_larger_matrix_costs_more_than_its_bytes() -> None:
    def of(rule: Rule, *shape: int) -> float:
        return cost(Group(rule, (Member("w", shape, 1.0, 1.0),)))

    assert of(ELEMENT, 512, 512) == 4 * 5 * 512 * 512  # parameter, gradient, write; state both ways
    assert of(MATRIX, 512, 512) - of(ELEMENT, 512, 512) == pytest.approx(0.3 * 512**3)
